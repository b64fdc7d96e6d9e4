"""Fake kernels of ops whose result sizes torch considers data-dependent (2.13), although the
arguments determine them.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException

aten = torch.ops.aten
SETTLED = (
    None,
    "gelsy",
    "gels",
    # drivers of lstsq that do not depend on the rank: the default is the first on CPU, the second
    # on CUDA
)

_KNOWN: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "sizes_known", default=False
)


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
    time, batch, _ = log_probs.shape
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
    if driver not in SETTLED:
        raise DynamicOutputShapeException(op)
    with (
        torch._C._DisableTorchDispatch()
    ):  # its result for any matrices of these shapes
        draws = torch.Generator()  # the user's fake kernel stays
        real = op(
            torch.rand(a.shape, dtype=a.dtype, generator=draws),
            torch.rand(b.shape, dtype=b.dtype, generator=draws),
            rcond,
            driver=driver,
        )
    with mode:
        return tuple(
            torch.empty_strided(
                x.shape, x.stride(), dtype=x.dtype, device=a.device
            )
            for x in real
        )


TABLE = {aten._ctc_loss.default: _ctc_loss, aten.linalg_lstsq.default: _lstsq}


@contextlib.contextmanager
def sizes_known() -> Iterator[None]:
    """A context in which this thread's fake tensors use these kernels."""
    from torch._subclasses.fake_impls import op_implementations_dict as known

    token = _KNOWN.set(True)
    missing = {
        op: _asking(sizes) for op, sizes in TABLE.items() if op not in known
    }
    known.update(missing)
    try:
        yield
    finally:
        for op in missing:
            known.pop(op, None)
        _KNOWN.reset(token)


def _asking(sizes: Callable[..., Any]) -> Callable[..., Any]:
    """A fake kernel for this thread. Other threads run as without it."""

    def asking(*args: Any, **kwargs: Any) -> Any:
        return sizes(*args, **kwargs) if _KNOWN.get() else NotImplemented

    return asking
