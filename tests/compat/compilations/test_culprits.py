"""The ops that a failed compilation worked on."""

from __future__ import annotations

import types
from dataclasses import field
from typing import Any

import torch

from shardfn._compat.compilations.culprits import culprits


def raised_with(value: Any) -> BaseException:
    """An error that a function raises while its local variable `node` has a value."""

    def work(node: Any) -> None:
        raise ValueError(node)

    try:
        work(value)
    except ValueError as error:
        return error
    raise AssertionError


def test_ops_are_those_of_inductors_nodes_and_an_unfinished_one_has_none() -> None:
    graph = torch.fx.Graph()
    op = graph.call_function(torch.neg, (graph.placeholder("x"),))
    finished = types.SimpleNamespace(origins=[op])
    unfinished = types.SimpleNamespace(origins=field(init=False))
    assert culprits(raised_with(finished)) == culprits(raised_with(op)) == [op]
    inner = types.SimpleNamespace(origins=field(init=False), node=finished)
    assert culprits(raised_with(unfinished)) == [] and culprits(raised_with(inner)) == [op]
