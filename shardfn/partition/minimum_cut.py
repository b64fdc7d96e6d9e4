"""The minimum cut of a network with capacities, by scipy's maximum flow."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

INFINITE = 1 << 62  # a capacity that no minimum cut includes
MOST_CAPACITY = 1 << 30  # of what scipy adds up in 32 bits


def minimum_cut(edges: Mapping[tuple[int, int], int], source: int, sink: int) -> set[int]:
    """Return the nodes on the sink's side of the minimum cut that is next to the sink.

    Args:
        edges: the capacity of each edge (tail, head), at least 0.
        source: where the flow begins.
        sink: where it ends.

    Returns:
        All nodes from which the sink is reached without crossing it.

    Example:
        >>> sorted(minimum_cut({(0, 1): 5, (1, 2): 3, (2, 3): 3}, 0, 3))
        [3]
    """
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    total = sum(room for room in edges.values() if room < INFINITE)
    unit = max(1, -(-total // (MOST_CAPACITY // 2)))
    capacity = [min(-(-room // unit), MOST_CAPACITY) for room in edges.values()]
    tails, heads = zip(*edges, strict=True)
    size = max(*tails, *heads, source, sink) + 1
    network = csr_matrix((np.array(capacity, dtype=np.int32), (tails, heads)), shape=(size, size))
    residual = network - maximum_flow(network, source, sink).flow
    residual.eliminate_zeros()
    below = breadth_first_order(residual.T.tocsr(), sink, return_predecessors=False)
    return {int(node) for node in below}
