"""A write through a view equals the plain one, or is refused: windows that leave elements out, or
overlap, included.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import shardfn as sf
from shardfn.errors import ShardError

VIEWS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "windows with a rest": (lambda y: y.unfold(0, 2, 2), False),
    "windows with gaps": (lambda y: y.unfold(0, 2, 3), False),
    "windows that overlap": (lambda y: y.unfold(0, 3, 1), False),
    "windows of rows": (lambda y: y[:6].view(3, 2).unfold(0, 2, 2), False),
    "one window": (lambda y: y.unfold(0, 2, 2)[1], False),
    "strides that overlap": (lambda y: y.as_strided((3, 2), (1, 1)), False),
    "strides of zero": (lambda y: y.as_strided((3,), (0,)), False),
    "expanded": (lambda y: y[:1].expand(3), False),
    "all windows": (lambda y: y[1:].unfold(0, 2, 2), True),
    "strides with gaps": (lambda y: y.as_strided((2, 2), (3, 1)), True),
    "stepped": (lambda y: y[::2], True),
    "diagonal": (lambda y: y[:4].view(2, 2).diagonal(), True),
    "transposed": (lambda y: y[:6].view(2, 3).t()[1:], True),
}
WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "mul_": lambda v: v.mul_(2),
    "copy_": lambda v: v.copy_(torch.arange(v.numel()).view(v.shape)),
    "zero_": torch.Tensor.zero_,
}


@pytest.mark.parametrize("view", list(VIEWS))
def test_a_write_through_a_view_is_the_plain_one_or_refused(view: str) -> None:
    check(view, "mul_")


@pytest.mark.parametrize("write", ["copy_", "zero_"])
@pytest.mark.parametrize("view", list(VIEWS))
def test_so_are_other_writes(view: str, write: str) -> None:
    check(view, write)


def check(view: str, write: str) -> None:
    through, runs = VIEWS[view]

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        WRITES[write](through(y))
        return y

    x = torch.arange(1.0, 8.0, dtype=torch.float64)
    if not runs:
        with pytest.raises(ShardError):
            sf.jit(fn, backend="aten")(x)
        return
    assert torch.equal(sf.jit(fn, backend="aten")(x), fn(x))
