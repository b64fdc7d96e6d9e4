"""The memory of one rank's program: its peak, and the tensors that are alive there."""

from __future__ import annotations

import collections
from collections.abc import Iterator

import attrs
import torch

from ..buckets import human_bytes
from ..ops.loops import Loop, loop_of
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
        where = f", at {self.at}" if self.at else ""
        kinds = [f"  {kind:<12} {human_bytes(self.of(kind)):>10}" for kind in KINDS]
        largest = [f"  {tensor}" for tensor in self.alive[:SHOWN]]
        rest = len(self.alive) - len(largest)
        return "\n".join(
            [
                f"{self.name}: {human_bytes(self.peak)} on one rank{where}",
                *kinds,
                "alive at the peak, the largest first",
                *largest,
                *([f"  and {rest} more"] if rest else []),
            ]
        )


def memory(program: LocalProgram) -> Memory:
    """The memory of one rank's program, run op by op in its order."""
    nodes = list(program.graph.nodes)
    owner = owners(program.graph)
    best: tuple[int, int, list[torch.fx.Node]] = (-1, 0, [])
    for at, nbytes, alive in _moments(program.graph):
        if nbytes > best[0]:
            best = nbytes, at, alive
    peak, at, alive = best
    kinds = _kinds(program.graph, owner)
    paths = _paths(program)
    tensors = [
        Allocation(
            kinds.get(node, TEMPORARY),
            paths.get(node, _op(node)),
            tuple(x.shape),
            x.dtype,
            work.nbytes(x),
            node.meta.get("source"),
        )
        for node in alive
        for x in _tensors(node)
    ]
    largest = sorted(tensors, key=lambda tensor: -tensor.nbytes)
    return Memory(program.name, peak, nodes[at].meta.get("source"), tuple(largest))


def peak_bytes(graph: torch.fx.Graph) -> int:
    """The peak of live bytes of a graph."""
    return max((nbytes for _, nbytes, _ in _moments(graph)), default=0)


def owners(graph: torch.fx.Graph) -> dict[torch.fx.Node, torch.fx.Node]:
    """For each node the one whose memory it has: a view has that of its base."""
    found: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        is_view = node.op == "call_function" and work.is_alias(node)
        base: torch.fx.Node = node.all_input_nodes[0] if is_view else node
        found[node] = found.get(base, base)
    return found


def _moments(
    graph: torch.fx.Graph,
) -> Iterator[tuple[int, int, list[torch.fx.Node]]]:
    """For each node that holds more than the ones before it: its number, the bytes that are alive
    while it runs, and the nodes that own them.
    """
    owner = owners(graph)
    last: dict[torch.fx.Node, torch.fx.Node] = {}
    nodes: list[torch.fx.Node] = list(graph.nodes)
    for node in nodes:
        last[owner[node]] = node
        last.update((owner.get(x, x), node) for x in node.all_input_nodes)
    ends: dict[torch.fx.Node, list[torch.fx.Node]] = collections.defaultdict(list)
    for node, end in last.items():
        ends[end].append(node)
    alive: dict[torch.fx.Node, int] = {}
    held = most = 0
    for number, node in enumerate(nodes):
        if owner[node] is node:
            alive[node] = work.nbytes(node.meta.get("val"))
            held += alive[node]
        now = held + _inside(node)
        if now > most:
            most = now
            yield number, now, list(alive)
        for dead in ends[node]:
            if dead.op != "placeholder":
                held -= alive.pop(dead, 0)


def _inside(node: torch.fx.Node) -> int:
    """The most bytes that the graphs of a loop hold beside their inputs."""
    if not isinstance(node.target, Loop):
        return 0
    return max(
        peak_bytes(graph)
        - sum(
            work.nbytes(x.meta.get("val"))
            for x in graph.find_nodes(op="placeholder")
        )
        for graph in loop_of(node).graphs
    )


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


def _tensors(node: torch.fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [x for x in values if isinstance(x, torch.Tensor)]
