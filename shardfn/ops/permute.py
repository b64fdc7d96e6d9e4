"""permute: each rank of a mesh axis sends its value to at most one other rank, and receives
from at most one.

The op reads the rank from the group when it runs, so all ranks run the same program.
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
    """Start the permute. `wait_tensor` waits for the result.

    Args:
        x: flat.
        sources: the sending ranks.
        targets: for each source, its destination rank.
        group: the name of the process group.

    Returns:
        The value of the rank that sends to this one, or zeros if none does.
    """
    members = _compat.named_group(group)
    rank = members.rank()
    n = members.size()
    out = torch.zeros_like(x)
    sent = [0] * n
    taken = [0] * n
    for source, target in zip(sources, targets, strict=True):
        if source == rank:
            sent[target] = x.numel()
        if target == rank:
            taken[source] = x.numel()
    _compat.wait_later(
        out,
        dist.all_to_all_single(
            out[: sum(taken)], x[: sum(sent)], taken, sent, group=members, async_op=True
        ),
    )
    return out


permute.register_fake(lambda x, sources, targets, group: torch.empty_like(x))
