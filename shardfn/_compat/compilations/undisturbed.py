"""Compilations during which no other thread changes a setting of torch that code depends on.

torch's default dtype and its like belong to the process. A compilation in the background reads
them while the user's thread may set others, for another model.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from .. import threads
from ..settings import AUTOCAST, MODES, settings

_C = torch._C
SETTERS = tuple(  # of torch's settings that are the process's (torch 2.11 to 2.15)
    name
    for name in (
        "_set_cublas_allow_bf16_reduced_precision_reduction",
        "_set_cublas_allow_fp16_reduced_precision_reduction",
        "_set_cublas_allow_tf32",
        "_set_cudnn_allow_tf32",
        "_set_cudnn_benchmark",
        "_set_cudnn_deterministic",
        "_set_cudnn_enabled",
        "_set_default_dtype",
        "_set_default_tensor_type",
        "_set_deterministic_algorithms",
        "_set_deterministic_fill_uninitialized_memory",
        "_set_mkldnn_enabled",
        "_set_sdp_use_cudnn",
        "_set_sdp_use_flash",
        "_set_sdp_use_mem_efficient",
    )
    if hasattr(_C, name)
)
_changes = [0]  # of settings by other threads, while one compiled
_known: ContextVar[tuple[Any, ...] | None] = ContextVar("settings", default=None)


class SettingsChanged(Exception):
    """Another thread changed a setting of torch while a program was compiled."""


def process_settings() -> tuple[Any, ...]:
    """Snapshot the torch settings that are the process's and not a thread's."""
    now = enumerate(settings())
    return tuple(x for k, x in now if k not in (AUTOCAST, MODES))


@contextlib.contextmanager
def undisturbed(wanted: tuple[Any, ...] | None = None) -> Iterator[None]:
    """Compile inside this context so that `check_settings` can detect changes by other threads.

    Args:
        wanted: what `process_settings` was at the call that is compiled for. None: what it is.

    Raises:
        SettingsChanged: it is not what was wanted.
    """
    with contextlib.ExitStack() as stack:
        for name in SETTERS:
            stack.enter_context(threads.replaced(_C, name, _counted))
        now = process_settings()
        if wanted is not None and now != wanted:
            raise SettingsChanged
        token = _known.set((_changes[0], now))
        try:
            yield
        finally:
            _known.reset(token)


def check_settings() -> None:
    """Raise SettingsChanged if another thread changed a setting during the compilation.

    Raises:
        SettingsChanged: another thread has changed a setting since the compilation began.
    """
    known = _known.get()
    if known is not None and known != (_changes[0], process_settings()):
        raise SettingsChanged


def _counted(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a torch setter to count changes by threads that do not compile."""

    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        before = process_settings()
        result = original(*args, **kwargs)
        if _known.get() is None and process_settings() != before:
            _changes[0] += 1
        return result

    return counted


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """A context in which Inductor does not put torch's random state back, which other threads
    have drawn from meanwhile. It draws nothing itself.
    """
    from torch._dynamo import utils

    mine = threads.only_here()
    nothing = lambda original: contextlib.nullcontext()
    with threads.overridden(utils, "preserve_rng_state", nothing, mine):
        yield
