"""Hooks through which the modules, backwards and optimizers of every rank are seen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from .observed import Observed


@contextlib.contextmanager
def observing(current: Callable[[], Observed | None]) -> Iterator[None]:
    """Report what modules, backwards and optimizers do.

    Args:
        current: returns the record of the calling thread; None for threads that are not seen.
    """

    def before_call(module: nn.Module, args: Any) -> None:
        if (seen := current()) is not None:
            seen.enters(module, args, {})

    def after_call(module: nn.Module, args: Any, result: Any) -> None:
        if (seen := current()) is not None:
            seen.leaves(module, args, result)

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if (seen := current()) is not None:
            seen.before_step(optimizer)

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if (seen := current()) is not None:
            seen.after_step()

    def going_back(original: Any) -> Any:
        def call(roots: Any, *args: Any, **kwargs: Any) -> Any:
            if (seen := current()) is not None:
                seen.goes_back(roots)
            return original(roots, *args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for handle in (
            modules.register_module_forward_pre_hook(before_call),
            modules.register_module_forward_hook(after_call, always_call=True),
            optimizers.register_optimizer_step_pre_hook(before_step),
            optimizers.register_optimizer_step_post_hook(after_step),
        ):
            stack.callback(handle.remove)
        for name in ("backward", "grad"):
            original = getattr(torch.autograd, name)
            stack.enter_context(mock.patch.object(torch.autograd, name, going_back(original)))
        yield
