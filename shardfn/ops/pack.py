"""pack: several tensors one after the other in one flat buffer.

A separate op, so that a compiler can compute each tensor directly into the send buffer, without
a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


@torch.library.custom_op("shardfn::pack", mutates_args=())
def pack(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of contiguous tensors of one dtype, one after the other."""
    return torch.cat([x.reshape(-1) for x in xs])


pack.register_fake(lambda xs: xs[0].new_empty([sum(x.numel() for x in xs)]))
