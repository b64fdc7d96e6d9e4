"""Dependence on memory layout: tensors without strides, and as_strided."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch

from ... import _compat
from ...errors import CaptureError, TreeError, call_site
from ...ops import placement
from ...ops.nodes import args_of, origin_of
from ..aten_views import viewed


def kind_without_strides(x: torch.Tensor) -> str | None:
    """The name of the layout of a tensor without strides. None for a strided tensor."""
    if x.layout != torch.strided:
        has_dense = x.layout == torch.sparse_coo and x.dense_dim() > 0
        return f"{x.layout} with dense dims" if has_dense else f"{x.layout}"
    if x.is_nested:
        return "a nested tensor"
    return f"quantized, {x.dtype}" if x.is_quantized else None


def refuse_unstrided(where: str, leaves: Sequence[Any], paths: Sequence[str]) -> None:
    """Refuse sparse, quantized, nested and mkldnn tensors, and parameters without a shape.

    Raises:
        CaptureError: names each of the first.
        TreeError: names each of the others.
    """
    refuse_unshaped(where, zip(paths, leaves, strict=True))
    kinds = [kind_without_strides(x) if isinstance(x, torch.Tensor) else None for x in leaves]
    wrong = [(path, kind) for path, kind in zip(paths, kinds, strict=True) if kind is not None]
    if wrong:
        path = wrong[0][0]
        lines = [f"{path} is {kind}" for path, kind in wrong]
        raise CaptureError.of(
            where,
            *lines,
            needed="tensors with strides",
            fix="x.to_dense(), x.dequantize() or x.to_padded_tensor(); or pass the tensor's "
            "values and indices as arguments",
            source=call_site(),
            arg_path=path,
        )


def refuse_unshaped(where: str, named: Iterable[tuple[str, Any]]) -> None:
    """Refuse parameters that have no shape yet, as of nn.LazyLinear.

    Raises:
        TreeError: names each of them.
    """
    lazy = [name for name, x in named if _compat.is_lazy(x)]
    if lazy:
        raise TreeError.of(
            where,
            f"{', '.join(lazy)} {'has' if len(lazy) == 1 else 'have'} no shape yet",
            needed="parameters with values",
            fix="call the module once on an example, which gives its parameters shapes",
            arg_path=lazy[0],
        )


aten = torch.ops.aten
# the position of the size among the arguments; strides and storage offset follow
AS_STRIDED: dict[object, int] = {
    aten.as_strided.default: 1,
    aten.as_strided_copy.default: 1,
    aten.as_strided_scatter.default: 2,
}
PLACING = (
    placement.REDISTRIBUTE,
    placement.ALIGN,
    placement.NAME,
)  # ops that return their input in new memory


def settle(
    graph: torch.fx.GraphModule, name: str, paths: Sequence[str], *, inside: bool = False
) -> dict[int, bool]:
    """Make each as_strided read the value that owns the memory, with an offset from its start.

    as_strided is defined by memory layout, and sharded or compiled values have other layouts.
    So the memory that it reads must be that of one dense value.

    Args:
        graph: functional ATen, changed in place.
        name: of the function, for errors.
        paths: of the inputs.
        inside: whether the graph is the body of a loop or a branch, whose inputs have layouts
            of their own.

    Returns:
        For each input that an as_strided reads: whether the offset was given as a number, as
        opposed to relative to the start of the input.

    Raises:
        CaptureError: an as_strided reads memory that is not that of one dense value.
    """
    holders = graph.graph.find_nodes(op="placeholder")
    read: dict[int, bool] = {}
    for node in graph.graph.nodes:
        if node.op != "call_function" or node.target not in AS_STRIDED:
            continue
        place = Place.of(node)
        wrong = _wrong(place, inside)
        if wrong is not None:
            number = holders.index(place.owner) if place.owner in holders else len(paths)
            raise _refused(name, node, paths[number] if number < len(paths) else None, wrong)
        if place.origin in holders:
            number = holders.index(place.origin)
            read[number] = read.get(number, False) or place.is_given
        first = AS_STRIDED[node.target]
        node.args, node.kwargs = ((place.owner, *node.args[1 : first + 2], place.start), {})
    return read


def settled(
    graph: torch.fx.GraphModule,
    name: str,
    paths: Sequence[str],
    closed_over: Sequence[torch.Tensor],
) -> dict[int, bool]:
    """`settle` for a graph whose last inputs are closed-over tensors. None of those may be a
    view.
    """
    read = settle(graph, name, paths)
    first = len(paths) - len(closed_over)
    for number in [n for n in read if n >= first]:
        refuse_view(name, closed_over[number - first], paths[number])
    return read


@attrs.frozen
class Place:
    """The memory that one as_strided reads or writes, and the value that owns it."""

    asked: torch.fx.Node  # its first argument
    owner: torch.fx.Node  # the value that owns that memory
    is_given: bool  # whether the offset was given as a number
    start: int  # the first element, and the one after the last
    end: int

    @property
    def origin(self) -> torch.fx.Node:
        """The owner. If that is a copy of a value with a constraint or a name, the value
        itself: the copy may be removed.
        """
        node = self.owner
        while node.target in PLACING:
            (node, *_) = args_of(node)
        return node

    @staticmethod
    def of(node: torch.fx.Node) -> Place:
        """The memory of one as_strided node."""
        first = AS_STRIDED[node.target]
        args = args_of(node)
        asked, (size, stride) = args[0], args[first : first + 2]
        given: Any = args[first + 2] if len(args) > first + 2 else node.kwargs.get("storage_offset")
        start = asked.meta["val"].storage_offset() if given is None else given
        if 0 in size:  # which reads nothing
            start = end = 0
        else:
            last = sum((n - 1) * s for n, s in zip(size, stride, strict=True))
            end = start + last + 1
        owner = asked
        while (source := viewed(owner)) is not None:
            owner = source
        return Place(asked, owner, given is not None, start, end)


def _wrong(place: Place, inside: bool) -> str | None:
    """Why the memory is not that of one dense value of the program. None if it is."""
    asked = place.asked.meta["val"]
    value = place.owner.meta["val"]
    if not place.end:
        return None
    is_placed = place.owner.target in PLACING
    before = place.origin
    if is_placed and (
        place.is_given or viewed(before) or before.meta["val"].stride() != value.stride()
    ):
        return (
            "the view reads the memory of a value to which sf.constrain or sf.checkpoint_name "
            "was applied"
        )
    if inside and place.owner.op == "placeholder":
        return (
            "the view is inside a loop or branch, but reads the memory of a value from outside of "
            "the loop or branch"
        )
    if (asked.dtype, asked.device) != (value.dtype, value.device):
        return f"the view reads memory of {value.dtype} as {asked.dtype}"
    if value.storage_offset() or not _is_dense(value):
        return (
            f"the view reads a tensor of shape {tuple(value.shape)} and strides "
            f"{value.stride()}, which has gaps or overlaps in memory"
        )
    if place.end > value.numel():
        return (
            f"the view reads up to element {place.end - 1} of a tensor with {value.numel()} "
            "elements"
        )
    return None


def _is_dense(x: torch.Tensor) -> bool:
    """Whether a tensor's elements lie in memory without gaps or overlaps."""
    step = 1
    for stride, n in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n != 1):
        if stride != step:
            return False
        step *= n
    return True


def _refused(name: str, node: torch.fx.Node, path: str | None, wrong: str) -> CaptureError:
    fix = VALUES
    where = f"{name}, argument {path}" if path is not None else name
    return CaptureError.of(
        where,
        "as_strided",
        wrong,
        needed="a tensor whose elements fill its memory without gaps or overlaps",
        fix=fix,
        **origin_of(node),
        arg_path=path,
    )


VALUES = (
    "slicing, x.unfold(dim, size, step), x.diagonal() or indexing, which do not depend on "
    "memory layout; or call x.contiguous() first"
)


def refuse_view(where: str, x: torch.Tensor, path: str) -> None:
    """Refuse an argument that is a view, if an as_strided reads it with an absolute offset.

    Raises:
        CaptureError: it is a view of another tensor.
    """
    if x.storage_offset():
        raise CaptureError.of(
            f"{where}, argument {path}",
            "as_strided reads from a given storage offset, but the argument is itself a view "
            "with an offset",
            needed="a tensor whose storage_offset() is 0",
            fix=f"{path}.clone(), or {VALUES}",
            source=call_site(),
            arg_path=path,
        )
