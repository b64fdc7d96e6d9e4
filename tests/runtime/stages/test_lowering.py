"""The placements that out_placements asks for, and the paths of the two halves of a program."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pieces
import pytest
import torch

import shardfn as sf
from shardfn import P, _tree
from shardfn.partition.halves import INPUT, RESULT
from shardfn.runtime.options import Request
from shardfn.runtime.stages.lowering import backward_of, floating_results, forward_of, out_marks
from shardfn.types import TENSOR, Program
from tests.support.stages.graphs import graph_of

PLACED: Any = SimpleNamespace(axes=pieces.mesh_axes((2, 3)))


def program(tree: Any = None) -> Program:
    """A program that returns two tensors and a number, and has one gradient."""
    graph = graph_of(lambda x, i: [x * 2, i + 1, x + 1], torch.ones(4, 6), torch.arange(3))
    tree = tree or {"a": TENSOR, "n": 3, "b": TENSOR}
    leaves, treedef = _tree.flatten(tree)
    return Program(
        name="f",
        graph=torch.fx.GraphModule(torch.nn.Module(), graph),
        in_paths=("x", "i"),
        out_paths=("result['a']", "result['b']", "gradient of x"),
        out_leaves=tuple(leaves),
        out_tree=treedef,
        show=str,
    )


def asked(out_placements: Any) -> Any:
    request = Request("f", print, print, out_placements=out_placements)
    return out_marks(request, program(), PLACED)


def test_a_prefix_of_the_results_places_their_tensors() -> None:
    assert asked(None) == [None, None]
    assert asked(P()) == [("R", "R"), ("R", "R")]
    assert asked({"a": P("a", "b"), "n": None, "b": None}) == [(0, 1), None]


WRONG = [
    (P("z"), sf.PlacementError, "f, out_placements: "),
    ({"a": P()}, sf.TreeError, "placements lack ['n'], ['b']"),
    ({"a": P(None, None, "a"), "n": None, "b": None}, sf.PlacementError, "f, out_placements"),
]


@pytest.mark.parametrize(("given", "kind", "text"), WRONG, ids=str)
def test_other_placements_are_refused(given: Any, kind: Any, text: str) -> None:
    with pytest.raises(sf.ShardError) as caught:
        asked(given)
    assert isinstance(caught.value, kind) and text in str(caught.value)
    assert caught.value.placements == given


def test_results_with_a_derivative_are_those_of_floating_dtype() -> None:
    assert floating_results(program()) == [0]


def test_the_paths_of_both_halves() -> None:
    both: Any = SimpleNamespace(
        forward=SimpleNamespace(outs=(1, 2, 3, 4)),
        residuals=((INPUT, 0), (RESULT, 1), ("saved", 1)),
        cotangents=(0,),
    )
    assert forward_of(program(), both).out_paths == (
        "result['a']", "result['b']", "saved 0", "saved 1",
    )  # fmt: skip
    second = backward_of(program(), both)
    assert second.in_paths == (
        "x", "result['b']", "saved 1", "cotangent of result['a']",
    )  # fmt: skip
    assert second.out_paths == ("gradient of x",)
