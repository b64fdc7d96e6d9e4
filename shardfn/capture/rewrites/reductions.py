"""Decompositions of ops that torch does not decompose: any and all, norms, copies of views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
INF = float("inf")


def wide(x: torch.Tensor, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.dtype]:
    """The tensor in the dtype in which torch accumulates, and the dtype of the result. Half
    precision is summed in single precision.
    """
    result = dtype or x.dtype
    accumulate = torch.float32 if result in (torch.float16, torch.bfloat16) else result
    return (x if x.dtype == accumulate else aten._to_copy.default(x, dtype=accumulate)), result


def narrow(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in the dtype of the result."""
    return x if x.dtype == dtype else aten._to_copy.default(x, dtype=dtype)


def _true_somewhere(x: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    return aten.gt.Scalar(aten.sum.dim_IntList(aten.ne.Scalar(x, 0), dims, keepdim), 0)


def _true_everywhere(x: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    return aten.eq.Scalar(aten.sum.dim_IntList(aten.eq.Scalar(x, 0), dims, keepdim), 0)


def _truth(
    count: Callable[[torch.Tensor, list[int], bool], torch.Tensor],
) -> dict[str, Callable[..., torch.Tensor]]:
    """The overloads of any or all by counting: a count over ranks is a sum, which every backend can
    all-reduce.
    """

    def over(x: torch.Tensor, dim: Any = None, keepdim: bool = False) -> torch.Tensor:
        dims = list(range(x.dim())) if dim is None else [dim] if isinstance(dim, int) else list(dim)
        out = count(x, dims, keepdim) if x.dim() else count(aten.view.default(x, [1]), [0], False)
        return aten._to_copy.default(out, dtype=torch.uint8) if x.dtype == torch.uint8 else out

    def dims(x: torch.Tensor, dim: Any = None, keepdim: bool = False) -> torch.Tensor:
        return NotImplemented if dim is not None and not len(dim) else over(x, dim, keepdim)

    return {"default": over, "dim": over, "dims": dims}


def vector_norm(
    x: torch.Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> torch.Tensor:
    """The vector norms that are a sum, maximum or minimum of a pointwise function."""
    dims = list(range(x.dim())) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    if not x.numel() or not x.dim():
        return NotImplemented
    size, result = wide(aten.abs.default(x if dtype is None else narrow(x, dtype)))
    if abs(ord) == INF:
        out = (aten.amax if ord > 0 else aten.amin).default(size, dims, keepdim)
    elif ord == 0:
        out = aten.sum.dim_IntList(narrow(aten.ne.Scalar(size, 0), size.dtype), dims, keepdim)
    elif ord == 1:
        out = aten.sum.dim_IntList(size, dims, keepdim)
    elif ord == 2:
        out = aten.sqrt.default(aten.sum.dim_IntList(aten.mul.Tensor(size, size), dims, keepdim))
    else:
        out = aten.pow.Tensor_Scalar(
            aten.sum.dim_IntList(aten.pow.Tensor_Scalar(size, ord), dims, keepdim), 1.0 / ord
        )
    return narrow(out, result)


def _dist(x: torch.Tensor, y: torch.Tensor, p: float = 2) -> torch.Tensor:
    return aten.linalg_vector_norm.default(aten.sub.Tensor(x, y), p)


def _copied(view: Any) -> Callable[..., Any]:
    """The copying variant of a view op."""

    def decomposed(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out = view(x, *args, **kwargs)
        contiguous = torch.contiguous_format
        if isinstance(out, torch.Tensor):
            return aten.clone.default(out, memory_format=contiguous)
        return [aten.clone.default(y, memory_format=contiguous) for y in out]

    return decomposed


COPIES = (
    "permute",
    "view",
    "as_strided",
    "narrow",
    "unbind",
    "diagonal",
    "unfold",
    "expand",
    "transpose",
    "t",
    "squeeze",
    "unsqueeze",
)
TABLE: dict[Any, Callable[..., Any]] = {
    **{getattr(aten.any, name): fn for name, fn in _truth(_true_somewhere).items()},
    **{getattr(aten.all, name): fn for name, fn in _truth(_true_everywhere).items()},
    aten.linalg_vector_norm.default: vector_norm,
    aten.dist.default: _dist,
    **{
        getattr(getattr(aten, f"{name}_copy"), overload): _copied(
            getattr(getattr(aten, name), overload)
        )
        for name in COPIES
        for overload in getattr(aten, f"{name}_copy").overloads()
        if overload != "out"
        and not overload.endswith("_out")
        and overload in getattr(aten, name).overloads()
    },
}
