"""The op `shardfn::pack`: concatenate several tensors in one flat buffer, which one collective
sends.

A separate op, so that a compiler can compute each tensor directly into the send buffer, without a
copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


@torch.library.custom_op("shardfn::pack", mutates_args=())
def pack(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the elements of contiguous tensors of one dtype into one flat tensor."""
    flat = [x.reshape(-1) for x in xs]
    return torch.cat(flat)


@pack.register_fake
def _fake(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    count = sum(x.numel() for x in xs)
    return xs[0].new_empty([count])


PACK = torch.ops.shardfn.pack.default
