"""A mesh of other links has plans of its own, though torch says that it equals the first: in every
way by which a mesh reaches a function, whichever of the two comes first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stagings import counts
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard as S
from torch.testing import assert_close

import shardfn as sf
from shardfn import P

X = torch.arange(48.0, dtype=torch.float64).reshape(6, 8)
SLOW, FAST = sf.Link(latency=1e-5, bandwidth=25e9), sf.Link(latency=1e-5, bandwidth=450e9)


def turned(x: torch.Tensor) -> torch.Tensor:
    return sf.constrain(x, P("b", "a")) * 2


def of_dtensors(x: Any) -> Any:
    return x.redistribute(x.device_mesh, [S(1), S(0)]) * 2


def in_loop(x: torch.Tensor) -> torch.Tensor:
    turn = lambda h: sf.constrain(sf.constrain(h, P("b", "a")).sin(), P("a", "b"))
    return sf.scan(lambda h, _: (turn(h), None), x, length=2)[0]


WITHOUT = sf.shard(turned, in_placements=P("a", "b"), backend="aten")
GRAD = sf.grad(lambda x: (WITHOUT(x) ** 2).sum())
DTENSORS = sf.jit(of_dtensors, backend="aten")
CONSTRAINED = sf.jit(turned, backend="aten")
# the way by which a mesh reaches a function -> the function and its argument
WAYS: dict[str, Callable[[DeviceMesh], tuple[Any, Any]]] = {
    "given": lambda mesh: (sf.shard(turned, mesh, P("a", "b"), backend="aten"), X),
    "in a loop": lambda mesh: (sf.shard(in_loop, mesh, P("a", "b"), backend="aten"), X),
    "current": lambda mesh: (WITHOUT, X),
    "of DTensors, code of ranks": lambda mesh: (DTENSORS, sf.distribute(X, mesh, P("a", "b"))),
    "of DTensors": lambda mesh: (CONSTRAINED, sf.distribute(X, mesh, P("a", "b"))),
    "grad": lambda mesh: (GRAD, sf.distribute(X, mesh, P("a", "b"))),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_mesh_has_the_plan_of_its_links(way: str) -> None:
    with sf.fake_world(4):
        meshes = [
            sf.make_mesh((2, 2), ("a", "b"), links=links)
            for links in ({"a": SLOW, "b": FAST}, {"a": FAST, "b": SLOW}, None)
        ]
        assert meshes[0] == meshes[1] == meshes[2]
        alone = []
        for mesh in meshes:
            sf.clear_cache()
            alone.append(collectives(way, mesh))
        assert alone[0] != alone[1]
        for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
            sf.clear_cache()
            assert [collectives(way, meshes[i]) for i in order] == [alone[i] for i in order]


def collectives(way: str, mesh: DeviceMesh) -> list[Any]:
    """The collectives of the program that a call runs, which has the right value."""
    current = way in ("current", "grad")
    with sf.use_mesh(mesh) if current else contextlib.nullcontext():
        fn, x = WAYS[way](mesh)
        out = fn(x)
        wanted = {"grad": 8 * X, "in a loop": X.sin().sin()}.get(way, 2 * X)
        assert_close(sf.full(out), wanted)
        rows = fn.lower(x).collectives
    return [(row.kind, row.axis, row.nbytes) for row in rows]


@pytest.mark.parametrize("way", WAYS)
def test_a_call_is_staged_again_for_other_links(way: str) -> None:
    with sf.fake_world(4):
        links = {"a": SLOW, "b": FAST}, {"a": FAST, "b": SLOW}
        one, two = (sf.make_mesh((2, 2), ("a", "b"), links=rows) for rows in links)
        sf.clear_cache()
        current = way in ("current", "grad")
        added = []
        for mesh in (one, two, one, two):
            with sf.use_mesh(mesh) if current else contextlib.nullcontext():
                fn, x = WAYS[way](mesh)
                before = counts["partitions"]
                fn(x)
                added.append(counts["partitions"] - before)
        assert added == [1, 1, 0, 0]


def test_a_part_of_a_mesh_has_its_links() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("a", "b"), links={"a": SLOW, "b": FAST})
        every = dict(zip("ab", sf.mesh.axes_of(mesh).costs, strict=True))
        assert sf.mesh.axes_of(mesh["b"]).costs == (every["b"],)
        assert sf.mesh.axes_of(mesh["a"]).costs == (every["a"],)
