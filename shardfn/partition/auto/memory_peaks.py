"""The positions in a program at which memory is limited: those where the most bytes are alive."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Graph, Node

from ..lifetimes import ends_of, owners
from ..planner import op_cost

SEGMENTS = 16  # of a program, each with the moment at which most is alive
GATHERED = 6  # readers of the largest arguments


class MemoryPeaks:
    """The lifetimes of a program's values by node position, and the positions at which memory
    is limited.

    Args:
        graph: of the program.
        nodes: its nodes, in the order of the positions.
    """

    def __init__(self, graph: Graph, nodes: Sequence[Node]) -> None:
        self.owner = owners(graph)
        self.position = _positions(graph, nodes)
        end = len(nodes)
        self.last: dict[Node, int] = {}
        for node, dead in ends_of(graph, self.owner).items():
            position = self.position[node] if node.op != "output" else end
            self.last.update(dict.fromkeys(dead, position))
        self.chosen = self.peaks(nodes)

    def is_owner(self, node: Node) -> bool:
        """Return whether a node allocates memory: views do not."""
        return self.owner.get(node) is node

    def span(self, node: Node) -> tuple[int, int]:
        """Return the first and the last position at which the memory of a node is alive."""
        if node.op == "placeholder":
            return 0, len(self.position)
        return self.position[node], self.last.get(node, -1)

    def peaks(self, nodes: Sequence[Node]) -> list[int]:
        """Choose the positions to limit: the peak of each segment, and the readers of the
        largest arguments.
        """
        count = len(nodes)
        bytes_at = [0] * (count + 1)
        for node in nodes:
            if self.is_owner(node) and node.op != "placeholder":
                size = op_cost.nbytes(node.meta.get("val"))
                bytes_at[self.position[node]] += size
                bytes_at[min(self.last.get(node, 0) + 1, count)] -= size
        for i in range(count):
            bytes_at[i + 1] += bytes_at[i]
        step = max(1, -(-count // SEGMENTS))
        found = set()
        for start in range(0, count, step):
            part = range(start, min(start + step, count))
            found.add(max(part, key=lambda i: (bytes_at[i], -i)))
        return sorted(found | self.readers(nodes))

    def readers(self, nodes: Sequence[Node]) -> set[int]:
        """Return the positions of the first and the last reader of the largest arguments."""
        holders = [node for node in nodes if node.op == "placeholder"]
        largest = sorted(holders, key=lambda x: -op_cost.nbytes(x.meta.get("val")))[:GATHERED]
        found = set()
        for node in largest:
            positions = sorted(self.position[x] for x in node.users if x.op != "output")
            found.update((*positions[:1], *positions[-1:]))
        return found


def _positions(graph: Graph, nodes: Sequence[Node]) -> dict[Node, int]:
    """Number the nodes of a graph; a node outside the list takes the number of the one before
    it.
    """
    counted = {node: i for i, node in enumerate(nodes)}
    found = {}
    now = 0
    for node in graph.nodes:
        now = counted.get(node, now)
        found[node] = now
    return found
