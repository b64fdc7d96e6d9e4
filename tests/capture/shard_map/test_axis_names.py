"""Axis names while a function is traced: what binds them, and what a wrong name is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.capture.shard_map import axis_names as names

MESH = names.MESH


@pytest.fixture(name="mesh")
def _mesh() -> Iterator[Any]:
    with sf.fake_world(6):
        yield sf.make_mesh((2, 3), ("dp", "tp"))


@pytest.fixture(name="here")
def _here(mesh: Any) -> Iterator[names.Scope]:
    with names.scope(mesh, "cpu") as here:
        yield here


def refused(kind: type, call: Any, *args: Any) -> str:
    with pytest.raises(kind) as caught:
        call(*args)
    return str(caught.value)


def test_without_a_capture_the_scope_is_empty() -> None:
    here = names.current_scope()
    assert (here.mesh, here.names, here.manual, names.device()) == (None, [], (), "cpu")
    here.names.append(names.Bound("dp", 2, MESH))
    assert names.current_scope().names == [], "nothing is kept"


def test_axes_of_a_mesh_become_manual_and_free_again(here: Any, mesh: Any) -> None:
    assert names.enter_mesh("f", None, ("tp",)) == (("tp", 3),)
    assert here.manual == ("tp",) and here.uses_mesh
    assert names.enter_mesh("f", mesh, None) == (("dp", 2),)
    assert here.meshes == (mesh, mesh, mesh)
    names.unbind_last(1)
    assert here.manual == ("tp",)
    names.begin()
    assert here.manual == ()


def test_the_first_mesh_inside_is_that_of_a_call_without_one(mesh: Any) -> None:
    with names.scope(None, "cpu") as here:
        text = refused(sf.PlacementError, names.enter_mesh, "f", None, None)
        assert (
            text.startswith("f: no mesh is given, and no current mesh is set")
            and "use_mesh(mesh)" in text
        )
        names.enter_mesh("f", mesh, ("dp",))
        assert here.mesh is mesh and here.brought is mesh
    with names.scope(None, "cpu") as here, sf.use_mesh(mesh):
        names.enter_mesh("f", None, ("dp",))
        assert here.brought is mesh


def test_axes_that_cannot_be_manual_are_refused(here: Any, mesh: Any) -> None:
    enter = lambda wanted: names.enter_mesh("f", None, wanted)
    text = refused(sf.PlacementError, enter, ("dpp",))
    assert text.startswith("f, axis_names: the mesh (dp=2")
    assert "did you mean 'dp'?" in text
    enter(("dp",))
    text = refused(sf.PlacementError, enter, ("dp",))
    assert (
        "shard_map already uses dp" in text and "only axes that no enclosing shard_map uses" in text
    )
    enter(None)
    text = refused(sf.PlacementError, enter, None)
    assert "shard_map already uses dp, tp" in text and "one shard_map over" in text


def test_another_mesh_than_the_calls_is_refused(here: Any) -> None:
    other = sf.make_mesh((6,), ("dp",))
    assert refused(sf.PlacementError, names.enter_mesh, "f", other, None)
    assert refused(sf.PlacementError, names.name_mesh, "f", other)
    assert refused(sf.PlacementError, names.enter_mesh, "f", "dp", None)
    assert here.own is None and here.brought is None


def test_a_mesh_of_a_world_that_has_ended_is_refused() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
    with names.scope(None, "cpu"):
        assert refused(sf.PlacementError, names.enter_mesh, "f", mesh, None)


def test_names_are_bound_to_axes_and_mapped_dims(here: Any) -> None:
    names.enter_mesh("f", None, ("dp",))

    def inner(x: Any) -> Any:
        names.bind_mapped_dim("i", 4)
        level = torch._C._functorch.maybe_get_level(x)
        assert names.bindings_of("psum", ("i", "dp")) == (("i", 4, level), ("dp", 2, MESH))
        names.unbind_last(1)
        return x

    torch.func.vmap(inner)(torch.ones(4))
    assert names.bindings_of("psum", "dp") == (("dp", 2, MESH),)


def test_the_innermost_of_equal_names_counts(here: Any) -> None:
    here.names += [names.Bound("i", 2, 1), names.Bound("i", 5, 2)]
    assert names.bindings_of("psum", "i") == (("i", 5, 2),)


def test_wrong_names_are_told_the_right_ones(here: Any) -> None:
    bound = lambda name: refused(sf.CaptureError, names.bindings_of, "psum", name)
    text = bound("dp")
    assert text.startswith("psum over 'dp': the call is outside of any shard_map")
    assert "inside vmap(fn, axis_name=...)" in text
    names.enter_mesh("f", None, ("dp",))
    assert "'tp' is a mesh axis that no enclosing shard_map uses" in bound("tp")
    text = bound("ddp")
    assert "no axis is called 'ddp'" in text
    assert "the bound axis names are 'dp' (mesh axis, size 2)" in text
    assert "did you mean 'dp'?" in text
    for wrong in (3, (), ("dp", 3), None):
        assert "needed: a name, or a tuple of names" in bound(wrong)
    assert "contains an axis twice" in bound(("dp", "dp"))


def test_near_names() -> None:
    assert names.suggest_name("batc", ["batch", "model"]) == "did you mean 'batch'?"
    assert names.suggest_name("xyz", ["dp", "tp"]) == "one of 'dp', 'tp'"


def test_placements_inside_name_free_axes_once(here: Any) -> None:
    check = lambda *parts: names.check_placed("constrain", "x", parts)
    names.enter_mesh("f", None, ("dp",))
    check("tp", None)
    text = refused(sf.PlacementError, check, None, "dp")
    assert text.startswith("constrain, x: P(None, 'dp') names dp, which belongs to")
    text = refused(sf.PlacementError, check, "tp", "tp")
    assert "name each axis once" in text


def test_a_placement_has_no_more_parts_than_dims() -> None:
    check = lambda *parts: names.check_dims("constrain", "x", parts, (2, 3))
    check("dp", None)
    text = refused(sf.PlacementError, check, None, None, "dp")
    assert "names dim 2 of a tensor with 2 dims, shape (2, 3)" in text
    assert "P with at most 2 entries" in text


def test_where_partition_sees_the_placement_it_checks_it(here: Any) -> None:
    names.check_dims("constrain", "x", (None, None, "dp"), (2, 3))
    text = refused(sf.PlacementError, names.check_dims, "f", "", (None, None, None), (2, 3))
    assert text.startswith("f: P(None, None, None) names dim 2")


def test_a_call_over_a_mesh_takes_what_another_scope_named(mesh: Any) -> None:
    with names.scope(mesh, "cpu") as first:
        names.enter_mesh("f", mesh, None)
    with names.scope(None, "cpu"):
        here = first.over(None)
        assert (here.mesh, here.own, here.uses_mesh) == (mesh, mesh, True)
        assert here.names == []
