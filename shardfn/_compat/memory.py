"""Ownership of a tensor's memory, exchange of memory between tensors, and tensors without
values.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor

# the use count of an unshared storage: the tensor, and the Python object that reads it
OWNERS = 2
ORDINARY = frozenset({torch.Tensor, torch.nn.Parameter})  # classes without an override

# whether each reference counts, and the count of an object that only a list refers to, read so
_COUNTS = getattr(sys, "_is_gil_enabled", lambda: True)()
_LISTED = max(map(sys.getrefcount, [torch.empty(0)]))

_number = operator.attrgetter("_cdata")
_storage_uses = torch._C._storage_Use_Count
_uses = Tensor._use_count
_requires_grad = attrgetter("requires_grad")
_grad = attrgetter("grad")
_attributes = attrgetter("__dict__")


def storage_of(x: torch.Tensor) -> int:
    """Return the id of a tensor's storage. Tensors that share memory have equal ids, while both
    are alive.
    """
    return x.untyped_storage()._cdata


def is_sole_owner(x: torch.Tensor) -> bool:
    """Check that no other tensor, array or process can see a tensor's memory."""
    storage = x.untyped_storage()
    if torch._C._storage_Use_Count(storage._cdata) > OWNERS or x._use_count() > 1:
        return False
    return storage.resizable() and not (x.device.type == "cpu" and storage.is_shared())


def can_be_taken(x: torch.Tensor) -> bool:
    """Check that torch.utils.swap_tensors can replace a tensor: one use, no weak references."""
    return x._use_count() == 1 and not weakref.getweakrefs(x)


def are_alone(tensors: Sequence[torch.Tensor]) -> bool:
    """Check that each of some ordinary tensors solely owns its memory and can be swapped. One
    pass of C++ calls for each question costs less than the questions of each tensor.
    """
    storages = list(map(Tensor.untyped_storage, tensors))
    if any(map(UntypedStorage.is_shared, storages)):  # as every storage of a GPU says
        return all(is_sole_owner(x) and can_be_taken(x) for x in tensors)
    return (
        max(map(_storage_uses, map(_number, storages)), default=0) <= OWNERS
        and max(map(_uses, tensors), default=0) <= 1
        and all(map(UntypedStorage.resizable, storages))
        and not any(map(weakref.getweakrefcount, tensors))
    )


def are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Check that all are exact torch.Tensors without requires_grad, gradients or inference mode."""
    return (
        {torch.Tensor}.issuperset(map(type, tensors))
        and not any(map(_requires_grad, tensors))
        and not any(map(Tensor.is_inference, tensors))
        and {None}.issuperset(map(_grad, tensors))
    )


def is_forgotten(objects: Sequence[torch.Tensor]) -> bool:
    """Check that nothing but this list refers to its tensors, and they have no attributes. False
    where Python does not count references exactly.
    """
    counts = map(sys.getrefcount, objects)
    return (
        _COUNTS
        and max(counts, default=0) <= _LISTED
        and max(map(_uses, objects), default=0) <= 1
        and not any(map(weakref.getweakrefcount, objects))
        and not any(map(_attributes, objects))
    )


def without_memory(
    kind: type[torch.Tensor], layouts: Sequence[tuple[Any, dict[str, Any]]]
) -> list[torch.Tensor]:
    """Make tensors of a wrapper subclass without storage, from (shape, {strides, dtype, device})
    pairs.
    """
    make = torch.Tensor._make_wrapper_subclass
    return [make(kind, shape, **layout) for shape, layout in layouts]


def exchange(xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor]) -> None:
    """Swap the memory and the classes of two lists of tensors, in pairs. All of `xs` are of one
    class, and all of `ys`: classes without slots. Each keeps its attributes. An exception leaves
    all as they were.

    As torch.utils.swap_tensors, without its search for slots and uses: most of its time.
    """
    swap = torch._C._swap_tensor_impl
    kind, other = type(xs[0]), type(ys[0])
    done = 0
    try:
        for x, y in zip(xs, ys, strict=True):
            swap(x, y)
            x.__class__, y.__class__ = other, kind
            done += 1
    except BaseException:
        if done:
            exchange(xs[:done], ys[:done])
        raise


def empty_strided(
    shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: str
) -> torch.Tensor:
    """Make an empty tensor of a shape, strides, dtype and device; a fake one in a fake mode.

    The dispatcher takes five times as long to make a fake one.
    """
    key = torch._C._TorchDispatchModeKey.FAKE
    mode = torch._C._get_dispatch_mode(key)
    if mode is None:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
    with torch._C._DisableTorchDispatch():
        like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return FakeTensor(mode, like, torch.device(device))


def may_overlap(x: object) -> bool:
    """Whether two elements of a tensor may lie at one place of its memory."""
    if not isinstance(x, torch.Tensor) or x.layout != torch.strided:
        return False
    if any(isinstance(n, torch.SymInt) for n in (*x.shape, *x.stride())) or 0 in x.shape:
        return False
    dims = sorted((s, n) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1)
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False
