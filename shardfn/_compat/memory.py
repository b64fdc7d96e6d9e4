"""Whose memory a tensor lies in, and who else looks at it."""

from __future__ import annotations

import weakref

import torch

# of the storage of a tensor that nobody shares: the tensor, and the Python object that asks
OWNERS = 2


def storage_of(x: torch.Tensor) -> int:
    """What two tensors have in common if they share memory; meaningful while both are alive."""
    return x.untyped_storage()._cdata


def is_sole_owner(x: torch.Tensor) -> bool:
    """Whether no other tensor, array or process can see this tensor's memory."""
    storage = x.untyped_storage()
    if torch._C._storage_Use_Count(storage._cdata) > OWNERS or x._use_count() > 1:
        return False
    return storage.resizable() and not (
        x.device.type == "cpu" and storage.is_shared()
    )


def can_be_taken(x: torch.Tensor) -> bool:
    """Whether torch.utils.swap_tensors can put another tensor in the place of this one."""
    return x._use_count() == 1 and not weakref.getweakrefs(x)
