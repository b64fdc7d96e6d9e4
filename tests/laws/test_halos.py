"""Beyond the ends of a dim a halo is zero, whatever is read there: inputs, constants, random
numbers, tangents, and what is computed from them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import shardfn as sf
from shardfn import P

W = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(2, 2, 3)
INPUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the input": lambda x: x,
    "ones": torch.ones_like,
    "a number": lambda x: torch.full(x.shape, 2.0, dtype=x.dtype),
    "positions": lambda x: torch.arange(x.shape[-1], dtype=x.dtype).expand_as(x),
    "random numbers": torch.rand_like,
    "dropout of ones": lambda x: F.dropout(torch.ones_like(x), 0.5),
    "cosines": lambda x: torch.cos(torch.cos(x)),
    "a comparison": lambda x: (x > -9).to(x.dtype),
    "another number where it is negative": lambda x: torch.where(x > 0, x, 1.0),
    "one padded by a number": lambda x: F.pad(x, (1, 1), value=3.0)[..., 1:-1],
}
WINDOWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conv": lambda x: F.conv1d(x, W, padding=1),
    "strided": lambda x: F.conv1d(x, W, padding=1, stride=2).sum() * x,
    "transposed": lambda x: F.conv_transpose1d(x, W, padding=1),
    "mean": lambda x: F.avg_pool1d(x, 3, 1, 1),
    "maximum": lambda x: F.max_pool1d(x - 5, 3, 1, 1),
}


def step(read: str, window: str) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    """The value, the gradient and the tangent of ones."""

    def value(x: torch.Tensor) -> torch.Tensor:
        return WINDOWS[window](INPUTS[read](x)) * x

    def values(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gradient = sf.grad(lambda x: (value(x) ** 2).sum())(x)
        return (value(x), gradient, *sf.jvp(value, (x,), (torch.ones_like(x),)))

    return values


CASES = [*((read, "conv") for read in INPUTS), *(("ones", name) for name in list(WINDOWS)[1:])]


@pytest.mark.parametrize(("read", "window"), CASES)
def test_what_is_read_at_the_ends_is_that_of_one_device(read: str, window: str) -> None:
    x = torch.linspace(-2, 1, 14, dtype=torch.float64).reshape(1, 2, 7)
    sf.random.state.seed(1)
    expected = sf.jit(step(read, window), backend="aten")(x)
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("a",))
        placed = sf.shard(step(read, window), mesh, P(None, None, "a"), backend="aten")
        sf.random.state.seed(1)
        torch.testing.assert_close(sf.full(placed(x)), expected)
