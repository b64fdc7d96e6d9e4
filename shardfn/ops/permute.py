"""The op `shardfn::permute`: each rank of a mesh axis sends its value to at most one other rank,
and receives from at most one.

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
    """Start a permute of flat tensors among ranks. `wait_tensor` waits for the result.

    Args:
        x: flat.
        sources: the sending ranks.
        targets: for each source, its destination rank.
        group: the name of the process group.

    Returns:
        The value of the rank that sends to this one, or zeros if none does.
    """
    process_group = _compat.named_group(group)
    rank = process_group.rank()
    n = process_group.size()
    out = torch.zeros_like(x)
    send_sizes = [0] * n
    receive_sizes = [0] * n
    for source, target in zip(sources, targets, strict=True):
        if source == rank:
            send_sizes[target] = x.numel()
        if target == rank:
            receive_sizes[source] = x.numel()
    _compat.wait_later(
        out,
        dist.all_to_all_single(
            out[: sum(receive_sizes)],
            x[: sum(send_sizes)],
            receive_sizes,
            send_sizes,
            group=process_group,
            async_op=True,
        ),
    )
    return out


permute.register_fake(lambda x, sources, targets, group: torch.empty_like(x))
