"""constrain: a value and its gradient are placed; outside of a transform nothing happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P


@pytest.fixture
def mesh() -> Any:
    with simulated(dp=2, tp=4) as mesh:
        yield mesh


def aten(fn: Any, mesh: Any, *args: Any, **options: Any) -> Any:
    return sf.shard(fn, mesh, *args, backend="aten", **options)


def test_constrain_pins_a_value_and_its_gradient(mesh: Any) -> None:
    def f(x: torch.Tensor) -> Any:
        h = sf.constrain(x * 2, P("dp", "tp"))
        return h, (h * h).sum()

    x = torch.randn(6, 8, dtype=torch.float64)
    h, _ = aten(f, mesh)(x)
    assert h.placements == (Shard(0), Shard(1))
    g = aten(sf.grad(lambda x: f(x)[1]), mesh)(x)
    assert_close(sf.full(g), 8 * x)
    assert g.placements == (Replicate(), Replicate()), "a gradient is placed as its argument is"
    assert sf.constrain(x, P("dp")) is x, "outside a transform it is the identity"
    assert torch.equal(sf.grad(lambda x: f(x)[1])(x), 8 * x), "and without a mesh"


WRONG = [
    ((torch.ones(2), P("dp", "tp")), sf.PlacementError),
    ((torch.ones(2, 2), P("dp", "dp")), sf.PlacementError),
    ((torch.ones(2), Shard(0)), sf.PlacementError),
    (({"a": torch.ones(2)}, {"b": P()}), sf.TreeError),
]


@pytest.mark.parametrize(("args", "kind"), WRONG, ids=str)
def test_what_does_not_fit_is_refused_outside_too(args: Any, kind: Any) -> None:
    with pytest.raises(kind) as caught:
        sf.constrain(*args)
    assert str(caught.value).startswith("constrain")


def test_none_leaves_a_value_free_and_a_prefix_stands_for_a_tree() -> None:
    tree = {"a": torch.ones(2), "b": [torch.ones(3), 5]}
    assert sf.constrain(tree, {"a": P("dp"), "b": None}) is tree
    assert sf.constrain(tree, P("dp")) is tree


STAGES = {
    "a stage": (P("tp", dp=1), "tp;|dp=@1"),
    "a second stage of a coordinate": (P(None, "tp", dp=sf.Stage(0, chunk=3)), ";tp|dp=@0.3"),
}


@pytest.mark.parametrize("case", STAGES)
def test_a_stage_is_carried_by_the_constraint(case: str, mesh: Any) -> None:
    spec, text = STAGES[case]
    x = torch.randn(6, 8, dtype=torch.float64)
    f = lambda x: sf.constrain(x * 2, spec)
    assert f"prim_redistribute(%mul, {text})" in str(aten(f, mesh).trace(x))
    each = aten(lambda x: torch.func.vmap(f)(x), mesh).trace(x[None])
    assert f", *;{text})" in str(each)
    gradient = str(aten(sf.grad(lambda x: f(x).square().sum()), mesh).trace(x))
    assert gradient.count(f", {text})") == 2
    out = aten(f, mesh)(x)
    stage = spec.stages["dp"]
    assert out.placements[0] == (sf.Stage(stage) if isinstance(stage, int) else stage)
    assert torch.equal(sf.full(out), 2 * x)


def test_stages_of_two_axes_are_refused(mesh: Any) -> None:
    with pytest.raises(sf.PlacementError, match="values are on stages of 'dp' and 'tp'"):
        aten(lambda x: sf.constrain(x * 2, P(dp=0, tp=1)), mesh)(torch.randn(6, 8))


def test_a_stage_made_inside_is_carried_too(mesh: Any) -> None:
    f = lambda x: sf.constrain(x * 2, P(dp=sf.Stage(1, chunk=2)))
    assert "prim_redistribute(%mul, ;|dp=@1.2)" in str(aten(f, mesh).trace(torch.ones(2, 2)))


def test_placements_of_a_shard_inside_are_constraints_with_stages(mesh: Any) -> None:
    inner = sf.shard(lambda x: x * 2, mesh, (P(dp=1),), P(dp=0))
    x = torch.randn(6, 8)
    text = str(aten(lambda x: inner(x) + 1, mesh).trace(x))
    assert ", ;|dp=@1)" in text and ", ;|dp=@0)" in text
    assert torch.equal(sf.full(aten(lambda x: inner(x) + 1, mesh)(x)), 2 * x + 1)


BAD_STAGES = {
    "below 0": (P(dp=-1), "Stage(-1) on axis 'dp': stage must be an int of 0 or more"),
    "a chunk below 0": (
        P(dp=sf.Stage(0, chunk=-1)),
        "Stage(0, chunk=-1) on axis 'dp': chunk must be an int of 0 or more",
    ),
    "no int": (P(dp="a"), "dp='a' is not a stage; write dp=0 or an sf.Stage"),  # type: ignore[arg-type]
    "True": (P(dp=True), "dp=True is not a stage; write dp=0 or an sf.Stage"),
    "an axis of a dim": (
        P("dp", dp=1),
        "P('dp', dp=1) uses axis 'dp' twice, for dim 0 and for a pipeline stage",
    ),
}


@pytest.mark.parametrize("case", BAD_STAGES)
def test_what_is_no_stage_is_refused_inside_and_outside(case: str, mesh: Any) -> None:
    spec, text = BAD_STAGES[case]
    x = torch.ones(2, 2)
    for call in (
        lambda: sf.constrain(x, spec),
        lambda: aten(lambda x: sf.constrain(x, spec), mesh)(x),
    ):
        with pytest.raises(sf.PlacementError) as error:
            call()
        assert str(error.value).splitlines()[0] == f"constrain: {text}"


def test_a_stage_that_the_mesh_lacks_or_that_is_manual_is_refused(mesh: Any) -> None:
    x = torch.ones(6, 8)
    with pytest.raises(
        sf.PlacementError, match=r"constrain: Stage\(9\) on axis 'dp', which has the"
    ):
        aten(lambda x: sf.constrain(x, P(dp=9)), mesh)(x)
    with pytest.raises(sf.PlacementError, match=r"constrain: the mesh .* has no axis pp"):
        aten(lambda x: sf.constrain(x, P(pp=0)), mesh)(x)
    with pytest.raises(
        sf.PlacementError, match=r"P\(dp=1\) names dp, which belongs to an enclosing"
    ):
        inner = lambda x: sf.constrain(x, P(dp=1))
        sf.shard_map(inner, mesh, P("dp"), P("dp"), backend="aten")(x)


def test_a_bare_stage_is_one_of_the_axis_that_has_stages_and_leaves_shards_free() -> None:
    w, x = torch.randn(4, 3), torch.randn(6, 4)
    f = lambda w, x: sf.constrain(x @ w, sf.Stage(1))
    assert torch.equal(f(w, x), x @ w)
    with sf.fake_world(4):
        both = sf.make_mesh((2, 2), ("dp", "pp"))
        sharded = sf.shard(f, both, (P(pp=0), P("dp")), backend="aten")
        assert "prim_redistribute(%mm, *;*|=@1)" in str(sharded.trace(w, x))
        out = sharded(w, x)
        assert out.placements == (Shard(0), sf.Stage(1))
        torch.testing.assert_close(sf.full(out), x @ w)
    with sf.fake_world(2):
        alone = sf.make_mesh((2,), ("pp",))
        assert sf.shard(f, alone, (None, None), backend="aten")(w, x).placements == (sf.Stage(1),)


def test_a_bare_stage_without_an_axis_or_without_a_number_is_refused(mesh: Any) -> None:
    x = torch.ones(2, 2)
    with pytest.raises(
        sf.PlacementError,
        match=r"the function constrains a value to an sf.Stage, but no parameter is on a stage",
    ):
        aten(lambda x: sf.constrain(x, sf.Stage(1)), mesh)(x)
    for stage, word in ((sf.Stage(-1), "stage"), (sf.Stage(0, chunk=-1), "chunk")):
        for call in (
            lambda stage=stage: sf.constrain(x, stage),
            lambda stage=stage: aten(lambda x: sf.constrain(x, stage), mesh)(x),
        ):
            with pytest.raises(sf.PlacementError) as error:
                call()
            said = str(error.value).splitlines()[0]
            assert said == f"constrain: {stage}: {word} must be an int of 0 or more"
