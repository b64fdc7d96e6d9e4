"""The work between the parameters of a program: in which order its ops read them, and for how long
it runs until it reads the next.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from ...hardware import H100
from ...types import Program
from ..planner.inline_loops import inlined
from ..planner.op_cost import seconds


def work_of(program: Program, parameters: Sequence[int]) -> list[tuple[int, float]]:
    """The parameters of a program in the order in which ops on other inputs read them.

    What is made of parameters alone, such as a cast, is read where such an op reads it. An op
    belongs to the last parameter that its inputs are made of, as it runs on the latest stage of
    what it reads. Parameters that no op reads are first.

    Args:
        program: of a forward.
        parameters: the numbers of its inputs that are parameters.

    Returns:
        For each parameter its number, and the seconds of its ops: the time in which an H100 does
        their arithmetic or moves their bytes, the longer one.
    """
    flat = inlined(program)
    graph = flat.program.graph.graph
    inputs = graph.find_nodes(op="placeholder")
    made_of: dict[Node, frozenset[int]] = {inputs[i]: frozenset([i]) for i in parameters}
    latest: dict[Node, int] = {x: -1 for x in inputs if x not in made_of}  # a place in the order
    order: list[int] = []
    times: list[float] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        read = node.all_input_nodes
        own = frozenset[int]().union(*(made_of.get(x, frozenset()) for x in read))
        rows = [latest[x] for x in read if x in latest]
        if own and not rows:
            made_of[node] = own
            continue
        new = sorted(own.difference(order))
        order += new
        times += [0.0] * len(new)
        latest[node] = at = max([-1, *rows, *map(order.index, own)])
        if at >= 0:  # what depends on no parameter runs wherever it is read
            times[at] += seconds(node, H100) * flat.times.get(node, 1)
    unread = [i for i in parameters if i not in order]
    return [*((i, 0.0) for i in unread), *zip(order, times, strict=True)]
