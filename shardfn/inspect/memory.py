"""The memory of one rank's program: its peak, and the tensors that are alive there."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch

from ..buckets import human_bytes
from ..ops.loops import Loop, loop_of
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
        return sum(tensor.nbytes for tensor in self.alive if tensor.kind == kind)

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


def memory(program: LocalProgram) -> Memory:
    """The memory of one rank's program, run op by op in its order."""
    graph = program.graph
    peak, at, alive = 0, None, []
    for node, nbytes, held in _moments(graph):
        if nbytes > peak:
            peak, at, alive = nbytes, node, held
    kinds = _kinds(graph, owners(graph))
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
    """The tensors that a node makes."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    source = node.meta.get("source")
    found = []
    for x in values:
        if isinstance(x, torch.Tensor):
            shape = tuple(x.shape)
            nbytes = work.nbytes(x)
            found.append(Allocation(kind, name, shape, x.dtype, nbytes, source))
    return found


def peak_bytes(graph: torch.fx.Graph) -> int:
    """The peak of live bytes of a graph."""
    return max((nbytes for _, nbytes, _ in _moments(graph)), default=0)


def _moments(
    graph: torch.fx.Graph,
) -> Iterator[tuple[torch.fx.Node, int, list[torch.fx.Node]]]:
    """For each node that holds more than the ones before it: the bytes that are alive while it
    runs, and the nodes that own them.
    """
    owner = owners(graph)
    ends = ends_of(graph, owner)
    alive: dict[torch.fx.Node, int] = {}
    held = 0
    most = 0
    nodes: list[torch.fx.Node] = list(graph.nodes)
    for node in nodes:
        if owner[node] is node:
            nbytes = work.nbytes(node.meta.get("val"))
            alive[node] = nbytes
            held += nbytes
        now = held + _inside(node)
        if now > most:
            most = now
            yield node, now, list(alive)
        for dead in ends[node]:
            if dead.op != "placeholder":
                held -= alive.pop(dead, 0)


def _inside(node: torch.fx.Node) -> int:
    """The most bytes that the graphs of a loop hold beside their inputs."""
    if not isinstance(node.target, Loop):
        return 0
    most = 0
    for graph in loop_of(node).graphs:
        holders = graph.find_nodes(op="placeholder")
        given = sum(work.nbytes(holder.meta.get("val")) for holder in holders)
        most = max(most, peak_bytes(graph) - given)
    return most


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
    found.update((owner[x], RESULT) for x in output.all_input_nodes)
    found.update((x, ARGUMENT) for x in graph.find_nodes(op="placeholder"))
    return found


def _paths(program: LocalProgram) -> dict[torch.fx.Node, str]:
    """The paths of the arguments. The first inputs are the rank's coordinates."""
    holders = program.graph.find_nodes(op="placeholder")
    coordinates = len(holders) - len(program.in_paths)
    return dict(zip(holders[coordinates:], program.in_paths, strict=True))


def _op(node: torch.fx.Node) -> str:
    return getattr(node.target, "_opname", node.name)


def _phase(node: torch.fx.Node) -> str:
    return node.meta.get("phase", "")
