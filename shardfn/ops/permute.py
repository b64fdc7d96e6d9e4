"""permute: each rank of a mesh axis sends what it has to at most one other, and gets from at
most one.

Which rank this is is asked of the group when it runs, so all ranks run one text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .. import _compat


@torch.library.custom_op("shardfn::permute", mutates_args=())
def permute(
    x: torch.Tensor, sources: Sequence[int], targets: Sequence[int], group: str
) -> torch.Tensor:
    """Start the exchange; `wait_tensor` ends it.

    Args:
        x: flat.
        sources: the ranks that send.
        targets: for each of them, the rank that it sends to.
        group: name of the process group.

    Returns:
        What the rank has that sends to this one; zeros if none does.
    """
    members = _compat.named_group(group)
    rank, n = members.rank(), members.size()
    out = torch.zeros_like(x)
    sent, taken = [0] * n, [0] * n
    for source, target in zip(sources, targets, strict=True):
        if source == rank:
            sent[target] = x.numel()
        if target == rank:
            taken[source] = x.numel()
    _compat.wait_later(
        out,
        dist.all_to_all_single(
            out[: sum(taken)],
            x[: sum(sent)],
            taken,
            sent,
            group=members,
            async_op=True,
        ),
    )
    return out


permute.register_fake(lambda x, sources, targets, group: torch.empty_like(x))
