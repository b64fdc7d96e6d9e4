"""A function as the code of one rank: its arguments and results as global tensors of all ranks."""

from __future__ import annotations

from typing import Any

import torch

import shardfn as sf
from shardfn.capture.shard_map import axis_names
from shardfn.runtime import Request
from shardfn.transforms.dtensors._outside import entering, leaving
from shardfn.transforms.dtensors._ranks import OnRanks, on_ranks
from tests.compat.dynamo.test_shells import Scaled
from tests.support.stages.rank_code import ops

X = torch.ones(6, 2, 4)  # one element of dim 0 for each of six ranks


def inlined(fn: Any, placed: tuple[str, ...], *args: Any) -> tuple[Any, list[str]]:
    """The texts of the results, and the ops."""
    kinds: list[Any] = []
    with sf.fake_world(6):
        mesh = sf.make_mesh((2, 3), ("dp", "tp"))
        with axis_names.scope(mesh, "cpu") as here:
            code = OnRanks("f", (fn,), mesh, placed)

            def run(*xs: torch.Tensor) -> Any:
                out, said = code.inline(*xs)
                kinds.append(said)
                return out

            found = ops(run, *args)
            assert here.manual == (), "the axes are left again"
    return kinds[0], found


def test_a_plain_tensor_is_the_ranks_own() -> None:
    shapes = []
    fn = lambda x: shapes.append(x.shape) or x * 2
    kinds, found = inlined(fn, ("",), X)
    assert shapes == [(2, 4)] and kinds == ("",)
    assert found == [
        "prim_to_local dp:2=0,tp:3=0 -> [1, 2, 4]",
        "squeeze 0 -> [2, 4]",
        "mul 2 -> [2, 4]",
        "unsqueeze 0 -> [1, 2, 4]",
        "prim_from_local dp:2=0,tp:3=0 -> [6, 2, 4]",
        "prim_redistribute dp,tp;; -> [6, 2, 4]",
    ]


def test_a_dtensor_is_global() -> None:
    _, found = inlined(lambda d: d.sum(), ("dp=S1,tp=R",), X)
    assert found[0] == "prim_redistribute ;dp; -> [6, 2, 4]"


def test_constants_and_trees_stay() -> None:
    code = lambda d: {"x": d["x"] + d["n"], "n": d["n"]}
    with sf.fake_world(6):
        mesh = sf.make_mesh((6,), ("dp",))
        with axis_names.scope(mesh, "cpu"):
            on = OnRanks("f", (code,), mesh, ("", ""))
            out = []
            run = lambda x: out.append(on.inline({"n": 3, "x": x})) or x
            ops(run, X)
    ((result, kinds),) = out
    assert result["n"] == 3 and result["x"].shape == X.shape
    assert kinds == ("", "")


def test_a_tensor_that_holds_others_enters_by_its_parts() -> None:
    seen: list[Any] = []

    def code(x: Any) -> Any:
        seen.append(x)
        return x

    with sf.fake_world(6):
        mesh = sf.make_mesh((6,), ("dp",))
        with axis_names.scope(mesh, "cpu"):
            on = OnRanks("f", (code,), mesh, ("",))
            out: list[Any] = []
            run = lambda x, s: out.append(on.inline(Scaled(x, s, "note"))[0]) or x
            ops(run, X, torch.ones(6, 1))
    assert seen[0].shape == (2, 4) and seen[0].note == "note"
    assert seen[0].data_.shape == (2, 4) and seen[0].scale.shape == (1,)
    assert out[0].shape == X.shape and out[0].data_.shape == X.shape


def test_a_request_for_ranks_shares_its_clearing_with_the_first() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        asks = Request("f", torch.sin, torch.sin)
        made = on_ranks(asks, mesh, ("",), has_own_sizes=True, layouts=())
    assert made.mesh is mesh and made.needs_mesh and made.has_own_sizes
    assert made.rank == () and made.differentiated is None
    assert (made.around.entering, made.around.leaving) == (entering, leaving)
    assert made.store is not asks.store and made.store.kin is asks.store.kin
    assert {asks.store, made.store} <= set(made.store.kin)
