"""Shards of different sizes in the code of one rank: the local shapes of the rank that is read, and
what of the function depends on them.

Ranks of equal shards share one program. Where shards are uneven, the function is read once for
each kind of rank. A size is a number of Python then, so a value that all ranks seem to have may
differ: two readings are compared node by node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ...errors import CaptureError, PlacementError
from ...mesh import axes_of
from ...ops import shard_map
from ...ops.prims import CALLS
from ...ops.text_formats import print_sized_shards
from .. import annotations as sources
from ..control_flow import control_flow_ops
from ..dynamo_nodes import BACKWARD, PLUMBING, children_of, name_of
from ..shard_map.axis_names import current_scope

DIFFERS = "differs"  # in the meta of a node: the axes over which its constants differ
ENTRIES = shard_map.to_local, shard_map.from_local  # their texts have sizes
CONSTANTS = bool, int, float, complex, str, torch.dtype, torch.device

Rows = tuple[Any, ...]  # (axis, its size, placement), ...
Position = tuple[int, int]  # of a node: the number of its graph, its own


class NeedsOwnSizes(CaptureError):
    """The error for code of one rank whose shards differ in size, read as one program for all
    ranks.
    """


class NodeTraits(NamedTuple):
    """What of a node two readings of a function compare: its op, its inputs, its constants."""

    op: str
    inputs: tuple[str, ...]
    constants: str
    shape: Any  # the global shape, where it has to be equal
    held: torch.Tensor | None  # a constant of the function
    line: str | None


def chunk_size(size: int, n: int, coordinate: int) -> int:
    """The size of one rank's chunk, as torch.chunk cuts."""
    full = -(-size // n)
    return min(full, size - min(coordinate * full, size))


def shards_of(what: str, rows: Rows, shape: Sequence[int]) -> str:
    """How mesh axes shard a global tensor of this shape, as text for the prims.

    Raises:
        NeedsOwnSizes: into shards of different sizes, and the program is that of all ranks.
        PlacementError: the same, where ranks must share a program.
    """
    left = list(shape)
    cuts = []
    for name, n, placement in rows:
        dim = int(placement[1:]) if placement[0] == "S" else None
        sizes = None
        if dim is not None and left[dim] % n:
            sizes = _local_size(what, name, n, dim, left[dim]), left[dim]
        if dim is not None:
            left[dim] = sizes[0] if sizes else left[dim] // n
        cuts.append((name, n, dim, sizes))
    _record_local_shape(rows, shape, tuple(left))
    return print_sized_shards(cuts)


def local_shape(rows: Rows, shape: Sequence[int], at: dict[str, int]) -> tuple[int, ...]:
    """The shape of the local tensor of a rank."""
    sizes = list(shape)
    for name, n, placement in rows:
        if placement[0] == "S":
            dim = int(placement[1:])
            sizes[dim] = chunk_size(sizes[dim], n, at[name])
    return tuple(sizes)


def ranks_may_differ() -> bool:
    """Whether ranks may have different programs."""
    return current_scope().rank is not None


def coordinate_of_rank(what: str, got: str) -> dict[str, int]:
    """The coordinate of the rank whose code is read, by axis.

    Raises:
        NeedsOwnSizes: it is the code of all.
    """
    here = current_scope()
    if not here.rank:
        raise NeedsOwnSizes.of(
            what,
            got,
            needed="shards of equal size, since all ranks share one program",
            fix="x.full_tensor(), x.redistribute to another dim, or pad the dim to a multiple of "
            "the ranks",
        )
    return dict(zip(axes_of(here.mesh).names, here.rank, strict=True))


def _local_size(what: str, name: str, n: int, dim: int, size: int) -> int:
    got = f"dim {dim} has {size} elements, which the {n} ranks of {name} cannot share equally"
    if not ranks_may_differ():
        raise PlacementError.of(
            what,
            got,
            needed="shards of equal size, since all ranks share one program",
            fix="x.full_tensor(), x.redistribute to another dim, or pad the dim to a multiple of "
            "the ranks",
            dim=dim,
        )
    return chunk_size(size, n, coordinate_of_rank(what, got)[name])


def _record_local_shape(rows: Rows, shape: Sequence[int], local: tuple[int, ...]) -> None:
    """Record a local shape that the program depends on."""
    here = current_scope()
    if here.rank:
        here.cuts.append((rows, tuple(shape), local))


def fits(cuts: Sequence[Any], names: Sequence[str], rank: Sequence[int]) -> bool:
    """Whether a program for some local shapes is also that of this rank."""
    at = dict(zip(names, rank, strict=True))
    return all(local_shape(rows, shape, at) == mine for rows, shape, mine in cuts)


def traits(python: torch.fx.GraphModule) -> tuple[tuple[NodeTraits, ...], ...]:
    """The traits of each node of Dynamo's graph, and of those in it."""
    return tuple(
        tuple(_trait(module, node) for node in module.graph.nodes) for module in _modules(python)
    )


def _modules(python: torch.fx.GraphModule) -> Iterator[torch.fx.GraphModule]:
    return (m for m in python.modules() if isinstance(m, torch.fx.GraphModule))


def _trait(module: torch.fx.GraphModule, node: torch.fx.Node) -> NodeTraits:
    is_entry = node.target in ENTRIES
    where = str(node.kwargs.get("where", ""))
    shape = None
    if node.target is shard_map.from_local and where != shard_map.RESULT:
        shape = tuple(node.meta["example_value"].shape)
    held = getattr(module, str(node.target), None) if node.op == "get_attr" else 0
    constants = torch.fx.node.map_arg((node.args, node.kwargs), lambda _: None)
    return NodeTraits(
        op=f"{node.op} {node.target if isinstance(node.target, str) else name_of(node)}",
        inputs=tuple(x.name for x in node.all_input_nodes),
        constants="" if is_entry or node.op == "output" else _constants_text(constants),
        shape=shape,
        held=held if isinstance(held, torch.Tensor) else None,
        line=sources.user_line(node),
    )


def _constants_text(x: Any) -> str:
    """Constants that may depend on a size, as text."""
    if isinstance(x, dict):
        return _constants_text(list(x.items()))
    if isinstance(x, slice):
        return _constants_text((x.start, x.stop, x.step))
    if isinstance(x, (list, tuple)):
        return f"({','.join(map(_constants_text, x))})"
    return repr(x) if isinstance(x, CONSTANTS) else type(x).__name__


def differing(name: str, readings: Sequence[Any]) -> frozenset[Position]:
    """The nodes whose constants differ between the readings of a function.

    Args:
        name: of the function.
        readings: the traits of each reading.

    Raises:
        CaptureError: the ops differ.
        PlacementError: a DTensor has another shape on each rank.
    """
    first = readings[0]
    positions = set()
    for other in readings[1:]:
        if [len(g) for g in first] != [len(g) for g in other]:
            raise _different_ops_error(name, *_first_difference(first, other))
        for k, graphs in enumerate(zip(first, other, strict=True)):
            for i, (a, b) in enumerate(zip(*graphs, strict=True)):
                if _differ(name, a, b):
                    positions.add((k, i))
    return frozenset(positions)


def _first_difference(first: Any, other: Any) -> tuple[NodeTraits, NodeTraits]:
    """The first pair of nodes whose ops differ between two readings."""
    pairs = [
        (a, b) for graphs in zip(first, other, strict=False) for a, b in zip(*graphs, strict=False)
    ]
    return next(((a, b) for a, b in pairs if a.op != b.op), pairs[-1])


def _differ(name: str, a: NodeTraits, b: NodeTraits) -> bool:
    """Whether the values of a node differ between ranks for their constants."""
    if (a.op, a.inputs) != (b.op, b.inputs):
        raise _different_ops_error(name, a, b)
    if a.shape != b.shape:
        got = (
            f"local tensors make a DTensor of shape {a.shape} on one rank, but of shape {b.shape} "
            "on another"
        )
        fix = "pass shape= and stride= of the global tensor"
        raise PlacementError.of(
            "DTensor.from_local", got, needed="one global shape", fix=fix, source=a.line
        )
    if not _is_equal(a.held, b.held):
        fix = "torch.full((), n) in the function, where n is the size"
        got = "a constant tensor in the function depends on a size that differs between ranks"
        raise CaptureError.of(name, got, fix=fix, source=a.line)
    return a.constants != b.constants


def _is_equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two constants of a function are the same."""
    if a is b or a is None or b is None:
        return True
    alike = (a.shape, a.dtype, type(a)) == (b.shape, b.dtype, type(b))
    return alike and type(a) is torch.Tensor and torch.equal(a, b)


def _different_ops_error(name: str, a: NodeTraits, b: NodeTraits) -> CaptureError:
    lines = [f"one rank: {a.op}", f"another: {b.op}"]
    return CaptureError.of(
        name,
        "ranks whose shards differ in size run different ops",
        *lines,
        fix="run the same ops for each size; ops on an empty tensor are correct and cost nothing",
        source=a.line or b.line,
    )


def mark_differing(python: torch.fx.GraphModule, name: str, positions: frozenset[Position]) -> None:
    """Mark the nodes whose constants differ between ranks.

    Raises:
        CaptureError: of a loop or a collective.
    """
    axes = frozenset(axes_of(current_scope().mesh).names) if positions else None
    modules = list(_modules(python))
    nodes = [list(module.graph.nodes) for module in modules]
    for k, i in positions:
        node = nodes[k][i]
        is_derivative = name_of(node) in (*BACKWARD, *PLUMBING)
        runs_graphs = control_flow_ops.is_control_flow(node) or children_of(modules[k], node)
        if node.target in CALLS or is_derivative or runs_graphs:
            raise differs_error(name, node, "a loop, a branch or a collective")
        node.meta[DIFFERS] = axes


def differs_error(name: str, node: torch.fx.Node, of: str) -> CaptureError:
    """The error for a node whose constants differ between ranks where they must not."""
    line = sources.user_line(node)
    return CaptureError.of(
        name,
        f"{name_of(node)}: {of} depends on a size that differs between ranks",
        fix="use a size that is equal on all ranks, such as x.shape of the DTensor x",
        source=line,
    )
