"""mark_dynamic: the dims of a tensor whose sizes may change between calls.

Dynamo reads this.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _compat
from ..argnums import is_number
from ..errors import CaptureError, ShardError, call_site
from ..runtime.arguments import ATTRIBUTE
from ._options import check_flag


def mark_dynamic(
    x: torch.Tensor, dim: int | tuple[int, ...], *, strict: bool = False
) -> torch.Tensor:
    """Mark a dim of x whose size may change from call to call, so a function of x is captured once
    for all sizes.

    A function that is called with x is captured with a symbol for the size of the marked dim, and
    partitioned separately for each size of later calls. Later calls with another size of the marked
    dim do not run the Python code again. The tensors of later calls need not be marked with
    `mark_dynamic`. If a size breaks a condition in the Python code, such as `if x.shape[0] > 4`,
    the function is captured again. The sizes 0 and 1 of the marked dim are always captured
    separately.

    Args:
        x: a tensor or a DTensor, of any shape. The mark belongs to the tensor object x, so tensors
            that are computed from x are not marked.
        dim: the dim to mark, or a tuple of dims.
        strict: whether to raise an error if the function needs the size of the marked dim as a
            constant, for example as a Python number. With `strict=False`, a function that needs the
            size as a constant is captured separately for each size.

    Returns:
        x.

    Raises:
        ShardError: x is not a tensor, or does not have the dim.
        CaptureError: `mark_dynamic` is called inside a captured function. With `strict`, a function
            that needs the size as a constant raises a CaptureError, which names the constant and
            the source line.

    Source: torch._dynamo.mark_dynamic (strict) and maybe_mark_dynamic; shardfn uses their marks
        too.

    Example:
        >>> import torch, shardfn as sf
        >>> mean = sf.jit(lambda x: x.sum() / x.shape[0], backend="aten")
        >>> mean(sf.mark_dynamic(torch.tensor([1.0, 2.0]), 0))
        tensor(1.5000)
        >>> mean(torch.tensor([1.0, 2.0, 6.0]))  # nothing is captured
        tensor(3.)
    """
    if _compat.is_tracing():
        refuse_inside()
    check_flag("mark_dynamic", "strict", strict)
    dims = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
    _check(x, dims)
    found = {d % x.dim(): strict for d in dims}
    setattr(x, ATTRIBUTE, {**getattr(x, ATTRIBUTE, {}), **found})
    return x


def _check(x: Any, dims: tuple[Any, ...]) -> None:
    """Check a tensor and its dims.

    Raises:
        ShardError: it is not a tensor, or has no such dims.
    """
    fix, source = "mark_dynamic(x, 0) for the first dim of a tensor x", call_site()
    if not isinstance(x, torch.Tensor):
        got = f"a {type(x).__name__}"
        raise ShardError.of("mark_dynamic", got, needed="a tensor", fix=fix, source=source)
    wrong = [d for d in dims if not (is_number(d) and -x.dim() <= d < x.dim())]
    if wrong:
        got = f"the tensor has no dim {', '.join(map(repr, wrong))}: its shape is {tuple(x.shape)}"
        needed = f"ints from {-x.dim()} to {x.dim() - 1}" if x.dim() else "a tensor with dims"
        raise ShardError.of("mark_dynamic, dim", got, needed=needed, fix=fix, source=source)


@_compat.constant_in_graph
def refuse_inside() -> None:
    """Refuse a mark inside of a captured function, where it would come too late.

    Raises:
        CaptureError: always.
    """
    got = "the call is inside a captured function, where sizes are already fixed"
    fix = "mark the argument before the call, or use dynamic= of jit or shard"
    raise CaptureError.of("mark_dynamic", got, fix=fix)
