"""Tensors that hold other tensors: opened, and closed around others."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing  # noqa: F401

from shardfn._compat.dynamo.shells import closed, opened


class Scaled(torch.Tensor):
    """A tensor with a scale of its own, and a note."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, note: Any) -> Any:
        made = torch.Tensor._make_wrapper_subclass(
            cls, data.shape, dtype=data.dtype
        )
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
