"""The op `shardfn::halo`: each rank exchanges edge rows with its neighbours on a mesh axis.

The ranks at the ends have one neighbour. The op reads the rank from the group when it runs, so all
ranks run the same program.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .. import _compat


@torch.library.custom_op("shardfn::halo", mutates_args=())
def halo(x: torch.Tensor, before: int, group: str) -> torch.Tensor:
    """Start an exchange of edge elements with both neighbours. `wait_tensor` waits for the result.

    Args:
        x: flat: first the elements for the previous rank, then the `before` elements for the
            next rank.
        before: the number of elements that come from the previous rank.
        group: the name of the process group.

    Returns:
        Flat, as long as x: `before` elements from the previous rank, then those from the next
        rank. Zeros without a neighbour.
    """
    process_group = _compat.named_group(group)
    rank = process_group.rank()
    n = process_group.size()
    head = x.numel() - before
    out = torch.zeros_like(x)
    send_sizes = [0] * n
    receive_sizes = [0] * n
    if rank > 0:
        send_sizes[rank - 1], receive_sizes[rank - 1] = head, before
    if rank < n - 1:
        send_sizes[rank + 1], receive_sizes[rank + 1] = before, head
    source = x[0 if rank > 0 else head : x.numel() if rank < n - 1 else head]
    target = out[0 if rank > 0 else before : out.numel() if rank < n - 1 else before]
    _compat.wait_later(
        out,
        dist.all_to_all_single(
            target, source, receive_sizes, send_sizes, group=process_group, async_op=True
        ),
    )
    return out


halo.register_fake(lambda x, before, group: torch.empty_like(x))
