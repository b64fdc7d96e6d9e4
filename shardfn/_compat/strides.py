"""Values in the layouts that their ops have, whatever ops they are decomposed into.

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


class Relaid(torch.fx.Interpreter):
    """Runs a graph. Each result has the strides of its node, also where a trace decomposes the
    op. A view by strides that leaves its tensor is a ValueError: compiled code would not check.
    """

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.target in BY_STRIDES:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            check_reach(n.target, args, kwargs)
        result = super().run_node(n)
        like = n.meta.get("val")
        if isinstance(result, tuple | list):
            return type(result)(map(relaid, result, like or result))
        return relaid(result, like)


def check_reach(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Check that an op that views a tensor by strides stays inside of its memory.

    Raises:
        ValueError: it does not. A graph of a file may say so.
    """
    names = [x.name for x in op._schema.arguments]
    said = dict(zip(names, args, strict=False)) | kwargs
    base, shape, stride = said["self"], said["size"], said["stride"]
    offset = said.get("storage_offset")
    if offset is None:
        offset = base.storage_offset()
    room = base.untyped_storage().nbytes()
    numbers = (*shape, *stride, offset, room)
    if any(isinstance(n, torch.SymInt) for n in numbers) or math.prod(shape) == 0:
        return
    last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if min(offset, *stride, 0) < 0 or (last + 1) * base.itemsize > room:
        raise ValueError(f"{op}: elements outside of its tensor")


def relaid(x: Any, like: Any) -> Any:
    """A tensor in the strides of another one of its shape. Anything else as it is, and a tensor
    like one that does not fill its memory.
    """
    if not is_laid_otherwise(x, like):
        return x
    sizes, strides = like.shape, like.stride()
    order = sorted(range(x.dim()), key=lambda dim: (-strides[dim], dim))
    if not _are_dense([(sizes[dim], strides[dim]) for dim in order]):
        return x
    back = sorted(range(x.dim()), key=order.__getitem__)
    copy = x.permute(order).clone(memory_format=torch.contiguous_format)
    return copy.permute(back)


def _are_dense(dims: Sequence[tuple[Any, Any]]) -> bool:
    """Whether dims, each a size and a stride, are those of a row-major tensor."""
    step = 1
    for size, stride in reversed(dims):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def are_laid_otherwise(result: Any, like: Any) -> bool:
    """Whether a tensor of a result has other strides than that of another result."""
    if isinstance(result, tuple | list):
        return any(map(is_laid_otherwise, result, like or result))
    return is_laid_otherwise(result, like)


def is_laid_otherwise(x: Any, like: Any) -> bool:
    """Whether a tensor has other strides than another one of its shape, if sizes that are symbols
    are as in their example.
    """
    if not isinstance(x, torch.Tensor) or not isinstance(like, torch.Tensor):
        return False
    sizes, own, wanted = map(_numbers, (x.shape, x.stride(), like.stride()))
    if own == wanted or 0 in sizes:
        return False
    return any(n > 1 and a != b for n, a, b in zip(sizes, own, wanted, strict=True))


def _numbers(sizes: Any) -> list[int]:
    return [n.node.hint if isinstance(n, torch.SymInt) else n for n in sizes]
