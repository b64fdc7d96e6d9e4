"""Tensors that hold other tensors: opened, and closed around others."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing  # noqa: F401

from shardfn._compat.dynamo.shells import closed, opened, registered


class Scaled(torch.Tensor):
    """A tensor with a scale of its own, and a note."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, note: Any) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)
        made.data_, made.scale, made.note = data, scale, note
        return made

    def __tensor_flatten__(self):
        return ["data_", "scale"], self.note

    @staticmethod
    def __tensor_unflatten__(held, note, size, stride):
        return Scaled(held["data_"], held["scale"], note)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return NotImplemented


X, S = torch.ones(2, 3), torch.ones(1)


def test_a_tensor_is_opened_and_closed_around_others() -> None:
    held, shell = opened(Scaled(X, S, {"k": 1}))
    assert held[0] is X and held[1] is S
    assert (shell.shape, shell.names) == ((2, 3), ("data_", "scale"))
    assert repr(shell) == "Scaled(data_, scale; {'k': 1})"
    made = closed(shell, [2 * X, S])
    assert isinstance(made, Scaled) and torch.equal(made.data_, 2 * X)
    assert made.note == {"k": 1}


def test_a_context_is_compared_as_text_as_it_was() -> None:
    note = {"k": 1}
    first = opened(Scaled(X, S, note))[1]
    assert first == opened(Scaled(X, S, {"k": 1}))[1]
    assert first != opened(Scaled(X, S, {"k": True}))[1]
    note["k"] = 2
    assert closed(first, [X, S]).note == {"k": 1}


class Settings(dict[str, Any]):
    pass


class Batch(UserDict[str, Any]):
    def __init__(self, items: Any = (), note: str = "", kept: Any = None) -> None:
        super().__init__(items)
        self.note, self.kept = note, kept


def test_mappings_are_opened_and_closed_with_their_attributes() -> None:
    for x in (Settings(a=X, b=S), Batch({"a": X, "b": S}, "n", [S])):
        way = registered(type(x))
        assert way is not None and not way.has_names
        children, context, names = way.opened(x)
        assert names[:2] == ["a", "b"] and children[0] is X
        again = way.closed(context, children)
        assert type(again) is type(x) and vars(again) == vars(x)
        assert dict(again) == dict(x)


def test_classes_that_are_no_containers() -> None:
    for kind in (dict, list, int, str, torch.Tensor, OrderedDict, Scaled, object):
        way = registered(kind)
        assert way is None or kind is OrderedDict


def test_words_of_a_batch_are_left_out() -> None:
    kind = type("BatchEncoding", (Batch,), {})
    x = kind({"a": X})
    x._encodings = [object()]
    way = registered(kind)
    assert way is not None
    children, context, _ = way.opened(x)
    assert way.closed(context, children)._encodings is None
