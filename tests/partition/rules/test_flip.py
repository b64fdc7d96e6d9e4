"""flip along a sharded dim: a rank sends its chunk to the rank opposite, and nobody gathers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import close
from ranks import run_ranks
from worlds import simulated

import shardfn as sf
from shardfn import P

Fn = Callable[[torch.Tensor], torch.Tensor]
FNS: dict[str, Fn] = {
    "one dim": lambda x: x.sin().flip(1),
    "all dims": lambda x: x.sin().flip((0, 1, 2)),
    "another dim": lambda x: x.sin().flip(2),
    "read again": lambda x: x.sin().flip(1) * x.flip(0).flip(1).cos(),
    "integers": lambda x: (x * 9).int().flip(1) + x,
}


def drawn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def step(fn: Fn) -> Any:
    """The value, the gradient and the result of a function."""

    def loss(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = fn(x)
        weights = torch.arange(y.numel()).view(y.shape)
        return (y * weights).mean(), y

    return sf.value_and_grad(loss, has_aux=True)


@pytest.mark.parametrize(("size", "n"), [(16, 2), (17, 3), (9, 4), (5, 8)])  # uneven, empty
@pytest.mark.parametrize("name", FNS)
def test_values_and_gradients_are_those_of_one_device(name: str, size: int, n: int) -> None:
    x = drawn(2, size, 3)
    with simulated(cp=n) as mesh:
        found = sf.shard(step(FNS[name]), mesh, P(None, "cp"), backend="aten")(x)
        close(sf.full(found), step(FNS[name])(x))


@pytest.mark.parametrize(
    "spec", [P("dp", "cp"), P(None, "cp", "dp"), P(None, ("cp", "dp")), P(None, sf.zigzag("cp"))]
)
@pytest.mark.parametrize("name", FNS)
def test_axes_on_other_dims_and_two_on_one(name: str, spec: P) -> None:
    x = drawn(4, 24, 6)
    with simulated(dp=2, cp=3) as mesh:
        found = sf.shard(step(FNS[name]), mesh, spec, backend="aten")(x)
        close(sf.full(found), step(FNS[name])(x))


@pytest.mark.parametrize(("size", "pieces"), [(4096, [1024]), (4094, [1022, 2])])
def test_a_rank_sends_its_chunk_once(size: int, pieces: list[int]) -> None:
    x = sf.ShapeDtype((6, size, 8))
    with sf.fake_world(4, numerics=False):
        mesh = sf.make_mesh((4,), ("cp",))
        lowered = sf.shard(FNS["one dim"], mesh, P(None, "cp"), backend="aten").lower(x)
    sent = [(c.kind, c.axis, c.nbytes) for c in lowered.collectives]
    assert sent == [("ppermute", "cp", 6 * 8 * 4 * rows) for rows in pieces]
    assert not lowered.fallbacks


def run(backend: str) -> Any:
    mesh = sf.make_mesh((2,), ("cp",))
    fs = [sf.shard(step(fn), mesh, P(None, "cp"), backend=backend) for fn in FNS.values()]
    return [sf.full(f(drawn(2, size, 3))) for f in fs for size in (16, 2)]


def test_gloo_computes_what_the_simulator_does() -> None:
    with sf.fake_world(2):
        expected = run("aten")
    for real in run_ranks(2, run, "aten"):
        torch.testing.assert_close(real, expected, rtol=0, atol=0)


def test_compiled_on_gloo_it_is_one_device() -> None:
    wanted = [step(fn)(drawn(2, size, 3)) for fn in FNS.values() for size in (16, 2)]
    for real in run_ranks(2, run, "inductor"):
        close(real, wanted)
