"""Results with the strides of their op, whatever ops they are decomposed into.

Inductor decomposes a concatenation of one tensor, beside empty ones, into a copy with the strides
of that tensor, where the op has row-major ones (torch 2.13). A view that follows could not be made
then, and `as_strided` would read other elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten
BY_STRIDES = {
    aten.as_strided.default,
    aten.as_strided_copy.default,
    aten.as_strided_scatter.default,
}


class WithRecordedStrides(torch.fx.Interpreter):
    """An fx interpreter whose results have the strides recorded for their nodes, also where a
    trace decomposes the op. It raises ValueError for an as_strided outside of its tensor's
    memory, which compiled code would not check.
    """

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.target in BY_STRIDES:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            check_reach(n.target, args, kwargs)
        result = super().run_node(n)
        like = n.meta.get("val")
        if isinstance(result, tuple | list):
            return type(result)(map(with_strides_of, result, like or result))
        return with_strides_of(result, like)


def check_reach(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Check that an as_strided call stays inside of its tensor's memory.

    Raises:
        ValueError: it does not. A graph of a file may say so.
    """
    names = [x.name for x in op._schema.arguments]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    base, shape, stride = arguments["self"], arguments["size"], arguments["stride"]
    offset = arguments.get("storage_offset")
    if offset is None:
        offset = base.storage_offset()
    room = base.untyped_storage().nbytes()
    numbers = (*shape, *stride, offset, room)
    if any(isinstance(n, torch.SymInt) for n in numbers) or math.prod(shape) == 0:
        return
    last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if min(offset, *stride, 0) < 0 or (last + 1) * base.itemsize > room:
        raise ValueError(f"{op}: the view has elements outside of the memory of its tensor")


def with_strides_of(x: Any, like: Any) -> Any:
    """Copy a tensor into the strides of an example of its shape, where these differ. Leave
    non-tensors, and examples that do not fill their memory.
    """
    if not has_other_strides(x, like):
        return x
    sizes, strides = like.shape, like.stride()
    order = sorted(range(x.dim()), key=lambda dim: (-strides[dim], dim))
    if not _are_dense([(sizes[dim], strides[dim]) for dim in order]):
        return x
    back = sorted(range(x.dim()), key=order.__getitem__)
    copy = x.permute(order).clone(memory_format=torch.contiguous_format)
    return copy.permute(back)


def _are_dense(dims: Sequence[tuple[Any, Any]]) -> bool:
    """Check whether (size, stride) pairs are those of a contiguous tensor."""
    step = 1
    for size, stride in reversed(dims):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def have_other_strides(result: Any, like: Any) -> bool:
    """Check whether any tensor of a result has other strides than its example."""
    if isinstance(result, tuple | list):
        return any(map(has_other_strides, result, like or result))
    return has_other_strides(result, like)


def has_other_strides(x: Any, like: Any) -> bool:
    """Check whether a tensor has other strides than an example of its shape. Symbolic sizes
    count by their hints.
    """
    if not isinstance(x, torch.Tensor) or not isinstance(like, torch.Tensor):
        return False
    sizes, strides, wanted = map(_numbers, (x.shape, x.stride(), like.stride()))
    if strides == wanted or 0 in sizes:
        return False
    return any(n > 1 and a != b for n, a, b in zip(sizes, strides, wanted, strict=True))


def _numbers(sizes: Any) -> list[int]:
    """Replace symbolic sizes by their hints."""
    return [n.node.hint if isinstance(n, torch.SymInt) else n for n in sizes]
