"""A mesh reaches a program as itself: never another one with the same names and sizes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from stagings import counts, forget
from torch.distributed.device_mesh import DeviceMesh
from worlds import simulated

import shardfn as sf
from shardfn import P

AXES = ("i", "j")


class Meshes(NamedTuple):
    """Two meshes with the same names and sizes, over the same ranks in another order."""

    named: Any  # the mesh that the program names
    twin: Any  # made and met later


@pytest.fixture
def meshes() -> Iterator[Meshes]:
    with sf.fake_world(4):
        named = sf.make_mesh((2, 2), AXES)
        twin = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=AXES)
        sf.distribute(torch.zeros(4), twin, P("i"))  # the last one that was met
        yield Meshes(named, twin)


def values() -> torch.Tensor:
    return torch.arange(8.0)


def per_rank(x: torch.Tensor) -> torch.Tensor:
    """Tells the ranks of axis i apart."""
    return x * 2 + sf.axis_index("i")


EXPECTED = torch.tensor([0.0, 2, 4, 6, 9, 11, 13, 15])


def mapped(mesh: Any) -> Any:
    return sf.shard_map(per_rank, mesh, P("i"), P("i"), backend="aten")


def jit(fn: Callable[..., Any], **options: Any) -> Any:
    return sf.jit(fn, backend="aten", **options)


def shard(fn: Callable[..., Any], mesh: Any = None, *placements: Any) -> Any:
    return sf.shard(fn, mesh, *placements, backend="aten")


def inside_use_mesh(mesh: Any, fn: Callable[[], Any]) -> Any:
    with sf.use_mesh(mesh):
        return fn()


def nested(outer: Any, inner: Any) -> Any:
    def over_j(x: torch.Tensor) -> torch.Tensor:
        one = sf.shard_map(lambda x: x * 2, inner, P("j"), P("j"), axis_names="j")
        return one(x) + sf.axis_index("i")

    return jit(lambda x: sf.shard_map(over_j, outer, P("i"), P("i"), axis_names="i")(x))


def switching(first: Any, second: Any) -> Any:
    """A program whose closure holds one mesh for its first call, and another one afterwards."""
    mesh = first

    def fn(x: torch.Tensor) -> torch.Tensor:
        return sf.shard_map(per_rank, mesh, P("i"), P("i"))(x)

    compiled = jit(fn)
    compiled(values())
    mesh = second
    return compiled(values())


WAYS: dict[str, Callable[[Any], Any]] = {
    "shard_map alone": lambda m: mapped(m)(values()),
    "shard_map written out inside jit": lambda m: jit(lambda x: mapped(m)(x))(values()),
    "shard_map made before jit": lambda m: jit(mapped(m))(values()),
    "shard_map in the gradient of a jit": lambda m: jit(
        sf.grad(lambda x: (mapped(m)(x) * EXPECTED / 2).sum())
    )(values()),
    "shard_map under vmap": lambda m: jit(sf.vmap(lambda x: mapped(m)(x), in_axes=1, out_axes=1))(
        values().reshape(8, 1)
    ),
    "nested shard_maps": lambda m: nested(m, m)(values()),
    "a mesh as a static argument": lambda m: jit(lambda x, mesh: mapped(mesh)(x), static_argnums=1)(
        values(), m
    ),
    "a mesh in a default": lambda m: jit(lambda x, *, mesh=m: mapped(mesh)(x))(values()),
    "use_mesh around shard_map": lambda m: inside_use_mesh(
        m, lambda: jit(lambda x: mapped(None)(x))(values())
    ),
    "use_mesh around the same mesh inside": lambda m: inside_use_mesh(
        m, lambda: jit(lambda x: mapped(m)(x))(values())
    ),
    "shard around shard_map": lambda m: shard(lambda x: mapped(None)(x), m)(values()),
    "shard around the same mesh inside": lambda m: shard(lambda x: mapped(m)(x), m, P("i"))(
        values()
    ),
    "shard and constrain": lambda m: shard(lambda x: sf.constrain(mapped(None)(x), P("j")), m)(
        values()
    ),
    "use_mesh and constrain": lambda m: inside_use_mesh(
        m, lambda: shard(lambda x: sf.constrain(mapped(None)(x), P("j")))(values())
    ),
    "nested shard": lambda m: shard(shard(mapped(None), m, P("i")), m)(values()),
    "an argument that is a DTensor": lambda m: jit(lambda x: mapped(None)(x))(
        sf.distribute(values(), m, P("i"))
    ),
    "a DTensor and the same mesh inside": lambda m: jit(lambda x: mapped(m)(x))(
        sf.distribute(values(), m, P("j"))
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_result_lies_on_the_mesh_that_the_program_names(meshes: Meshes, way: str) -> None:
    for mesh in (meshes.named, meshes.twin):
        result = WAYS[way](mesh)
        assert result.device_mesh is mesh
        assert torch.equal(sf.full(result).flatten(), EXPECTED)


def test_another_mesh_in_the_closure_is_another_program(meshes: Meshes) -> None:
    assert switching(meshes.named, meshes.twin).device_mesh is meshes.twin
    assert switching(meshes.twin, meshes.named).device_mesh is meshes.named


def test_a_slice_of_a_mesh_is_itself(meshes: Meshes) -> None:
    row = meshes.named["i"]
    result = jit(lambda x: sf.shard_map(per_rank, row, P("i"), P("i"))(x))(values())
    assert result.device_mesh == row
    assert torch.equal(sf.full(result), EXPECTED)


# How a mesh is named around a program, and another mesh inside it.
MIXED: dict[str, Callable[[Any, Any], Any]] = {
    "use_mesh around shard_map": lambda outer, inner: inside_use_mesh(
        outer, lambda: jit(lambda x: mapped(inner)(x))(values())
    ),
    "use_mesh around a shard_map made before": lambda outer, inner: inside_use_mesh(
        outer, lambda: jit(mapped(inner))(values())
    ),
    "shard around shard_map": lambda outer, inner: shard(lambda x: mapped(inner)(x), outer)(
        values()
    ),
    "shard around shard": lambda outer, inner: shard(shard(lambda x: x + 1, inner, P("i")), outer)(
        values()
    ),
    "nested shard_maps": lambda outer, inner: nested(outer, inner)(values()),
    "two shard_maps": lambda outer, inner: jit(lambda x: mapped(inner)(mapped(outer)(x)))(values()),
    "a shard and a shard_map": lambda outer, inner: jit(
        lambda x: mapped(inner)(shard(lambda x: x + 1, outer)(x))
    )(values()),
    "a DTensor as an argument": lambda outer, inner: jit(lambda x: mapped(inner)(x))(
        sf.distribute(values(), outer, P("i"))
    ),
    "DTensors on two meshes": lambda outer, inner: jit(torch.add)(
        sf.distribute(values(), outer, P("i")), sf.distribute(values(), inner, P("i"))
    ),
}


@pytest.mark.parametrize("way", MIXED)
def test_two_meshes_that_look_alike_are_refused(meshes: Meshes, way: str) -> None:
    for outer, inner in (meshes, meshes[::-1]):
        with pytest.raises(sf.PlacementError, match=r"mesh.*\(i=2, j=2\)"):
            MIXED[way](outer, inner)


def test_the_refusal_tells_both_meshes_apart(meshes: Meshes) -> None:
    with pytest.raises(sf.PlacementError) as caught:
        shard(lambda x: mapped(meshes.named)(x), meshes.twin)(values())
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "shard_map(per_rank): the mesh (i=2, j=2) used here has ranks 0, 1, 2, "
        "3, but the mesh of the enclosing call has ranks 0, 2, 1, 3"
    )
    assert lines[2:] == [
        "  needed: one mesh",
        "  try: pass the same mesh to both calls, or no mesh to the inner call",
    ]


def test_a_program_that_is_known_is_not_run_on_a_mesh_that_it_does_not_name(meshes: Meshes) -> None:
    for inside in (
        lambda x: mapped(meshes.named)(x),
        lambda x: shard(lambda x: x + 1, meshes.named, P("i"))(x),
    ):
        jit(inside)(values())
        shard(inside, meshes.named)(values())
        with pytest.raises(sf.PlacementError, match="ranks 0, 2, 1, 3"):
            shard(inside, meshes.twin)(values())


def test_programs_that_name_no_mesh_are_captured_once_for_all(meshes: Meshes) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return mapped(None)(x)

    forget()
    for mesh in meshes:
        assert shard(fn, mesh)(values()).device_mesh is mesh
    assert counts["captures"] == 1


def test_an_object_that_is_no_mesh_is_refused_inside_as_outside(meshes: Meshes) -> None:
    for fn in (lambda x: mapped(4)(x), lambda x: shard(lambda x: x + 1, 4)(x)):
        with pytest.raises(sf.PlacementError, match="mesh: a int"):
            jit(fn)(values())


ENDED: dict[str, Callable[[Any, Any], Any]] = {
    "shard_map alone": lambda over, here: mapped(over)(values()),
    "shard_map written out inside jit": lambda over, here: jit(lambda x: mapped(over)(x))(values()),
    "shard_map made before jit": lambda over, here: jit(mapped(over))(values()),
    "shard": lambda over, here: shard(lambda x: x + 1, over)(values()),
    "distribute": lambda over, here: sf.distribute(values(), over, P("i")),
    "use_mesh": lambda over, here: inside_use_mesh(
        over, lambda: jit(lambda x: mapped(None)(x))(values())
    ),
    "inside a mesh that looks alike": lambda over, here: inside_use_mesh(
        here, lambda: jit(lambda x: mapped(over)(x))(values())
    ),
    "shard inside shard": lambda over, here: shard(shard(lambda x: x + 1, over, P("i")), here)(
        values()
    ),
}


@pytest.mark.parametrize("way", ENDED)
def test_a_mesh_of_an_ended_world_is_refused(way: str) -> None:
    with sf.fake_world(4):
        over = sf.make_mesh((2, 2), AXES)
    with sf.fake_world(4):
        here = sf.make_mesh((2, 2), AXES)
        with pytest.raises(sf.PlacementError, match="a world that has ended"):
            ENDED[way](over, here)


def test_a_program_of_an_ended_world_is_not_run_in_the_next() -> None:
    with sf.fake_world(4):
        over = sf.make_mesh((2, 2), AXES)
        compiled = jit(lambda x: mapped(over)(x))
        compiled(values())
    with sf.fake_world(4):
        here = sf.make_mesh((2, 2), AXES)
        with pytest.raises(sf.PlacementError, match="a world that has ended"):
            compiled(values())
        with sf.use_mesh(here), pytest.raises(sf.PlacementError, match="a world that has ended"):
            compiled(values())


def test_a_mesh_is_an_argument_and_equal_ones_share_a_program() -> None:
    f = sf.jit(lambda mesh, x: x * mesh.size(0), backend="aten")
    g = sf.jit(lambda x, at=None: x * at["mesh"].ndim, backend="aten")
    x = torch.ones(4)
    with sf.fake_world(4):
        first, equal, other = (
            sf.make_mesh(shape, names)
            for shape, names in (((4,), ("dp",)), ((4,), ("dp",)), ((2, 2), ("dp", "tp")))
        )
        before = counts["captures"]
        assert torch.equal(f(first, x), x * 4) and torch.equal(f(equal, x), x * 4)
        assert counts["captures"] == before + 1
        assert torch.equal(f(other, x), x * 2)
        assert torch.equal(g(x, at={"mesh": other}), x * 2)


def test_torchs_with_mesh_is_the_current_mesh() -> None:
    f = sf.shard(lambda x: x * 2, in_placements=(P("dp"),), backend="aten")
    with simulated(dp=4) as outer:
        inner = sf.make_mesh((2, 2), ("dp", "tp"))
        with outer:
            assert f(torch.ones(4)).device_mesh is outer
            with sf.use_mesh(inner):
                assert sf.current_mesh() is inner
                with outer:
                    assert sf.current_mesh() is outer
                assert sf.current_mesh() is inner
            with pytest.raises(ZeroDivisionError), inner:
                assert sf.current_mesh() is inner
                _ = 1 / 0
            assert sf.current_mesh() is outer
            seen: list[Any] = []
            thread = threading.Thread(target=lambda: seen.append(sf.current_mesh()))
            thread.start()
            thread.join()
            assert seen == [None]
        assert sf.current_mesh() is None
