"""Ops on sorted rows, as the proof finds them in a function of rows and of numbers of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardfn.partition.propagation.sorted_rows.proof import SortedRows, sorted_rows
from tests.support.stages.graphs import graph_of, op_of

X = torch.ones(4, 3)
IDS = torch.zeros(8, dtype=torch.int64)


def members(fn: Callable[..., Any]) -> SortedRows:
    (found,) = sorted_rows(graph_of(fn, X, IDS), "f").values()
    return found


def member(fn: Callable[..., Any], name: str) -> Any:
    """The last op of a name on sorted rows."""
    rows = members(fn).members.items()
    return [found for node, found in rows if op_of(node) == name][-1]
