"""Subclasses of DTensor before torch 2.12, which treats them as DTensor (pytorch#177878)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor

from .. import threads

Dispatch = Callable[..., Any]


@contextlib.contextmanager
def subclass_called(dispatch: Dispatch) -> Iterator[None]:
    """A context in which ops of a subclass of DTensor reach its `__torch_dispatch__`.

    torch's C++ code calls Python for the ops of a table, and where its cache of shardings has no
    entry: the subclass is called there. `cache_forgotten` keeps the cache empty for it.

    Args:
        dispatch: takes the op, its args and kwargs, and returns NotImplemented where none of
            them is of the subclass.
    """
    if not _is_needed():
        yield
        return

    def first(torchs: Dispatch, func: Any, args: Any, kwargs: Any, *rest: Any) -> Any:
        out = dispatch(func, args, kwargs)
        if out is not NotImplemented:
            return out
        return torchs(func, args, kwargs, *rest)

    def propagated(torchs: Dispatch, dispatcher: Any, *args: Any) -> Any:
        return first(functools.partial(torchs, dispatcher), *args)

    dispatcher = DTensor._op_dispatcher
    name = "_propagate_op_sharding_dispatch_slow_path"
    rows = dispatcher._custom_op_handlers.items()
    handlers = {op: functools.partial(first, handler) for op, handler in rows}
    with (
        mock.patch.dict(dispatcher._custom_op_handlers, handlers),
        threads.overridden(type(dispatcher), name, propagated, lambda: True),
    ):
        cache_forgotten()
        yield


def cache_forgotten() -> None:
    """Forget the shardings that torch's C++ code has found for DTensors, which it would also
    use for those of a subclass.
    """
    if _is_needed():
        torch._C._clear_DTensor_sharding_propagator_cache()


def shardings_forgotten() -> None:
    """Forget the shardings that torch has found for DTensors. They hold meshes of a world that
    has ended, and a mesh of the next world may equal one of these.
    """
    from torch.distributed.tensor import DTensor

    found = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    found.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


def _is_needed() -> bool:
    return torch.__version__ < "2.12"
