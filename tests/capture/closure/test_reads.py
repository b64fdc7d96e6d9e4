"""Reads outside of the arguments: whether they would give the same now, and what changed."""

from __future__ import annotations

import importlib.util
import runpy
import sys
import types
from typing import Any

import pytest
import torch

import shardfn as sf

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


LOADED = """
K = 2.0

class Scaled:
    def __init__(self, k):
        self.k = k

    def of(self, x):
        return x * self.k * K

def helper(x):
    return x * K

def fn(x):
    return helper(x) + Scaled(3.0).of(x)
"""


def loaded(way: str, path: Any) -> dict[str, Any]:
    """The globals of a file that sys.modules does not have, or has another module in place of."""
    path.write_text(LOADED)
    if way == "runpy":
        return runpy.run_path(str(path))
    if way == "exec":
        scope: dict[str, Any] = {"__name__": "loaded_file"}
        exec(compile(LOADED, "<string>", "exec"), scope)
        return scope["fn"].__globals__
    spec: Any = importlib.util.spec_from_file_location("loaded_file", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


@pytest.mark.parametrize("is_taken", [False, True], ids=["", "another has the name"])
@pytest.mark.parametrize("way", ["runpy", "exec", "importlib"])
def test_functions_of_a_file_have_its_globals(
    way: str, is_taken: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope = loaded(way, tmp_path / "loaded_file.py")
    fn = scope["fn"]
    if is_taken:
        other = types.ModuleType(fn.__globals__["__name__"])
        exec(LOADED.replace("2.0", "7.0"), vars(other))
        monkeypatch.setitem(sys.modules, other.__name__, other)
    x = torch.arange(3.0, dtype=torch.float64)
    call = sf.jit(lambda x: fn(x), backend="aten")
    torch.testing.assert_close(call(x), 8 * x)
    torch.testing.assert_close(sf.grad(lambda x: fn(x).sum())(x), torch.full_like(x, 8))
    fn.__globals__["K"] = 5.0
    torch.testing.assert_close(call(x), 20 * x)
