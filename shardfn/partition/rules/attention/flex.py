"""The strategies of flex attention: over the batch, over heads, or over queries with the keys
gathered.

Its score function and its mask read the numbers of a sample, a head and a query. On a rank they
begin where its shard does: both functions get the offsets as tensors of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ....ops.higher_order import HigherOrder, TensorSlot
from ... import layout
from ...emission.graph_builder import Builder, LocalShard
from ...rule_api.op_record import Op
from ...rule_api.strategy import Choice, OpCall, replicated
from .arguments import OF_KEYS, OF_QUERIES, Factors
from .blocks import HEADS, QUERIES
from .strategies import way_by

aten = torch.ops.aten
NAME = "flex_attention"
# positions of its arguments
SCORE, MASK, OF_SCORE, OF_MASK = 3, 4, 7, 8
ARGUMENTS = 9
# positions in the tuple of a block mask; a block of queries is the factor "block"
LENGTH, COUNTS, BY_QUERIES, BY_KEYS, BLOCK = 0, 2, range(2, 6), range(6, 10), -3
OF_BLOCKS: Factors = ("b", "h", "block", None)
OF_KEY_BLOCKS: Factors = ("b", "h", None, None)
Units = Mapping[str, int]  # sharded factors, each with its unit


def flex_attention(call: OpCall) -> list[Choice]:
    """Shard flex attention over the batch, heads or blocks of queries."""
    args = call.target.template[0]
    if len(args) != ARGUMENTS:
        return [replicated(call)]
    rows = _factors(args, call.ins)
    ways: list[Units] = [{"b": 1}, *_by_heads(call), *_by_queries(call, args)]
    return [replicated(call), *(_sharded(call, rows, units) for units in ways)]


def _factors(args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> list[Factors]:
    """For each tensor argument, list the factors of its dims: none of tensors that its functions
    read, nor of dims of size 1, which are broadcast to the queries.
    """
    rows: dict[int, Factors] = {0: OF_QUERIES, 1: OF_KEYS, 2: OF_KEYS}
    for place, x in enumerate(args[MASK]):
        if isinstance(x, TensorSlot):
            of_queries = OF_BLOCKS if place in BY_QUERIES else ()
            rows[x.number] = OF_KEY_BLOCKS if place in BY_KEYS else of_queries
    return [
        tuple(f if n > 1 or not k else None for f, n in zip(rows.get(k, ()), x.shape, strict=False))
        for k, x in enumerate(tensors)
    ]


def _by_heads(call: OpCall) -> list[Units]:
    """List the ways to shard heads: key heads, each with its queries; queries of one key head."""
    heads, few = (x.shape[HEADS] for x in call.ins[:2])
    if not few or heads % few:
        return []
    return [{"h": 1}] if few == 1 < heads else [{"h": heads // few, "g": 1}]


def _by_queries(call: OpCall, args: Sequence[Any]) -> list[Units]:
    """List the ways to shard the queries: those of a block of the mask stay together."""
    queries, block = call.ins[0].shape[QUERIES], args[MASK][BLOCK]
    count = call.ins[args[MASK][COUNTS].number].shape[QUERIES]
    if count == 1:
        return [{"t": 1}]
    return [{"t": block, "block": 1}] if count * block == queries else []


def _sharded(call: OpCall, rows: Sequence[Factors], units: Units) -> Choice:
    """Make the strategy that shards some factors."""
    place = lambda row: next(
        (layout.joined(d, units[f]) for d, f in enumerate(row) if f and f in units), "R"
    )
    return tuple(map(place, rows)), (place(OF_QUERIES),) * len(call.outs)


def lower(
    b: Builder, args: list[Any], kwargs: dict[str, Any], shards: list[LocalShard], op: HigherOrder
) -> Any:
    """Compute flex attention on a rank, whose queries begin at its offsets."""
    query = shards[0]
    dims = [d for d in range(QUERIES + 1) if query.is_sharded(d)]
    if not dims:
        return b.call(op, *args, **kwargs)
    offsets = [b.offset(query, d) for d in dims]
    return b.call(_shifted(op, dims, len(args), query.local_shape[QUERIES]), *args, *offsets)


def _shifted(op: HigherOrder, dims: Sequence[int], tensors: int, queries: int) -> HigherOrder:
    """Return the op whose functions add the offsets of some dims, which are its last tensors."""
    (*args,), kwargs = op.template
    offsets = tuple(TensorSlot(tensors + i) for i in range(len(dims)))
    length, *rest, mask = args[MASK]
    length = queries if isinstance(length, int) else length
    args[SCORE] = _with_offsets(args[SCORE], dims, first=1)
    args[MASK] = (length, *rest, _with_offsets(mask, dims, first=0))
    for place in (OF_SCORE, OF_MASK):
        args[place] = (*args[place], *offsets)
    return HigherOrder(op.op, (tuple(args), kwargs))


def _with_offsets(
    function: torch.fx.GraphModule, dims: Sequence[int], first: int
) -> torch.fx.GraphModule:
    """Return a function of a sample, a head, a query, a key and tensors, with an offset for each
    of some dims as its last tensors.

    Args:
        function: it.
        dims: 0 for the sample, 1 for the head, 2 for the query.
        first: the position of the sample.
    """
    graph = torch.fx.Graph()
    nodes: dict[torch.fx.Node, torch.fx.Node] = {}
    inputs = function.graph.find_nodes(op="placeholder")
    for node in inputs:
        nodes[node] = graph.node_copy(node)
    for d in dims:
        number = inputs[first + d]
        offset = graph.placeholder(f"offset_{d}")
        offset.meta = dict(number.meta)
        nodes[number] = graph.call_function(aten.add.Tensor, (nodes[number], offset))
        nodes[number].meta = dict(number.meta)
    for node in function.graph.nodes:
        if node.op != "placeholder":
            nodes[node] = graph.node_copy(node, nodes.__getitem__)
    graph.lint()
    return torch.fx.GraphModule(function, graph)


def row_of(op: HigherOrder) -> Op:
    """Return the record of a flex attention."""
    return Op(
        flex_attention,
        lower=functools.partial(lower, op=op),
        way_of=lambda _, choice: way_by(*choice[0][:2]),
    )
