"""Writes of masked elements to the elements of the same mask, whose number depends on values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import shardfn as sf
from shardfn import P

torch.manual_seed(0)
X = torch.randn(4, 3, dtype=torch.float64)
Fn = Callable[[torch.Tensor], torch.Tensor]


def written(write: Callable[[torch.Tensor, torch.Tensor], None], *, zeros: bool = False) -> Fn:
    """The function that returns a copy of its argument, or zeros, after a write."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x) if zeros else x * 1
        write(x, y)
        return y

    return fn


def elements(x: torch.Tensor, y: torch.Tensor) -> None:
    mask = x > 0
    y[mask] = x[mask]


def rows(x: torch.Tensor, y: torch.Tensor) -> None:
    mask = x.sum(1) > 0
    y[mask] = x[mask]


def a_mask_for_each_side(x: torch.Tensor, y: torch.Tensor) -> None:
    y[~(x > 0) & (x < 1)] = x[~(x > 0) & (x < 1)]


def added(x: torch.Tensor, y: torch.Tensor) -> None:
    mask = x > 0
    y[mask] += x[mask]


def scaled(x: torch.Tensor, y: torch.Tensor) -> None:
    y[y.sum(1) > 0] *= 2


def twice(x: torch.Tensor, y: torch.Tensor) -> None:
    y[y > 0] *= -1
    y[y < 0] += 10


def not_defined_elsewhere(x: torch.Tensor, y: torch.Tensor) -> None:
    y[x > 0] = x[x > 0].log() + 1 / x[x > 0].sqrt()


def in_place_between(x: torch.Tensor, y: torch.Tensor) -> None:
    mask = x > 0
    part = x[mask]
    part += 1
    part.mul_(3)
    y[mask] = part * 2


def read_before_a_write(x: torch.Tensor, y: torch.Tensor) -> None:
    mask, z = x > 0, x * 2
    part = z[mask]
    z.zero_()
    y[mask] = part


def of_bools(x: torch.Tensor, y: torch.Tensor) -> None:
    z = x > 1
    z[y > 0] = z[y > 0].clone()
    y.add_(z)


WRITES: dict[str, Fn] = {
    "elements": written(elements),
    "of zeros": written(elements, zeros=True),
    "rows": written(rows, zeros=True),
    "a mask for each side": written(a_mask_for_each_side, zeros=True),
    "added": written(added),
    "scaled": written(scaled),
    "twice": written(twice),
    "not defined elsewhere": written(not_defined_elsewhere),
    "in place between": written(in_place_between),
    "read before a write": written(read_before_a_write, zeros=True),
    "of bools": written(of_bools),
}


@pytest.mark.parametrize("name", WRITES)
def test_masked_elements_go_where_they_come_from(name: str) -> None:
    fn = WRITES[name]
    x = X.clone().requires_grad_()
    loss = lambda x: fn(x).sin().sum()
    (slope,) = torch.autograd.grad(loss(x), x)
    for backend in ("aten", "inductor"):
        torch.testing.assert_close(sf.jit(fn, backend=backend)(X), fn(X), rtol=0, atol=1e-13)
    torch.testing.assert_close(sf.grad(loss)(X), slope, rtol=0, atol=1e-13)
    with sf.fake_world(3):
        step = sf.shard(sf.grad(loss), sf.make_mesh((3,), ("dp",)), P("dp"), backend="aten")
        torch.testing.assert_close(sf.full(step(X)), slope, rtol=0, atol=1e-13)


def another_mask(x: torch.Tensor, y: torch.Tensor) -> None:
    mask = x > 0
    part = x[mask]
    mask[0] = False
    y[mask] = part


def a_mask_of_new_values(x: torch.Tensor, y: torch.Tensor) -> None:
    part = y[y > 0]
    y += 5
    y[y > 0] = part


def a_sum(x: torch.Tensor, y: torch.Tensor) -> None:
    mask = x > 0
    y[mask] = x[mask].sum() * x[mask]


def read_otherwise(x: torch.Tensor, y: torch.Tensor) -> None:
    mask = x > 0
    part = x[mask]
    y[mask] = part
    y += part.mean()


def another_dtype(x: torch.Tensor, y: torch.Tensor) -> None:
    mask = x > 0
    y[mask] = x[mask].long()


REFUSED: dict[str, Fn] = {
    "another mask": written(another_mask),
    "a mask of new values": written(a_mask_of_new_values),
    "a sum": written(a_sum),
    "read otherwise": written(read_otherwise),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("transform", [sf.jit, lambda fn: sf.grad(lambda x: fn(x).sum())])
def test_other_writes_of_masked_elements_are_refused(name: str, transform: Fn) -> None:
    with pytest.raises(sf.CaptureError, match="result depends on the values of tensors"):
        transform(REFUSED[name])(X)


def test_a_write_of_another_dtype_is_an_error_as_in_torch() -> None:
    fn = written(another_dtype)
    for call in (fn, sf.jit(fn)):
        with pytest.raises((RuntimeError, sf.CaptureError)):
            call(X)
