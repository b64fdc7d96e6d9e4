"""Fake kernels of ops whose result sizes torch considers data-dependent (2.13), although the
arguments determine them; and strides that it gets wrong.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import _prims_common as prims
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.utils._mode_utils import no_dispatch

aten = torch.ops.aten
SETTLED = (
    None,
    "gelsy",
    "gels",
    # drivers of lstsq that do not depend on the rank: the default is the first on CPU, the second
    # on CUDA
)

_KNOWN: contextvars.ContextVar[bool] = contextvars.ContextVar("sizes_known", default=False)


def _ctc_loss(
    mode: Any,
    op: Any,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    *rest: Any,
    **named: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fake results of _ctc_loss; the longest target determines their sizes.

    Raises:
        RuntimeError: the lengths do not fit, in which case the kernel of the derivative reads
            other memory.
    """
    time, batch, _ = log_probs.shape
    most = max(target_lengths, default=0)
    rows, number = (batch, most) if targets.dim() == 2 else (sum(target_lengths), 0)
    fits = len(input_lengths) == len(target_lengths) == batch
    fits = fits and min((*input_lengths, *target_lengths), default=0) >= 0
    fits = fits and max(input_lengths, default=0) <= time and rows <= targets.shape[0]
    if not fits or number > targets.shape[-1]:
        raise RuntimeError("ctc_loss: the lengths do not match the shapes of log_probs and targets")
    with mode:
        return log_probs.new_empty(batch), log_probs.new_empty(
            batch, time, 2 * max(target_lengths, default=0) + 1
        )


def _lstsq(
    mode: Any,
    op: Any,
    a: torch.Tensor,
    b: torch.Tensor,
    rcond: Any = None,
    *,
    driver: str | None = None,
) -> Any:
    """Return fake results of linalg.lstsq, with the sizes of a real run on random matrices."""
    if driver not in SETTLED:
        raise DynamicOutputShapeException(op)
    with torch._C._DisableTorchDispatch():  # its result for any matrices of these shapes
        draws = torch.Generator()  # the user's fake kernel stays
        real = op(
            torch.rand(a.shape, dtype=a.dtype, generator=draws),
            torch.rand(b.shape, dtype=b.dtype, generator=draws),
            rcond,
            driver=driver,
        )
    with mode:
        return tuple(
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=a.device) for x in real
        )


def _masked_select(mode: Any, op: Any, x: torch.Tensor, mask: Any) -> torch.Tensor:
    """Return the fake result of a selection by a mask whose values are known."""
    if mask.constant is None:
        return NotImplemented
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    with no_dispatch():
        count = int(mask.constant.expand(shape).sum())
    with mode:
        return x.new_empty(count)


TABLE = {
    aten._ctc_loss.default: _ctc_loss,
    aten.linalg_lstsq.default: _lstsq,
    aten.masked_select.default: _masked_select,
}
# ops whose results `indexed` changes: torch may remember another result of theirs
CHANGED = frozenset({aten.index.Tensor})


@contextlib.contextmanager
def sizes_known() -> Iterator[None]:
    """Enter a context in which this thread's fake mode uses these kernels."""
    from torch._subclasses.fake_impls import op_implementations_dict as known

    token = _KNOWN.set(True)
    before = {op: known.get(op) for op in TABLE}
    known.update({op: _asking(sizes, before[op]) for op, sizes in TABLE.items()})
    try:
        yield
    finally:
        for op, kernel in before.items():
            known.pop(op, None)
            if kernel is not None:
                known[op] = kernel
        _KNOWN.reset(token)


def _asking(sizes: Callable[..., Any], theirs: Callable[..., Any] | None) -> Callable[..., Any]:
    """Wrap a fake kernel so that torch's own runs in other threads, and where it returns
    NotImplemented.
    """

    def asking(*args: Any, **kwargs: Any) -> Any:
        out = sizes(*args, **kwargs) if _KNOWN.get() else NotImplemented
        return theirs(*args, **kwargs) if out is NotImplemented and theirs is not None else out

    return asking


def is_known() -> bool:
    """Check whether this thread's fake mode uses these kernels."""
    return _KNOWN.get()


def indexed(
    original: Callable[..., torch.Tensor], x: torch.Tensor, indices: list[torch.Tensor | None]
) -> torch.Tensor:
    """Patch the fake result of x[indices]: torch computes its strides from x alone (2.13), and
    the op from the indices too.
    """
    out = original(x, indices)
    given = {k: index for k, index in enumerate(indices) if index is not None}
    is_known = not any(isinstance(n, torch.SymInt) for n in out.shape)
    if not is_known or not out.numel() or not any(map(_decides, given.values())):
        return out
    operands = _over_result(x, given, out.shape)
    dims, _ = prims.compute_elementwise_output_logical_to_physical_perm(*operands)
    shape = [out.shape[d] for d in dims]
    strides = dict(zip(dims, prims.make_contiguous_strides_for(shape), strict=True))
    return out.as_strided(out.shape, [strides[d] for d in range(out.dim())])


def shift_checked(original: Callable[..., None], name: str, x: torch.Tensor, by: Any) -> None:
    """Patch the check of a shift's dtype: torch shifts bools by integers, too (until 2.15)."""
    if x.dtype != torch.bool:
        original(name, x, by)


def _decides(index: torch.Tensor) -> bool:
    """Check whether an index tensor may change the order of the result's strides. Masks do not."""
    is_mask = index.dtype in (torch.bool, torch.int8, torch.uint8)
    is_symbolic = any(isinstance(n, torch.SymInt) for n in index.shape)
    return not (is_mask or is_symbolic or index.is_contiguous())


def _over_result(
    x: torch.Tensor, given: dict[int, torch.Tensor], shape: torch.Size
) -> list[torch.Tensor]:
    """View x and its index tensors in the shape of the indexed result."""
    indices = torch.broadcast_tensors(*given.values())
    first, last = min(given), max(given)
    is_adjacent = last - first + 1 == len(given)
    before = first if is_adjacent else 0
    kept = [x.stride(d) for d in range(x.dim()) if d not in given]
    inner = [0] * indices[0].dim()
    around = [0] * before, [0] * (len(kept) - before)
    own = x.as_strided(shape, [*kept[:before], *inner, *kept[before:]])
    return [own] + [
        index.as_strided(shape, [*around[0], *index.stride(), *around[1]]) for index in indices
    ]
