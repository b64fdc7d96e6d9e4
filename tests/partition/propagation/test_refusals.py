"""Errors of propagation, word for word."""

from __future__ import annotations

import pieces
import pytest
import torch

import shardfn as sf
from shardfn.partition.propagation import refusals
from tests.support.stages.graphs import calls, graph_of

AXES = pieces.mesh_axes((2, 3))


def node(fn=torch.exp, name: str = "exp") -> torch.fx.Node:
    (found,) = calls(graph_of(fn, torch.ones(3)), name)
    found.meta["source"] = "model.py:7"
    return found


def test_an_unreduced_gradient_that_an_op_needs() -> None:
    error = refusals.not_reduced("step", "g['w']", node(), ("sum", "R"), AXES)
    assert str(error) == (
        "step, argument g['w']: the value is an unreduced gradient (Partial sum over a), but "
        "exp needs the reduced value\n  at: model.py:7\n  needed: an explicit reduction\n  "
        "try: reduce the gradient x first: sf.constrain(x, P()), or constrain x to its final "
        "placement"
    )
    assert (error.arg_path, error.placements) == ("g['w']", ("sum", "R"))


def test_a_result_that_cannot_stay_partial() -> None:
    error = refusals.cannot_stay_partial("step", "out", node(), ("R", "sum"), AXES)
    assert str(error).startswith(
        "step, out: the value is already reduced, or was never Partial, so its placement "
        "cannot stay sum over b\n  at: model.py:7\n  needed: a value that is reduced exactly "
        "once\n"
    )


def test_a_rule_that_gives_shards_of_another_shape() -> None:
    error = refusals.wrong_local_shape(node(), [(0, "R")], (0, "R"), (3,), (2,))
    text = str(error)
    assert text.startswith("rule(aten.exp.default): the op returns (3,) on a rank\n")
    assert "inputs placed (0, 'R'), the result (0, 'R')" in text
    assert "needed: (2,)" in text


def test_random_numbers_that_ranks_would_draw_differently() -> None:
    drawn = node(lambda x: torch.rand_like(x), "rand_like")
    with pytest.raises(sf.RuleError) as caught:
        refusals.refuse_random(drawn, "step", AXES)
    assert str(caught.value).startswith(
        "step, op aten.rand_like.default: the op draws random numbers, and each rank would "
        "draw different ones"
    )
    assert caught.value.source == "model.py:7"


def test_one_rank_may_draw_and_other_ops_are_no_draws() -> None:
    drawn = node(lambda x: torch.rand_like(x), "rand_like")
    refusals.refuse_random(drawn, "step", pieces.mesh_axes((1, 1)))
    refusals.refuse_random(node(), "step", AXES)
