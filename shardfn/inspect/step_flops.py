"""`StepFlops`: the floating-point operations of one rank's step, as its program runs them and as
its model needs them.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

import attrs
import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..hardware import Hardware
from ..ops.loops import Branch, Loop, Scan, loop_of
from ..ops.pipeline import Pipeline
from ..ops.placement import AFTER
from ..partition.planner import op_cost

SLACK = 1 + 1e-9  # of sums in another order


@attrs.frozen
class StepFlops:
    """The floating-point operations of one rank's step, in matrix products, convolutions and
    attention.

    Args:
        run: the operations that the program runs, with recomputation, half of the pairs of a causal
            attention, and five products in the backward of attention.
        model: the rank's share of the operations that the model needs, without recomputation, with
            all pairs of an attention, and with four products in the backward of attention.
        run_at_peak: the seconds that the operations in `run` take at the peak rates of their
            dtypes.
        model_at_peak: the seconds that the operations in `model` take at the peak rates of their
            dtypes.
    """

    run: float
    model: float
    run_at_peak: float
    model_at_peak: float


def step_flops(graph: Graph, hardware: Hardware) -> StepFlops:
    """Count the operations of a program's graph and of its loops. A while loop counts as one step,
    a cond as the branch that runs more.

    Args:
        graph: of one rank, or of the global program.
        hardware: whose peaks count.
    """
    run = model = run_at_peak = model_at_peak = 0.0
    again = _recomputed_only(graph)
    for node, times in _nodes(graph, 1):
        flops = times * op_cost.flops(node)
        if flops:
            is_needed = node in again or not op_cost.is_recomputed(node)
            needed = times * op_cost.flops_as_published(node) if is_needed else 0.0
            peak = hardware.peak(_dtype(node))
            run, model = run + flops, model + needed
            run_at_peak += flops / peak
            model_at_peak += needed / peak
    return StepFlops(run, model, run_at_peak, model_at_peak)


def with_shares(
    own: Sequence[StepFlops], whole: Graph, ranks: int, hardware: Hardware
) -> list[StepFlops]:
    """Return the operations of ranks, with their shares of those that the model needs: what several
    ranks compute alike is needed once.

    Args:
        own: the operations of the program of each coordinate of a pipeline, or of the one program
            of all ranks.
        whole: the program of all ranks, on global tensors. Where it has fewer operations than the
            programs run, or more than all ranks do, it says nothing, as with code of one rank.
        ranks: how many run each program.
        hardware: whose peaks count.
    """
    every, run = step_flops(whole, hardware), sum(x.run for x in own)
    if not run <= every.run * SLACK or every.run > ranks * run * SLACK:
        return [*own]
    share = every.model / (ranks * sum(x.model for x in own) or 1)
    at_peak = every.model_at_peak / (ranks * sum(x.model_at_peak for x in own) or 1)
    return [
        attrs.evolve(x, model=share * x.model, model_at_peak=at_peak * x.model_at_peak) for x in own
    ]


def _recomputed_only(graph: Graph) -> set[Node]:
    """Return the recomputed ops of which a graph has no other, as of a forward that only the
    backward reads: each value once.
    """
    numbers: dict[Node, int] = {}
    values: dict[tuple[object, str], int] = {}
    first: dict[int, Node] = {}
    for node in graph.nodes:
        if node.target is AFTER:  # the same value, at a later time
            numbers[node] = numbers[node.all_input_nodes[0]]
            continue
        read = map_arg((node.args, node.kwargs), lambda x: numbers[x])
        key = (node, "") if node.op != "call_function" else (node.target, str(read))
        number = numbers[node] = values.setdefault(key, len(values))
        if number not in first or not op_cost.is_recomputed(node):
            first[number] = node
    return {node for node in first.values() if op_cost.is_recomputed(node)}


def _nodes(graph: Graph, times: int) -> Iterator[tuple[Node, int]]:
    """Yield each op of a graph and of its loops, and how often it runs."""
    for node in graph.nodes:
        if isinstance(node.target, Loop):
            for inner, count in _bodies(loop_of(node)):
                yield from _nodes(inner, times * count)
        elif node.op == "call_function":
            yield node, times


def _bodies(loop: Loop) -> list[tuple[Graph, int]]:
    """Return the graphs of a loop, and how often each runs."""
    if isinstance(loop, Pipeline):
        counts = collections.Counter(x.graph for x in loop.actions())
        return [(graph, counts[k]) for k, graph in enumerate(loop.graphs)]
    if isinstance(loop, Branch):
        run = lambda graph: sum(n * op_cost.flops(node) for node, n in _nodes(graph, 1))
        return [(max(loop.graphs, key=run), 1)]
    return [(graph, loop.length if isinstance(loop, Scan) else 1) for graph in loop.graphs]


def _dtype(node: Node) -> torch.dtype:
    """Return the dtype of the first result of an op that it computes."""
    value = node.meta["val"]
    values = value if isinstance(value, (tuple, list)) else [value]
    return next(x.dtype for x in values if x is not None)
