"""sf.placements: by patterns, the first that matches counts; everything else is a named error."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import shardfn as sf
from shardfn import P, ShapeDtype

S = ShapeDtype
PARAMS = {
    "embed.weight": S((7, 6)),
    "layers.0.up.weight": S((5, 6)),
    "layers.0.up.bias": S((5,)),
    "layers.1.up.weight": S((5, 6)),
    "layers.1.up.bias": S((5,)),
}
BY_HAND = {
    "embed.weight": P(),
    "layers.0.up.weight": P("tp"),
    "layers.0.up.bias": P("tp"),
    "layers.1.up.weight": P("tp", None),
    "layers.1.up.bias": P("tp"),
}


def test_the_first_pattern_that_matches_counts() -> None:
    plan = {
        "layers.1.up.weight": P("tp", None),
        re.compile(r"layers\.\d+\.up\..*"): P("tp"),
        "**": P(),
    }
    assert sf.placements(PARAMS, plan) == BY_HAND


def test_the_names_are_those_of_the_modules_parameters() -> None:
    module = nn.TransformerEncoderLayer(8, 2, 16)
    _, params, _ = sf.functionalize(module)
    names = [name for name, _ in module.named_parameters()]
    assert list(sf.placements(params, {}, default=P())) == list(params) == names


def test_a_default_may_be_a_tree() -> None:
    first = sf.placements(PARAMS, {"layers.*.up.*": P("tp")}, default=P())
    then = sf.placements(PARAMS, {"embed.weight": P("dp")}, default=first)
    assert then == {**first, "embed.weight": P("dp")}


def test_paths_of_trees_have_the_keys_with_dots() -> None:
    tree = {"a": {"w": torch.ones(3, 2)}, "b": [torch.ones(2), 3]}
    where = sf.placements(tree, {"a.w": P(None, "tp"), "b.*": P("tp")})
    assert where == {"a": {"w": P(None, "tp")}, "b": [P("tp"), None]}


def test_dtensors_have_the_placements_of_their_global_shapes() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        x = sf.distribute({"w": torch.ones(6, 2)}, mesh, P("tp"))
        assert sf.placements(x, {"w": P("tp")}, mesh=mesh) == {"w": P("tp")}


def test_values_may_be_torchs_placements() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        both = [Shard(0), Replicate()]
        where = sf.placements({"w": S((4, 3))}, {"w": both}, mesh=mesh)
        assert where == {"w": both}
        assert "24 B" in str(where)


@pytest.mark.parametrize("spec", [P("tp", pp=3), sf.Stage(2), [Shard(0), sf.Stage(5, chunk=1)]])
def test_stages_are_placements_on_a_mesh_that_is_not_known(spec: Any) -> None:
    assert sf.placements({"w": S((4, 3))}, {"w": spec}) == {"w": spec}


def refused(
    plan: Any, params: Any = None, kind: type[sf.ShardError] = sf.TreeError, **more: Any
) -> str:
    with pytest.raises(kind) as caught:
        sf.placements(PARAMS if params is None else params, plan, **more)
    return str(caught.value)


def test_all_patterns_and_parameters_without_counterpart_are_listed_with_near_names() -> None:
    text = refused({"layers.*.up.wieght": P("tp"), "layers.*.up.bias": P()})
    assert text == (
        "placements, plan: 'layers.*.up.wieght' matches nothing; near it: layers.*.up.weight, "
        "layers.*.up.bias\n  nothing matches embed.weight; near it: 'layers.*.up.wieght', "
        "'layers.*.up.bias'\n  nothing matches layers.*.up.weight; near it: "
        "'layers.*.up.wieght', 'layers.*.up.bias'\n  try: use patterns that match the names "
        "(the first match counts), or default=P()"
    )


def test_a_star_that_is_meant_to_match_more_is_told_how() -> None:
    text = refused({"*.bias": P()}, default=P())
    assert "'*.bias' matches nothing; * matches within one name only; '**.bias' matches" in text
    text = refused({re.compile("bias"): P()}, default=P())
    assert "re.compile('bias') matches nothing; a regular expression must match" in text
    text = refused({re.compile("bais"): P()}, default=P())
    assert "near it: " in text
    text = refused({"embed.*": P(), "*.weight": P()})
    assert "nothing matches layers.*.up.weight; * matches within one name only" in text


def test_a_pattern_that_never_counts_is_named_with_the_one_before_it() -> None:
    text = refused({"layers.**": P("tp"), "**.up.bias": P(), "**": P()})
    assert text.startswith(
        "placements, plan: '**.up.bias' has no effect: 'layers.**' comes first and matches "
        "the same parameters; layers.0.up.bias is P('tp') there, but P() here"
    )


def test_a_pattern_that_says_the_same_again_is_fine() -> None:
    plan = {"layers.**": P("tp"), "**.up.bias": P("tp"), "**": P()}
    assert sf.placements(PARAMS, plan)["layers.0.up.bias"] == P("tp")


MISFITS: dict[str, tuple[Any, str]] = {
    "more entries than dims": (
        P("tp", None),
        "layers.0.up.bias: P('tp', None) names dim 1 of a tensor with 1 dims",
    ),
    "an axis that the mesh lacks": (
        P("pp"),
        "layers.0.up.bias: P('pp') names axis 'pp'; the mesh has (dp=2, tp=2)",
    ),
    "an axis twice": (P(("tp", "tp")), "uses axis 'tp' twice"),
    "a stage that the mesh lacks": (P(tp=2), "Stage(2) on axis 'tp', which has the stages 0 to 1"),
    "a stage of an axis that the mesh lacks": (
        P(pp=0),
        "P(pp=0) names axis 'pp'; the mesh has (dp",
    ),
    "an axis for a dim and a stage": (
        P("tp", tp=1),
        "uses axis 'tp' twice, for dim 0 and for a pipeline stage",
    ),
    "a stage among too few": ([sf.Stage(0)], "1 placements [Stage(0)] for a mesh of 2 axes"),
    "another number of placements": ([Shard(0)], "1 placements [Shard(dim=0)] for a"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_placements_that_do_not_fit_are_all_listed(case: str) -> None:
    spec, message = MISFITS[case]
    plan = {"**.bias": spec}
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        text = refused(plan, None, sf.PlacementError, mesh=mesh, default=P())
    assert message in text
    assert "layers.1.up.bias: " in text


def test_placements_are_checked_without_a_mesh_too() -> None:
    stages = (P(pp=-1), P(pp="0"), P("pp", pp=0), sf.Stage(-1), [Shard(0), sf.Stage(0, chunk=-1)])
    for spec in (P("tp", None), P("tp", "tp"), P(3), [Shard(1)], Shard(1), *stages):
        text = refused({"**.bias": spec}, None, sf.PlacementError, default=P())
        assert "layers.1.up.bias: " in text
    fine = sf.placements(PARAMS, {"**": [Shard(0), Replicate()]})
    assert fine["embed.weight"] == [Shard(0), Replicate()]


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "params": (lambda: sf.placements(torch.ones(2), {}), "placements, params: a Tensor"),
    "plan": (lambda: sf.placements(PARAMS, P()), "placements, plan: a P"),
    "key": (lambda: sf.placements(PARAMS, {3: P()}), "3 is not a pattern"),
    "value": (lambda: sf.placements(PARAMS, {"**": ("tp",)}), "'**': ('tp',) is not a placement"),
    "no patterns": (
        lambda: sf.placements(PARAMS, {}),
        "nothing matches layers.*.up.weight; the plan is empty",
    ),
    "mesh": (lambda: sf.placements(PARAMS, {}, mesh=3), "placements, mesh: a int"),
    "module": (lambda: sf.placements(PARAMS, {}, module=3), "placements, module: a int"),
    "default": (
        lambda: sf.placements(PARAMS, {}, default={"embed.weight": P()}),
        "placements, default: the default does not match the parameters",
    ),
    "axis": (
        lambda: sf.placements(PARAMS, {"layers.*.up": "colwise"}, axis=3),
        "placements, axis: it is 3",
    ),
    "no axis": (
        lambda: sf.placements(PARAMS, {"layers.*.up": "colwise"}),
        "the plan has styles, which need one mesh axis, but axis is not given",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(sf.ShardError, match=re.escape(message)):
        call()


def test_it_is_refused_inside_a_captured_function() -> None:
    with pytest.raises(sf.CaptureError, match="placements"):
        sf.jit(lambda x: sf.placements({"x": x}, {"x": P()}), backend="aten")(torch.ones(2))
