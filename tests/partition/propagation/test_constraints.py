"""Constraints, and gradients that take the placement of their parameter."""

from __future__ import annotations

import pieces
import pytest
import torch

import shardfn as sf
from shardfn.buckets import BucketOptions
from shardfn.ops.placement import prim_align, prim_redistribute
from shardfn.partition.propagation.constraints import constrained
from shardfn.partition.propagation.gradients import aligned
from shardfn.types import MeshPlacements
from tests.support.stages.plans import planned, told

AXES = pieces.mesh_axes((2, 3))
X = torch.ones(6, 6)
SPECS: dict[str, tuple[str, MeshPlacements, MeshPlacements]] = {
    "axes by dim": ("b;a", ("R", "R"), (1, 0)),
    "two axes on one dim": ("a,b;", ("R", "R"), (0, 0)),
    "nothing named is replicated": (";", (0, 1), ("R", "R")),
    "a star keeps what shards the dim": ("*;a", (0, 0), (1, 0)),
    "a star keeps no Partial sum": ("*;", ("sum", 0), ("R", 0)),
    "a stage": (";b|a=@1", ("R", "R"), ("@1", 1)),
    "a second stage of a coordinate": (";|b=@2.1", (0, "R"), ("R", "@2.1")),
    "a star keeps no axis of a stage": ("*;|b=@0", (0, 0), (0, "@0")),
    "stages on two axes": (";|a=@0,b=@2", ("R", "R"), ("@0", "@2")),
    "fewer dims": ("a", ("R", "R"), (0, "R")),
}


@pytest.mark.parametrize("name", SPECS)
def test_the_placements_of_a_text(name: str) -> None:
    text, current, wanted = SPECS[name]
    assert constrained(text, AXES, (6, 6), current) == wanted


REFUSED = {
    "z;": "the mesh (a=2, b=3) has no axis z",
    ";|z=@0": "the mesh (a=2, b=3) has no axis z",
    ";|a=@2": (
        "Stage(2) on axis 'a', which has the stages 0 to 1; a second stage on a coordinate is "
        "sf.Stage(0, chunk=1)"
    ),
    "a;|a=@1": "P(('a',), (), a=Stage(1)) uses axis 'a' twice, for dim 0 and for a pipeline stage",
    "a;;b": "a placement of 3 dims for a tensor of 2, shape (6, 6)",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_text_that_does_not_fit_is_refused_with_the_line(text: str) -> None:
    fn = lambda x: [prim_redistribute(x, text)]
    with pytest.raises(sf.PlacementError) as caught:
        planned(fn, (X,), [("R", "R")], sizes=(2, 3))
    assert str(caught.value).startswith(f"constrain: {REFUSED[text]}\n")
    assert caught.value.source == "model.py:prim_redistribute"


def test_a_constraint_redistributes_and_is_no_implicit_collective() -> None:
    plan = planned(lambda x: [prim_redistribute(x, ";") + 1], (X,), [(0,)])
    assert told(plan) == [
        "redistribute prim_redistribute: 0 -> R by all_gather",
        "apply add: R -> R",
    ]


def test_a_gradient_of_other_sizes_is_aligned_where_sizes_agree() -> None:
    assert aligned((6, 6), (6, 6), (0, "sum"), AXES) == (0, "R")
    assert aligned((6, 5), (6, 6), (0, 1), AXES) == (0, "R")
    assert aligned((6, 6), (6, 6), ((0, 3), "R"), AXES) == (0, "R")


def added(times: int):
    def step(w: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        grads = [
            prim_align(x.t() @ (x + i), w, BucketOptions("w", 1, 1).text) for i in range(times)
        ]
        return [sum(grads[1:], grads[0])]

    return step


def test_gradients_that_are_only_added_are_reduced_once() -> None:
    args = torch.ones(6, 6), torch.ones(4, 6)
    plan = planned(added(3), args, [("R",), (0,)], [("R",)])
    sent = [line for line in told(plan) if line.startswith("redistribute")]
    assert [line.split(": ")[1] for line in sent] == ["sum -> R by all_reduce"]
    assert [g.options.leaf for g in plan.gradients] == ["w"]


def test_gradients_of_two_parameters_are_reduced_each() -> None:
    def step(v: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        g, h = x.t() @ x, x.t() @ (x + 1)
        options = BucketOptions("w", 1, 1).text
        return [prim_align(g, v, options) + prim_align(h, w, options)]

    args = torch.ones(6, 6), torch.ones(6, 6), torch.ones(4, 6)
    plan = planned(step, args, [("R",), ("R",), (0,)], [("R",)])
    assert sum(line.startswith("redistribute") for line in told(plan)) == 2


def test_a_gradient_that_only_a_constraint_reads_is_reduced_to_its_placement() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        return [prim_redistribute(prim_align(x.t() @ x, w, ""), "a;") + 1]

    def read_twice(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        gradient = prim_align(x.t() @ x, w, "")
        return [prim_redistribute(gradient, "a;") + 1, gradient + 1]

    args = torch.ones(96, 6), X
    reduced = [
        [line for line in told(planned(f, args, [(0,), ("R",)])) if line.startswith("redistribute")]
        for f in (fn, read_twice)
    ]
    texts = [[line.split(": ")[1] for line in lines] for lines in reduced]
    assert texts[0][:1] == ["sum -> 0 by reduce_scatter"]
    assert texts[1][:1] == ["sum -> R by all_reduce"]
