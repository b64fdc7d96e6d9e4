"""torch's LocalTensorMode, which runs DTensor code for all ranks in one process."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from . import fsdp_hooks
from .groups import dtensors, local_tensor, spec_of

FSDP = "torch.distributed.fsdp._fully_shard._fsdp_param"
_one_thread = threading.RLock()
_INSIDE: contextvars.ContextVar[bool] = contextvars.ContextVar("inside", default=False)


@contextlib.contextmanager
def all_ranks(ranks: Sequence[int]) -> Iterator[None]:
    """Enter a LocalTensorMode: torch runs each op and collective for all of these ranks.

    Args:
        ranks: of the world.

    Source: torch.distributed._local_tensor.LocalTensorMode.
    """
    from torch.distributed._local_tensor import LocalTensorMode

    with one_thread(), LocalTensorMode(frozenset(ranks)):
        token = _INSIDE.set(True)
        try:
            yield
        finally:
            _INSIDE.reset(token)


def one_thread() -> AbstractContextManager[Any]:
    """Return the lock around work with `per_rank` tensors: torch patches DeviceMesh for it, in
    all threads.
    """
    return _one_thread


def runs_on_all_ranks() -> bool:
    """Check whether this thread is inside `all_ranks`."""
    return _INSIDE.get()


@contextlib.contextmanager
def constructor_replaced(made: Callable[..., Any]) -> Iterator[None]:
    """Replace DTensor.__new__, for all threads.

    Args:
        made: takes torch's constructor, and then its arguments.
    """
    construct = DTensor.__new__
    DTensor.__new__ = staticmethod(functools.partial(made, construct))
    try:
        yield
    finally:
        DTensor.__new__ = construct


def per_rank(values: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Make one LocalTensor of the tensors of several ranks.

    Args:
        values: rank -> its tensor.
    """
    from torch.distributed._local_tensor import LocalTensor

    return LocalTensor(dict(values))


def values_per_rank(x: torch.Tensor) -> dict[int, torch.Tensor] | None:
    """Return the tensor of each rank in a LocalTensor. None for any other tensor."""
    from torch.distributed._local_tensor import LocalTensor

    return x._local_tensors if isinstance(x, LocalTensor) else None


def fully_sharded(
    ours: Any, original: Callable[..., Any], record: Any, given: Any, *args: Any, **kwargs: Any
) -> None:
    """Patch FSDPParam's sharding of a parameter: make the shards of all ranks, where torch makes
    that of one.

    Args:
        ours: its `sharded` makes the shards of all ranks, of a parameter and its layout.
        original: torch's method.
        record: FSDP's record of the parameter.
        given: the parameter before.
        args: other arguments of the method.
        kwargs: its keyword arguments.
    """
    if runs_on_all_ranks():
        original(record, given, *args, **kwargs)
        return
    original(record, _of_one_rank(given), *args, **kwargs)
    placed = ours.sharded(given, fsdp_hooks.layout_of(record))
    parameter = torch.nn.Parameter(placed, requires_grad=given.requires_grad)
    record.sharded_param = parameter
    record._setattr_on_modules(parameter)


def _of_one_rank(x: Any) -> Any:
    """Reduce a simulated DTensor parameter to a DTensor of one rank's local tensor."""
    if not isinstance(x, DTensor):
        return x
    local: Any = local_tensor(x)
    own = local.shards[local.shown].detach()
    (made,) = dtensors([own], [spec_of(x)], DTensor)
    return made.requires_grad_(x.requires_grad)
