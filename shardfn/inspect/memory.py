"""The memory of one rank's program: its peak, and the tensors that are alive there."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

from ..accepted import accept
from ..buckets import human_bytes
from ..ops.loops import Branch, Loop, loop_of
from ..ops.nodes import args_of
from ..partition.lifetimes import ends_of, owners
from ..partition.planner import work
from ..types import LocalProgram

ARGUMENT = "arguments"
RESULT = "results"
ACTIVATION = "activations"
COLLECTIVE = "collectives"
TEMPORARY = "temporaries"
KINDS = (ARGUMENT, RESULT, ACTIVATION, COLLECTIVE, TEMPORARY)
SHOWN = 10  # tensors in the text
PACK = torch.ops.shardfn.pack.default


@attrs.frozen
class Allocation:
    """One tensor that a program holds.

    Args:
        kind: "arguments", "results", "activations" (made in the forward, read in the backward),
            "collectives" (what one sends or receives) or "temporaries".
        name: of an argument its path, of others the op.
        shape: of the local tensor.
        dtype: of the tensor.
        nbytes: of the tensor.
        source: the line that makes it.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    source: str | None

    def __str__(self) -> str:
        size = human_bytes(self.nbytes)
        form = f"{self.name} {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"
        return f"{size:>10}  {self.kind:<12} {form}  {self.source or ''}".rstrip()


@attrs.frozen
class Memory:
    """The memory of one rank's program, in bytes.

    Args:
        name: of the program.
        peak: the most that is alive at once. Arguments are alive throughout, views share the
            memory of their base.
        at: the line at which the peak is reached.
        alive: the tensors that are alive at the peak, the largest first.
    """

    name: str
    peak: int
    at: str | None
    alive: tuple[Allocation, ...]

    def of(self, kind: str) -> int:
        """The bytes of one kind at the peak."""
        accept("Memory.of", kind=kind)
        return sum(tensor.nbytes for tensor in self.alive if tensor.kind == kind)

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        """What a notebook shows: the table."""
        printer.text(str(self))

    def __str__(self) -> str:
        lines = [f"{self.name}: {human_bytes(self.peak)} on one rank"]
        if self.at:
            lines[0] += f", at {self.at}"
        for kind in KINDS:
            size = human_bytes(self.of(kind))
            lines.append(f"  {kind:<12} {size:>10}")
        lines.append("alive at the peak, the largest first")
        shown = self.alive[:SHOWN]
        lines += [f"  {tensor}" for tensor in shown]
        if len(self.alive) > len(shown):
            lines.append(f"  and {len(self.alive) - len(shown)} more")
        return "\n".join(lines)


# an op, and the nodes that own the memory that is held while it runs, arguments among them
Moments = Iterator[tuple[torch.fx.Node, list[torch.fx.Node]]]


def memory(
    program: LocalProgram, moments: Callable[[torch.fx.Graph], Moments] | None = None
) -> Memory:
    """The memory of one rank's program.

    Args:
        program: one rank's program.
        moments: what is held while a graph runs, its own and those of loops; op by op in its
            order by default.
    """
    graph = program.graph
    peak, at, alive = _peak(graph, moments or op_by_op)
    kinds = _kinds(graph, owners(graph, elements=True))
    paths = _paths(program)
    tensors = []
    for node in alive:
        kind = kinds.get(node, TEMPORARY)
        name = paths.get(node, _op(node))
        tensors += _allocations(node, kind, name)
    largest = sorted(tensors, key=lambda tensor: -tensor.nbytes)
    source = at.meta.get("source") if at else None
    return Memory(program.name, peak, source, tuple(largest))


def _allocations(node: torch.fx.Node, kind: str, name: str) -> list[Allocation]:
    """The tensors that a node owns."""
    source = node.meta.get("source")
    return [
        Allocation(kind, name, tuple(x.shape), x.dtype, work.nbytes(x), source)
        for x in _tensors(node)
    ]


def peak_bytes(graph: torch.fx.Graph) -> int:
    """The peak of live bytes of a graph, run op by op."""
    return _peak(graph, op_by_op)[0]


def _peak(
    graph: torch.fx.Graph, moments: Callable[[torch.fx.Graph], Moments]
) -> tuple[int, torch.fx.Node | None, list[torch.fx.Node]]:
    """The most bytes that a graph holds at once, the op that runs then, and what it holds."""
    most, at, alive = 0, None, []
    size = functools.cache(_nbytes)
    for node, held in moments(graph):
        inside = _inside(node, moments)
        # the results of a branch are those of its graph
        is_branch = isinstance(node.target, Branch)
        twice = {node, *_items(node)} if is_branch else set()
        now = [*(x for x in held if x not in twice), *inside]
        nbytes = sum(map(size, now))
        if nbytes > most:
            most, at, alive = nbytes, node, now
    return most, at, alive


def op_by_op(graph: torch.fx.Graph) -> Moments:
    """The bytes that a graph holds while it runs op by op, at each op that holds more than those
    before it, and at loops. A tensor of a tuple is owned by its getitem.
    """
    owner = owners(graph, elements=True)
    ends = ends_of(graph, owner)
    alive: dict[torch.fx.Node, int] = {}
    held = most = 0
    nodes: list[torch.fx.Node] = list(graph.nodes)
    for node in nodes:
        made = [x for x in (node, *_items(node)) if owner[x] is x]
        if node.target is not operator.getitem:
            alive.update((x, _nbytes(x)) for x in made)
            held += sum(map(_nbytes, made))
        if held > most or isinstance(node.target, Loop):
            most = max(most, held)
            yield node, list(alive)
        for dead in ends[node]:
            if dead.op != "placeholder":
                held -= alive.pop(dead, 0)


def _items(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes that read a tensor of a tuple."""
    return [user for user in node.users if user.target is operator.getitem]


def _inside(
    node: torch.fx.Node, moments: Callable[[torch.fx.Graph], Moments]
) -> list[torch.fx.Node]:
    """The nodes of the graphs of a loop that own the most bytes at once, beside their inputs."""
    if not isinstance(node.target, Loop):
        return []
    every = [_alive_inside(graph, moments) for graph in loop_of(node).graphs]
    return max(every, key=lambda alive: sum(map(_nbytes, alive)))


def _alive_inside(
    graph: torch.fx.Graph, moments: Callable[[torch.fx.Graph], Moments]
) -> list[torch.fx.Node]:
    """The nodes of a graph that are alive at its peak, without its inputs."""
    _, _, alive = _peak(graph, moments)
    return [node for node in alive if node.op != "placeholder"]


def _nbytes(node: torch.fx.Node) -> int:
    """The bytes that a node owns."""
    return sum(map(work.nbytes, _tensors(node)))


def _tensors(node: torch.fx.Node) -> list[torch.Tensor]:
    """The tensors that a node owns: of a tuple those that nothing reads."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    read = {args_of(item)[1] for item in _items(node)}
    return [x for i, x in enumerate(values) if isinstance(x, torch.Tensor) and i not in read]


def _kinds(
    graph: torch.fx.Graph, owner: dict[torch.fx.Node, torch.fx.Node]
) -> dict[torch.fx.Node, str]:
    """The kind of each node that owns memory. Others are temporaries."""
    (output,) = graph.find_nodes(op="output")
    found: dict[torch.fx.Node, str] = {}
    for node in graph.nodes:
        for read in node.all_input_nodes:
            if _phase(read) == "forward" and _phase(node) == "backward":
                found[owner[read]] = ACTIVATION
        if "collective" in node.meta:
            found[owner[node]] = COLLECTIVE
            sent = [x for x in node.all_input_nodes if x.target is PACK]
            found.update((x, COLLECTIVE) for x in sent)
    found.update((owner[x], RESULT) for x in output.all_input_nodes)
    found.update((x, ARGUMENT) for x in graph.find_nodes(op="placeholder"))
    return found


def _paths(program: LocalProgram) -> dict[torch.fx.Node, str]:
    """The paths of the arguments. The first inputs are the rank's coordinates."""
    holders = program.graph.find_nodes(op="placeholder")
    coordinates = len(holders) - len(program.in_paths)
    return dict(zip(holders[coordinates:], program.in_paths, strict=True))


def _op(node: torch.fx.Node) -> str:
    if node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return getattr(node.target, "_opname", node.name)


def _phase(node: torch.fx.Node) -> str:
    return node.meta.get("phase", "")
