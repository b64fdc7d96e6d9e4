"""Custom ops that a capture cannot take are refused by name, and what the error says works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P

X = torch.arange(6.0).reshape(2, 3)
LIBRARY = torch.library.Library("refused_ops", "FRAGMENT")
LIBRARY.define("of_library(Tensor x) -> Tensor")
LIBRARY.impl("of_library", lambda x: 2 * x, "CPU")


@torch.library.custom_op("refused_ops::unregistered", mutates_args=())
def unregistered(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@torch.library.custom_op("refused_ops::double_", mutates_args=("x",))
def double_(x: torch.Tensor) -> None:
    x.mul_(2)


@torch.library.custom_op("refused_ops::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    return x.mul_(2)


@torch.library.register_fake("refused_ops::double")
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def written(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    double_(y)
    return y


WRITES = (
    "the custom op refused_ops::double_ writes to its arguments",
    "an op with mutates_args=(), which returns the new value: let it write to x.clone()",
)


def without_fake(name: str) -> tuple[str, str]:
    return (
        f"the custom op refused_ops::{name} has no fake implementation, which gives the shapes of "
        "its results",
        f'@torch.library.register_fake("refused_ops::{name}") of a function of the same '
        "arguments, which returns torch.empty_like(x), or an empty tensor of the shape of the "
        "result",
    )


Cause = tuple[Callable[[Any], Any], tuple[str, str]]
REFUSED: dict[str, Cause] = {
    "no fake": (unregistered, without_fake("unregistered")),
    "no fake, of a library": (
        lambda x: torch.ops.refused_ops.of_library(x),
        without_fake("of_library"),
    ),
    "writes": (written, WRITES),
}
AROUND: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "jit": lambda f: sf.jit(f, backend="aten"),
    "grad": lambda f: sf.grad(lambda x: f(x).sum()),
    "vmap": sf.vmap,
    "shard": lambda f: sf.shard(f, sf.make_mesh((2,), ("dp",)), P("dp"), backend="aten"),
    "module": lambda f: lambda x: sf.jit(sf.functionalize(Around(f))[0])({}, {}, x),
}


class Around(torch.nn.Module):
    def __init__(self, f: Any) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Any) -> Any:
        return self.f(x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", REFUSED)
def test_a_custom_op_is_refused_by_its_name_and_with_what_it_needs(name: str, around: str) -> None:
    f, (got, fix) = REFUSED[name]
    with sf.fake_world(2), pytest.raises(sf.CaptureError) as caught:
        AROUND[around](f)(X)
    assert got in str(caught.value).splitlines()[0] and caught.value.fix == fix
    assert caught.value.source is not None and caught.value.source.startswith(__file__)


def test_what_the_errors_say_to_write_works() -> None:
    torch.testing.assert_close(sf.jit(double, backend="aten")(X), written(X))
