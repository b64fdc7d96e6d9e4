"""The memory of a tensor, and whether it is shared."""

from __future__ import annotations

import weakref

import torch

# the use count of an unshared storage: the tensor, and the Python object that reads it
OWNERS = 2


def storage_of(x: torch.Tensor) -> int:
    """The id of a tensor's memory. Tensors that share memory have equal ids, while both are
    alive.
    """
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
    """Whether torch.utils.swap_tensors can replace this tensor."""
    return x._use_count() == 1 and not weakref.getweakrefs(x)
