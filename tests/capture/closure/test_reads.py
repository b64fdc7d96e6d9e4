"""Reads outside of the arguments: whether they would give the same now, and what changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import _compat
from shardfn.capture.closure.reads import Reads, held_reads


class Config:
    def __init__(self, k: Any) -> None:
        self.k = k


def reads(holder: dict[str, Any], *steps: Any, kind: str = "CONSTANT_MATCH", key=None):
    """A record of one read from a dict."""
    path = (("scope", _compat.Itself(holder)), *steps)
    return Reads(lambda: None, [_compat.Read(path, kind, key)])


def test_an_unchanged_place_is_the_same() -> None:
    holder = {"k": 1}
    found = reads(holder, ("item", "k"))
    assert found.same() and found.changed() == []


def test_a_changed_constant_is_found_with_both_values() -> None:
    holder: dict[str, Any] = {"k": 1}
    found = reads(holder, ("item", "k"))
    for new in (True, 2, "text"):
        holder["k"] = new
        assert not found.same()
        ((_, old, now),) = found.changed()
        assert (old, now) == (1, new)
    holder["k"] = 1
    assert found.same()


def test_a_missing_place_has_changed() -> None:
    holder = {"k": 1}
    found = reads(holder, ("item", "k"))
    del holder["k"]
    assert not found.same()


def test_another_object_with_equal_reads_is_the_same() -> None:
    holder = {"cfg": Config(3)}
    steps = (("item", "cfg"), ("attr", "k"))
    found = reads(holder, *steps)
    holder["cfg"] = Config(3)
    assert not found.check() or found.same()
    holder["cfg"] = Config(4)
    assert not found.same()


def test_the_length_of_a_list_counts() -> None:
    holder = {"xs": [1, 2]}
    found = reads(holder, ("item", "xs"), kind="SEQUENCE_LENGTH")
    assert found.same()
    holder["xs"].append(3)
    assert not found.same()


def test_a_setting_is_asked_again() -> None:
    holder = {"f": torch.is_grad_enabled}
    found = reads(holder, ("item", "f"))
    assert found.same()
    with torch.no_grad():
        assert not found.same()


def test_a_tensor_counts_by_shape_dtype_and_requires_grad() -> None:
    holder = {"x": torch.ones(2)}
    found = reads(holder, ("item", "x"), kind="TENSOR_MATCH")
    assert found.same()
    holder["x"].requires_grad_()
    assert not found.same()


def test_an_object_that_is_gone_is_lost_and_a_constant_is_not() -> None:
    holder: dict[str, Any] = {"x": torch.ones(2)}
    found = reads(holder, ("item", "x"), kind="TENSOR_MATCH")
    holder["x"] = torch.ones(2)
    assert found.is_lost()
    numbers = {"k": 1}
    other = reads(numbers, ("item", "k"))
    numbers["k"] = 2
    assert not other.is_lost()


def test_libraries_are_not_read() -> None:
    found = reads({"torch": torch}, ("item", "torch"), ("attr", "float32"))
    assert (found.same() and found.check is None) or found.same()


SCALE = 3
MUTABLE = [1]


def test_constants_of_functions_that_are_kept_whole() -> None:
    rate = 0.5

    def held(x: torch.Tensor) -> Any:
        return x * SCALE * rate * len(MUTABLE)

    names = [read.path[-1][1] for read in held_reads([held, torch.relu, 3])]
    assert names == ["__code__", "SCALE", 0, "rate"], "of a list, each constant in it"


TABLE = torch.arange(3.0)


class _Held:
    """An object with a tensor."""

    def __init__(self, w: torch.Tensor) -> None:
        self.w = w


@pytest.mark.parametrize("transform", [sf.jit, sf.grad])
def test_each_of_two_places_of_one_tensor_is_looked_at(
    transform: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = _Held(TABLE), _Held(TABLE)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x * TABLE * first.w * second.w.exp()).sum()

    plain = torch.func.grad(fn) if transform is sf.grad else fn
    x = torch.ones(3)
    call = sf.jit(transform(fn), backend="aten")
    call(x)
    first.w = torch.ones(3)
    torch.testing.assert_close(call(x), plain(x))
    second.w = torch.ones(3)
    torch.testing.assert_close(call(x), plain(x))
    monkeypatch.setitem(globals(), "TABLE", torch.ones(3) * 2)
    torch.testing.assert_close(call(x), plain(x))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_what_a_closed_over_module_has_is_read_again(requires_grad: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
    model.requires_grad_(requires_grad)
    model.scale = 1.0  # type: ignore[assignment]
    x = torch.ones(3, 2)
    fn = sf.jit(lambda x: model(x) * model.scale, backend="aten")
    for change in (
        lambda: None,
        lambda: setattr(model, "scale", 3.0),
        lambda: model.__setitem__(1, torch.nn.ReLU()),
        lambda: model.append(torch.nn.Softplus()),
        lambda: model.__setitem__(0, torch.nn.Linear(2, 2)),
    ):
        change()
        torch.testing.assert_close(fn(x), model(x) * model.scale)
