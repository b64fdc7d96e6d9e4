"""The dims over which a textbook of tensor parallelism shards parameters: of two products in a
row the columns of the first weight and the rows of the second, and the rows of tables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from operator import getitem
from typing import Any

import attrs
import torch
from torch.fx import Node

from ... import _compat
from ...ops.elementwise import Elementwise
from ...ops.nodes import args_of
from ...types import PARTIAL_KINDS
from .. import layout, rules
from ..rule_api.check_strategies import strategies_of
from ..rule_api.strategy import arguments, call_of

Dim = int | None  # that is sharded


@attrs.frozen(eq=False)
class Open:
    """A parameter, or a view of one, whose tensor-parallel dim is not chosen yet.

    Args:
        parameter: it.
        dims: for each dim of the view, that of the parameter.
    """

    parameter: Node
    dims: dict[int, int]


def sharded_dims(
    nodes: Collection[Node], parameters: Collection[Node], n: int, first: Collection[Node] = ()
) -> dict[Node, int]:
    """Choose the dim of each parameter that tensor parallelism shards; replicated parameters
    are left out.

    Args:
        nodes: of a program without loops.
        parameters: those that are free.
        n: the ranks of the axis.
        first: the parameters whose first dim is one of steps.

    Source: Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053.
    """
    found = _Dims(n)
    for node in nodes:
        if node in parameters:
            dims = range(node in first, node.meta["val"].dim())
            found.known[node] = Open(node, {dim: dim for dim in dims})
        elif node.op == "call_function" and node.meta.get("phase") != "backward":
            found.visit(node)
    return found.chosen


@attrs.define(eq=False)
class _Dims:
    """The tensor-parallel dim of every value, found op by op."""

    n: int
    known: dict[Node, Any] = attrs.field(factory=dict)  # of each value; of a tuple, a list
    chosen: dict[Node, int] = attrs.field(factory=dict)

    def visit(self, node: Node) -> None:
        """Choose the strategy of one op that fits its inputs best, and note the sharded dims of
        its results.
        """
        if node.target is getitem:
            source, position = args_of(node)
            several = self.known.get(source)
            self.known[node] = several[position] if isinstance(several, list) else None
            return
        read = arguments(node)
        inputs = [self.at(x) for x in read]
        rows = list(self.strategies(node))
        if len(read) == 1 and isinstance(inputs[0], Open):
            self.view(node, inputs[0], rows)
            return
        best = max(rows, key=lambda row: self.fit(row, inputs), default=None)
        value = node.meta.get("val")
        is_tuple = isinstance(value, (tuple, list))
        results = ([None] * len(value) if is_tuple else [None]) if best is None else best[1]
        if best is not None:
            for x, dim in zip(inputs, best[0], strict=True):
                if isinstance(x, Open) and dim in x.dims:
                    self.chosen.setdefault(x.parameter, x.dims[dim])
        self.known[node] = list(results) if is_tuple else results[0]

    def at(self, node: Node) -> Any:
        """Return the sharded dim of a value, or its undecided parameter."""
        now = self.known.get(node)
        if not isinstance(now, Open) or now.parameter not in self.chosen:
            return now
        dim = self.chosen[now.parameter]
        return next((mine for mine, its in now.dims.items() if its == dim), None)

    def view(self, node: Node, of: Open, rows: list[Any]) -> None:
        """Note how a view maps the dims of an undecided parameter."""
        dims = {outs[0]: of.dims[ins[0]] for ins, outs in rows if ins[0] in of.dims}
        dims.pop(None, None)
        self.known[node] = Open(of.parameter, dims)

    def strategies(self, node: Node) -> Iterator[tuple[Any, Any]]:
        """Yield the strategies of an op whose shards are even, as sharded dims of inputs and
        results.
        """
        is_op = isinstance(node.target, _compat.OpOverload) and node.target.namespace != "shardfn"
        call = call_of(node) if is_op or isinstance(node.target, Elementwise) else None
        if call is None:
            return
        for ins, made in strategies_of(rules.find(node.target), call, "auto", node):
            dims = [_dim(placement) for placement in ins], [_dim(placement) for placement in made]
            tensors = zip((*dims[0], *dims[1]), (*call.ins, *call.outs), strict=True)
            is_partial_input = any(placement in PARTIAL_KINDS for placement in ins)
            if not is_partial_input and all(self.fits(dim, x) for dim, x in tensors):
                yield dims

    def fits(self, dim: Dim, x: torch.Tensor) -> bool:
        """Return whether an axis divides this dim of a tensor evenly."""
        return dim is None or x.shape[dim] % self.n == 0

    def fit(self, row: Any, inputs: list[Any]) -> tuple[int, int]:
        """Score a strategy: first by how many inputs are already placed so, then by how many
        parameters it shards.
        """
        pairs = list(zip(inputs, row[0], strict=True))
        lie = sum(dim == x for x, dim in pairs if not isinstance(x, Open))
        able = sum(dim is None or dim in x.dims for x, dim in pairs if isinstance(x, Open))
        shards = sum(dim in x.dims for x, dim in pairs if isinstance(x, Open))
        is_summed = row[1][0] is None
        return lie + able, 2 * shards + is_summed


def _dim(placement: Any) -> Dim:
    """Return the dim that a placement shards; None if it shards none."""
    cut = layout.split(placement)
    return None if cut is None else cut[0]
