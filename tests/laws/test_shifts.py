"""A shift along a sharded dim, as of tokens by one, reads a halo: values and gradients of one
device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import close
from ranks import run_ranks

import shardfn as sf
from shardfn import P

SHIFTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "later": lambda x: F.pad(x, (0, 0, 1, -1)),
    "earlier": lambda x: F.pad(x, (0, 0, -1, 1)),
    "by two, beside features": lambda x: F.pad(x, (1, 0, 2, -2))[..., 1:],
}
MESHES: dict[str, tuple[dict[str, int], P]] = {
    "line": ({"cp": 4}, P(None, "cp")),
    "grid": ({"dp": 2, "cp": 3}, P("dp", "cp")),
    "two axes": ({"a": 2, "b": 2}, P(None, ("a", "b"))),
    "zigzag": ({"cp": 2}, P(None, sf.zigzag("cp"))),
    "one rank": ({"cp": 1}, P(None, "cp")),
}


def drawn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def step(shift: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ w)
        return ((0.3 * h + 0.7 * shift(h)).sin() * h).mean()

    return sf.value_and_grad(loss, argnums=(0, 1))


def run(size: int, mesh: str, name: str, backend: str = "aten") -> Any:
    sizes, spec = MESHES[mesh]
    grid = sf.make_mesh(tuple(sizes.values()), tuple(sizes))
    f = sf.shard(step(SHIFTS[name]), grid, (spec, P()), backend=backend)
    return sf.full(f(drawn(3, size, 5), drawn(5, 5)))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", SHIFTS)
def test_a_shift_is_that_of_one_device(name: str, mesh: str) -> None:
    sizes, _ = MESHES[mesh]
    with sf.fake_world(torch.Size([*sizes.values()]).numel()):
        for size in (8, 12) if mesh == "zigzag" else (5, 7, 13):
            close(run(size, mesh, name), step(SHIFTS[name])(drawn(3, size, 5), drawn(5, 5)))


def test_a_shift_sends_halos_and_gathers_nothing() -> None:
    with sf.fake_world(4, numerics=False):
        mesh = sf.make_mesh((4,), ("cp",))
        f = sf.shard(step(SHIFTS["later"]), mesh, (P(None, "cp"), P()), backend="aten")
        sent = f.lower(sf.ShapeDtype((3, 4096, 5)), sf.ShapeDtype((5, 5))).collectives
    assert sorted(c.kind for c in sent) == ["all_reduce", "all_reduce", "halo", "halo"]


def test_numbers_other_than_zero_come_in_at_the_end_alone() -> None:
    shift = lambda x: F.pad(x, (0, 0, 1, -1), value=2.0)
    x = drawn(2, 9, 3)
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("cp",))
        close(sf.full(sf.shard(shift, mesh, P(None, "cp"), backend="aten")(x)), shift(x))


def on_ranks(backend: str) -> Any:
    return [run(7, "line", name, backend) for name in SHIFTS]


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_gloo_shifts_as_the_simulator_does(backend: str) -> None:
    torch.set_num_threads(1)
    with sf.fake_world(4):
        simulated = on_ranks("aten")
    exact = 0.0 if backend == "aten" else 1e-12
    for real in run_ranks(4, on_ranks, backend):
        torch.testing.assert_close(real, simulated, rtol=exact, atol=exact)
