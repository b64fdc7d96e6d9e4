"""The placements of arguments: their own, or those of in_placements, each mismatch named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P
from shardfn._compat.cuda import devices
from shardfn.runtime.arguments.placements import _check_device, marks_of_arguments
from shardfn.runtime.options import Request

X, Y = torch.ones(4, 6), torch.ones(6)


def fn(x: Any, y: Any = None) -> Any: ...


@pytest.fixture(name="mesh")
def _mesh():
    with sf.fake_world(6):
        yield sf.make_mesh((2, 3), ("a", "b"))


def marks(mesh: Any, in_placements: Any, *args: Any, **kwargs: Any) -> Any:
    request = Request("shard(fn)", fn, fn, in_placements=in_placements)
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    tensors = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    paths = [f"leaf{i}" for i in range(len(leaves))]
    return marks_of_arguments(request, args, kwargs, tensors, paths, mesh)


def test_a_prefix_places_the_tensors_below_it(mesh: Any) -> None:
    assert marks(mesh, None, X, Y) == (("R", "R"), ("R", "R"))
    assert marks(mesh, P("a"), X, Y) == ((0, "R"), (0, "R"))
    assert marks(mesh, (P("a", "b"), None), X, Y) == ((0, 1), ("R", "R"))
    assert marks(mesh, (P("a"),), [X, [Y]]) == ((0, "R"), (0, "R"))
    assert marks(mesh, (P("a"),), X, y=Y) == ((0, "R"), ("R", "R")), "keywords keep theirs"


def test_a_dtensor_keeps_its_placement_and_never_changes_it_in_secret(mesh: Any) -> None:
    x = sf.distribute(X, mesh, P("a"))
    assert marks(mesh, None, x) == ((0, "R"),) == marks(mesh, P("a"), x)
    with pytest.raises(sf.PlacementError) as caught:
        marks(mesh, P("b"), x)
    text = str(caught.value)
    assert text.startswith("shard(fn), argument leaf0: it is placed ")
    assert "redistribute it outside" in text and caught.value.arg_path == "leaf0"


def test_a_dtensor_of_another_mesh_is_refused(mesh: Any) -> None:
    x = sf.distribute(X, mesh, P("a"))
    other = sf.make_mesh((6,), ("c",))
    with pytest.raises(sf.PlacementError, match="it lives on another mesh"):
        marks(other, None, x)


def test_all_placements_that_do_not_fit_are_listed(mesh: Any) -> None:
    with pytest.raises(sf.PlacementError) as caught:
        marks(mesh, (P("z"), P(None, "a")), X, Y)
    text = str(caught.value)
    assert text.startswith("shard(fn), 2 arguments: placements that do not fit\n")
    assert "leaf0: " in text and "leaf1: " in text


def test_a_prefix_of_another_tree_is_refused_by_parameter(mesh: Any) -> None:
    with pytest.raises(sf.TreeError) as caught:
        marks(mesh, ({"w": P()}, None), {"v": X}, Y)
    assert "in_placements does not match the arguments\n  x: " in str(caught.value)


def test_an_argument_lives_on_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_current", lambda: 1)
    for fits in ("cuda:1", "meta"):
        _check_device(torch.device(fits), "cuda")
    with pytest.raises(ValueError, match="it lives on cpu, and the mesh is over cuda"):
        _check_device(torch.device("cpu"), "cuda")
    with pytest.raises(ValueError) as caught:
        _check_device(torch.device("cuda:0"), "cuda")
    said = "it lives on cuda:0, and this rank's device is cuda:1; "
    assert str(caught.value).startswith(said)
    assert "torch.cuda.set_device(number) before" in str(caught.value)
