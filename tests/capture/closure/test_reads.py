"""Reads outside of the arguments: whether they would give the same now, and what changed."""

from __future__ import annotations

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
