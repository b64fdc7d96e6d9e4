"""torch's random seeds: the last torch.manual_seed, and checkpoint and DataLoader, which draw
from it.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint
import torch.utils.data
import torch.xpu
from torch.utils.data.dataloader import _BaseDataLoaderIter

from . import patching
from .threads import replaced

Fn = Callable[..., Any]
REENTRANT = "torch.utils.checkpoint:CheckpointFunction.apply"
# of checkpoint without reentrant autograd: its doors call the first, which torch 2.15 brought
GENERATOR = patching.OR.join(
    f"torch.utils.checkpoint:_checkpoint_without_reentrant_generator{end}" for end in ("_impl", "")
)
COMPOSABLE = "torch.distributed._composable.checkpoint_activation"  # has the name of its own


def last_seeding() -> tuple[Any, int]:
    """Return (an object that identifies the last torch.manual_seed call, torch's current seed).

    Its device XPU, which nothing here uses, keeps that call until it starts (torch 2.11 to 2.15).
    """
    tracker = getattr(torch.xpu, "_lazy_seed_tracker", None)
    return getattr(tracker, "manual_seed_all_cb", None), torch.initial_seed()


def seed_of(seeding: Any) -> int | None:
    """Return the seed that a torch.manual_seed call was given. None if it is unknown."""
    if seeding is None:
        return None
    fn, *_ = seeding
    names = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    return names["seed"].cell_contents % 2**64 if "seed" in names else None


@contextlib.contextmanager
def checkpoints_wrapped(wrap: Callable[[Fn, bool], Fn]) -> Iterator[None]:
    """Enter a context in which torch's checkpoint wraps the user's function before it runs it.

    Args:
        wrap: makes the wrapper, from the user's function, and whether the first run is one of it.
    """

    def made(original: Fn, runs_first: bool) -> Fn:
        return lambda fn, *args, **kwargs: original(wrap(fn, runs_first), *args, **kwargs)

    by_function = lambda original: types.SimpleNamespace(apply=made(original.apply, True))
    resolved = patching.resolve(GENERATOR)
    assert resolved is not None, "torch.utils.checkpoint lacks the generator that runs a checkpoint"
    _, name = resolved
    modules = [torch.utils.checkpoint, sys.modules.get(COMPOSABLE)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(torch.utils.checkpoint, "CheckpointFunction", by_function))
        for module in modules:
            if hasattr(module, name):
                make = lambda original: made(original, False)
                stack.enter_context(replaced(module, name, make))
        yield


def loaders_in_context(
    context: Callable[[], AbstractContextManager[Any]], is_mine: Callable[[], bool]
) -> Iterator[Any]:
    """Yield contexts in which torch's DataLoader starts, and makes each batch, inside a given
    context.

    Args:
        context: makes that context.
        is_mine: whether to use it for a call.
    """

    def make(original: Fn) -> Fn:
        def inside(*args: Any, **kwargs: Any) -> Any:
            if not is_mine():
                return original(*args, **kwargs)
            with context():
                return original(*args, **kwargs)

        return inside

    yield replaced(torch.utils.data.DataLoader, "__iter__", make)
    yield replaced(_BaseDataLoaderIter, "__next__", make)
