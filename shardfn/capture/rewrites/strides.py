"""What depends on how a tensor lies in memory: tensors without strides, and as_strided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from ...errors import CaptureError, call_site, problem
from ...ops import placement
from ...ops.nodes import args_of
from ..views import viewed


def kind_without_strides(x: torch.Tensor) -> str | None:
    """What a tensor is called whose elements are found otherwise than by strides; None for all
    others.
    """
    if x.layout != torch.strided:
        return f"{x.layout}"
    if x.is_nested:
        return "a nested tensor"
    return f"quantized, {x.dtype}" if x.is_quantized else None


def refuse_unstrided(
    where: str, leaves: Sequence[Any], paths: Sequence[str]
) -> None:
    """Refuse sparse, quantized, nested and mkldnn tensors.

    Raises:
        CaptureError: naming each of them.
    """
    kinds = [
        kind_without_strides(x) if isinstance(x, torch.Tensor) else None
        for x in leaves
    ]
    wrong = [
        (path, kind)
        for path, kind in zip(paths, kinds, strict=True)
        if kind is not None
    ]
    if wrong:
        path, source = wrong[0][0], call_site()
        fix = (
            "x.to_dense() (x.dequantize(), to_padded_tensor), or its values and indices as "
            "arguments"
        )
        lines = [f"{path} is {kind}" for path, kind in wrong]
        text = problem(
            where, *lines, needed="tensors with strides", fix=fix, source=source
        )
        raise CaptureError(text, arg_path=path, source=source, fix=fix)


aten = torch.ops.aten
# the position of the size among the arguments; the strides and the place in memory follow
AS_STRIDED: dict[object, int] = {
    aten.as_strided.default: 1,
    aten.as_strided_copy.default: 1,
    aten.as_strided_scatter.default: 2,
}
PLACING = (
    placement.REDISTRIBUTE,
    placement.ALIGN,
    placement.NAME,
)  # identities in value that give a tensor new memory


def settle(
    graph: torch.fx.GraphModule,
    name: str,
    paths: Sequence[str],
    *,
    inside: bool = False,
) -> dict[int, bool]:
    """Have each as_strided read the value that made the memory, at a place counted from its start.

    It is defined by memory, and values that are placed or compiled lie in memory otherwise:
    what it reads has to lie in one value without gaps.

    Args:
        graph: functional ATen, changed in place.
        name: of the function, for errors.
        paths: of the inputs.
        inside: whether the graph is the body of a loop or a branch, whose inputs are laid out
            there in their own way.

    Returns:
        For each input that is read so: whether the place was given as a number, and not counted
        from where the input starts.

    Raises:
        CaptureError: it reads memory that no value of the program describes.
    """
    holders = graph.graph.find_nodes(op="placeholder")
    read: dict[int, bool] = {}
    for node in graph.graph.nodes:
        if node.op != "call_function" or node.target not in AS_STRIDED:
            continue
        place = Place.of(node)
        wrong = _wrong(place, inside)
        if wrong is not None:
            number = (
                holders.index(place.owner) if place.owner in holders else len(paths)
            )
            raise _refused(
                name, node, paths[number] if number < len(paths) else None, wrong
            )
        if place.origin in holders:
            number = holders.index(place.origin)
            read[number] = read.get(number, False) or place.is_given
        first = AS_STRIDED[node.target]
        node.args, node.kwargs = (
            (place.owner, *node.args[1 : first + 2], place.start),
            {},
        )
    return read


def settled(
    graph: torch.fx.GraphModule,
    name: str,
    paths: Sequence[str],
    closed_over: Sequence[torch.Tensor],
) -> dict[int, bool]:
    """`settle`, of a graph whose last inputs are closed-over tensors: of those none may be a
    view.
    """
    read = settle(graph, name, paths)
    first = len(paths) - len(closed_over)
    for number in [n for n in read if n >= first]:
        refuse_view(name, closed_over[number - first], paths[number])
    return read


@attrs.frozen
class Place:
    """Where in memory an as_strided reads or writes."""

    asked: torch.fx.Node  # its first argument
    owner: torch.fx.Node  # the value whose memory that lies in
    is_given: bool  # whether the place was given as a number
    start: int  # the first element, and the one after the last
    end: int

    @property
    def origin(self) -> torch.fx.Node:
        """The owner, or what it is a copy of where that was given a placement or a name: the
        copy may be left out.
        """
        node = self.owner
        while node.target in PLACING:
            (node, *_) = args_of(node)
        return node

    @staticmethod
    def of(node: torch.fx.Node) -> Place:
        """The place of one as_strided."""
        first, args = AS_STRIDED[node.target], args_of(node)
        asked, (size, stride) = args[0], args[first : first + 2]
        given: Any = (
            args[first + 2]
            if len(args) > first + 2
            else node.kwargs.get("storage_offset")
        )
        start = asked.meta["val"].storage_offset() if given is None else given
        end = (
            start + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
            if 0 not in size
            else start
        )
        owner = asked
        while (source := viewed(owner)) is not None:
            owner = source
        return Place(asked, owner, given is not None, start, end)


def _wrong(place: Place, inside: bool) -> str | None:
    """Why the values of the program do not say what stands in that memory; None if they do."""
    asked, value = place.asked.meta["val"], place.owner.meta["val"]
    is_placed, before = place.owner.target in PLACING, place.origin
    if is_placed and (
        place.is_given
        or viewed(before)
        or before.meta["val"].stride() != value.stride()
    ):
        return "it reads the memory of a value that was given a placement or a name on the way"
    if inside and place.owner.op == "placeholder":
        return "it reads, in a loop or branch, the memory of a value from outside of it"
    if (asked.dtype, asked.device) != (value.dtype, value.device):
        return f"it reads memory of {value.dtype} as {asked.dtype}"
    if value.storage_offset() or not _is_dense(value):
        return (
            f"it reads the memory of a tensor of shape {tuple(value.shape)} with gaps or "
            f"overlaps, strides {value.stride()}"
        )
    if place.end > value.numel():
        return f"it reads up to element {place.end - 1} of a tensor that has {value.numel()}"
    return None


def _is_dense(x: torch.Tensor) -> bool:
    """Whether a tensor's elements lie in memory without gaps or overlaps."""
    step = 1
    for stride, n in sorted(
        (s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n != 1
    ):
        if stride != step:
            return False
        step *= n
    return True


def _refused(
    name: str, node: torch.fx.Node, path: str | None, wrong: str
) -> CaptureError:
    source, fix = node.meta.get("source"), VALUES
    where = f"{name}, argument {path}" if path is not None else name
    text = problem(
        where,
        "as_strided",
        wrong,
        needed="memory that one dense value fills",
        fix=fix,
        source=source,
    )
    return CaptureError(text, arg_path=path, source=source, fix=fix)


VALUES = (
    "slicing, x.unfold(dim, size, step), x.diagonal() or indexing, which are defined by "
    "values; or x.contiguous() first"
)


def refuse_view(where: str, x: torch.Tensor, path: str) -> None:
    """Refuse an argument of which as_strided reads a place that is counted from where its
    memory starts.

    Raises:
        CaptureError: it is a view of another tensor.
    """
    if x.storage_offset():
        source = call_site()
        got = "as_strided reads its memory at a given place, and it is a view that starts elsewhere"
        fix = f"{path}.clone(), or {VALUES}"
        text = problem(
            f"{where}, argument {path}",
            got,
            needed="a tensor that starts its memory",
            fix=fix,
            source=source,
        )
        raise CaptureError(text, arg_path=path, source=source, fix=fix)
