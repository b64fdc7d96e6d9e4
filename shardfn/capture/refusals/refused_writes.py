"""In-place writes to inputs and torch's collectives in an ATen graph, which are refused."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ... import _compat
from ...errors import CaptureError, call_site
from ...ops.nodes import origin_of
from .. import annotations as sources
from ..aten_views import viewed

ALONE = (
    "compute with global values: sf.shard adds the communication that their placements need, "
    "and sf.constrain requests a placement; in shard_map call sf.psum(x, axis_name), "
    "sf.all_gather, sf.psum_scatter, sf.all_to_all or sf.ppermute"
)


def written_input(node: torch.fx.Node) -> torch.fx.Node | None:
    """The input that shares memory with a value, or that an in-place op or an `out=` writes to,
    also through views. None if there is none.
    """
    queue = [node]
    while queue:
        node = queue.pop()
        if node.op == "placeholder":
            return node
        if node.op == "call_function":
            queue += _memory_of(node)
    return None


def _memory_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The arguments of a node whose memory its result shares."""
    if _mutates(node):
        return _written(node)
    shares = getattr(node.target, "is_view", False) or "getitem" in str(node.target)
    return [x for x in node.args[:1] if shares and isinstance(x, torch.fx.Node)]


def _written(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The arguments that an op writes to, such as the first of `add_` or the last ones of
    `sort(..., out=(v, i))`.
    """
    written: list[torch.fx.Node] = []
    for position, argument in enumerate(_compat.schema(node.target).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = (
                node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            )
            torch.fx.node.map_arg(given, written.append)
    return written


def _mutates(node: torch.fx.Node) -> bool:
    return isinstance(node.target, _compat.OpOverload) and _compat.schema(node.target).is_mutable


def refuse_collectives(graph: torch.fx.GraphModule, name: str) -> None:
    """Refuse torch's collectives: on global tensors, their result would depend on the
    placements.

    Raises:
        CaptureError: names the op and the line.
    """
    for node in graph.graph.nodes:
        if str(getattr(node.target, "namespace", "")).strip("_").startswith("c10d"):
            raise CaptureError.of(
                name,
                f"the function calls a collective itself: {node.target}",
                needed="a function of global tensors",
                fix=ALONE,
                **origin_of(node),
            )


BUFFERS = (
    "for the buffers of a module use fn, params, buffers = sf.functionalize(module), whose fn "
    "returns new buffers; with DTensor parameters pass clones of the buffers to "
    "torch.func.functional_call(module, buffers, args) and return them"
)

# ops whose write is not plain in the user's line: the problem, and the suggestion
WRITERS = {
    torch.ops.aten.embedding_renorm_.default: (
        "an embedding with max_norm rescales rows of its weight in place",
        "leave out max_norm, and call weight.copy_(torch.renorm(weight, 2, 0, max_norm)) "
        "before the function",
    )
}

# what the body of a loop may write to, of which it does not know the name
OF_BODY = "(a carry, a per-step input or a closed-over value)"


def refuse_mutation(
    graph: torch.fx.GraphModule, name: str, paths: Sequence[str]
) -> list[torch.fx.Node]:
    """Refuse in-place writes to the inputs of a graph. Returns its other in-place writes. Refuses
    writes to inputs.

    Raises:
        CaptureError: names the argument and the line.
    """
    holders = graph.graph.find_nodes(op="placeholder")
    writes = [n for n in graph.graph.nodes if n.op == "call_function" and _mutates(n)]
    for node in writes:
        refuse_windows(node, name)
        hit = written_input(node)
        if hit is None:
            continue
        position = holders.index(hit)
        source = sources.user_line(node)
        if position < len(paths):
            path = paths[position]
            where = f"{name}, argument {path}"
            fix = f"return the new value, or write to a copy: {path}.clone()"
            if path == OF_BODY:
                fix = f"return the new value, or write to a clone(); {BUFFERS}"
        else:
            path = "a closed-over tensor"
            where = f"{name}, {path}"
            fix = f"{BUFFERS}; or return the new value, or write to a clone()"
        got = "the function writes to this tensor in place"
        got, fix = WRITERS.get(node.target, (got, fix))
        raise CaptureError.of(
            where,
            got,
            needed="a function without side effects",
            fix=fix,
            source=source,
            arg_path=path,
        )
    return writes


def refuse_array_writes(python: torch.fx.GraphModule, name: str) -> None:
    """Refuse in-place writes to NumPy arrays that a function closes over: the program has copies
    of them. A write through a view, or by torch, counts in the version of Dynamo's fake tensor.

    Raises:
        CaptureError: names the line that first uses the array.
    """
    for node in python.graph.find_nodes(op="placeholder"):
        if _compat.is_array_input(node) and node.meta["example_value"]._version:
            lines = map(sources.user_line, node.users)
            raise CaptureError.of(
                f"{name}, a closed-over NumPy array",
                "the function writes to this array in place",
                needed="a function without side effects",
                fix="return the new value, or write to a copy: array.copy()",
                source=next(filter(None, lines), None) or call_site(),
            )


OF_TANGENT = torch.ops.aten._new_zeros_with_same_feature_meta.default


def refuse_windows(node: torch.fx.Node, name: str) -> None:
    """Refuse a write through windows that overlap, or that leave elements out: torch's
    functionalization gives other values than the write has (torch 2.13).

    Raises:
        CaptureError: names the line.
    """
    arguments = _compat.schema(node.target).arguments
    written = [
        x
        for argument, x in zip(arguments, node.args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    for value in written:
        if isinstance(value, torch.fx.Node) and _is_windowed(value):
            raise CaptureError.of(
                name,
                "the function writes to a view whose windows overlap or omit elements",
                needed="in-place writes only to views in which each element has its own place in "
                "memory",
                fix="compute the new value with torch.where, x.index_add, or slices such as x[::2]",
                source=sources.user_line(node),
            )


def _is_windowed(node: torch.fx.Node | None) -> bool:
    """Whether a value is a view by overlapping or gapped windows. The memory that torch makes for a
    tangent like that of its primal, which it then fills, is none.
    """
    if node is not None and node.target is OF_TANGENT:
        return False
    shared = node is not None and _compat.may_overlap(node.meta.get("val"))
    while node is not None and not shared:
        if node.target is torch.ops.aten.unfold.default:
            before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
            shared = after.numel() != before.numel() or _compat.may_overlap(after)
        node = viewed(node)
    return shared
