"""Fake results of ops whose sizes torch takes for dependent on values (2.13), though the
arguments decide them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException

aten = torch.ops.aten
SETTLED = (
    None,
    "gelsy",
    "gels",
    # drivers of lstsq that do not look at the rank: the default is the first on CPU, the second on
    # CUDA
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
    ):  # what it makes of any matrices of these shapes
        real = op(
            torch.rand(a.shape, dtype=a.dtype),
            torch.rand(b.shape, dtype=b.dtype),
            rcond,
            driver=driver,
        )
    with mode:
        return tuple(
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=a.device)
            for x in real
        )


TABLE = {aten._ctc_loss.default: _ctc_loss, aten.linalg_lstsq.default: _lstsq}


@functools.cache
def install() -> None:
    """Have fake tensors know them."""
    from torch._subclasses import fake_impls

    for op, sizes in TABLE.items():
        fake_impls.op_implementations_dict.setdefault(op, sizes)
