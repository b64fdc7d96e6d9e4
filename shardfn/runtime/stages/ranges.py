"""`ranged`: a program that shows the user's lines and modules in a profile of torch.profiler.

Ranges stand around each call, and with `aten` around the ops of each line, with Inductor around
each collective. A call outside of a profiler runs the program as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch.profiler import record_function

from ... import _compat
from ...collectives import kind_of_op
from ...compile.backends import Runner
from ...ops.loops import Loop
from ...ops.nodes import origin_of
from ...partition.planner import op_cost
from ...schedule import copied
from ...source_text import RANGE, WAIT_RANGE, call_range, collective_range, line_range
from ...types import Collective

WAIT = "_c10d_functional.wait_tensor"


def ranged(name: str, compiled: Runner, profiled: Callable[[], Runner]) -> Runner:
    """Return a program that runs another one while torch's profiler records.

    Args:
        name: of the function.
        compiled: the program.
        profiled: makes the one that has ranges, at the first call under a profiler.
    """
    others: list[Runner] = []

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        if not others:
            others.append(profiled())
        with record_function(call_range(name)):
            return others[0](inputs)

    return _compat.unless_profiled(compiled, run)


def with_ranges(graph: torch.fx.Graph) -> torch.fx.Graph:
    """Copy a graph, with a range around the ops of each line, around each collective and around
    each wait; those of its loops too.
    """
    graph = copied(graph)
    for nodes, name in _grouped([*graph.nodes]):
        with graph.inserting_before(nodes[0]):
            entered = graph.call_function(_compat.enter_range(), (name, None))
        with graph.inserting_after(nodes[-1]):
            graph.call_function(_compat.exit_range(), (entered,))
    for node in graph.nodes:
        if isinstance(node.target, Loop):
            inner = tuple(map(with_ranges, node.target.graphs))
            node.target = attrs.evolve(node.target, graphs=inner)
    return graph


def _grouped(nodes: Sequence[torch.fx.Node]) -> Iterator[tuple[list[torch.fx.Node], str]]:
    """Yield the nodes of each range, and its name."""
    for name, group in itertools.groupby(nodes, _name):
        if name is not None:
            yield [*group], name


def _name(node: torch.fx.Node) -> str | None:
    """Return the name of the range of an op; None for a loop, whose ops have theirs, and for what
    is no op.
    """
    if node.op != "call_function" or isinstance(node.target, Loop):
        return None
    record = node.meta.get("collective")
    if record is not None:
        return collective_range(record.kind, record.axis, **record.origin)
    if node.target is op_cost.WAIT:
        (sent,) = node.all_input_nodes
        return WAIT_RANGE + str(_name(sent)).removeprefix(RANGE)
    return line_range(**origin_of(node))


def with_named_collectives(compiled: Runner, graph: torch.fx.Graph) -> Runner:
    """Return a compiled program that runs each collective of its graph in a range, but for those of
    loops.
    """
    records = [node.meta["collective"] for node in graph.nodes if "collective" in node.meta]

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        names = _Names(records)
        with _compat.RangedOps(names.name, names.note):
            return compiled(inputs)

    return run


class _Names:
    """The names of the collectives of one call, which start in the order of the graph.

    Args:
        records: of the collectives.
    """

    def __init__(self, records: Sequence[Collective]) -> None:
        self.left = list(reversed(records))
        self.waits: dict[int, str] = {}  # by the memory of the result

    def name(self, op: str, args: Sequence[Any]) -> str | None:
        """Return the name of the range of an op."""
        if op == WAIT:
            return self.waits.pop(_memory(args[0]), None)
        kind = kind_of_op(op)
        if kind is None or not self.left:
            return None
        if self.left[-1].kind != kind.name:  # the order is another: name no further one
            self.left.clear()
            return None
        record = self.left.pop()
        return collective_range(record.kind, record.axis, **record.origin)

    def note(self, name: str, result: Any) -> None:
        """Remember the name of the wait for a collective that has started."""
        if not name.startswith(WAIT_RANGE) and isinstance(result, torch.Tensor):
            self.waits[_memory(result)] = WAIT_RANGE + name.removeprefix(RANGE)


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()
