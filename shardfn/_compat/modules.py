"""What nn.Module does behind the back of whoever runs it: hooks on the backward, kernels of its
own, questions for the rank.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch._decomp import decompositions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .dynamo import RANK, is_reading
from .threads import replaced

_HOOKED: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "hooked", default=False
)


@contextlib.contextmanager
def hooked_by(cls: Any) -> Iterator[None]:
    """Have modules with backward hooks make this class where they make torch's.

    Torch's fails under torch.func (2.11 to 2.15). Modules that other threads call make torch's.
    """

    def choosing(torchs: Any) -> Callable[..., Any]:
        def chosen(*args: Any) -> Any:
            return cls(*args) if _HOOKED.get() else torchs(*args)

        return chosen

    token = _HOOKED.set(True)
    try:
        with replaced(torch.nn.modules.module, "BackwardHook", choosing):
            yield
    finally:
        _HOOKED.reset(token)


@contextlib.contextmanager
def plain_modules(
    asked: Callable[[str], None],
    checkpointed: Callable[[], AbstractContextManager[Any]],
    making: Callable[[], None],
) -> Iterator[None]:
    """Modules as they are written: attention without its fused kernel for inference, and two
    things done otherwise.

    Other threads, which are not `reading`, notice nothing.

    Args:
        asked: is given the file of whoever asks for the rank, before there is an answer.
        checkpointed: makes what a call of torch.utils.checkpoint runs in; its own way fails
            under torch.func (2.11 to 2.15).
        making: is called before a DTensor is made.
    """
    changes = [*_questions(asked), *_checkpoints(checkpointed), *_dtensors(making)]
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                torch.compiler.set_stance("force_eager")
            )  # what is compiled inside is part of the module
            stack.enter_context(
                torch._dynamo.config.patch(error_on_nested_fx_trace=False)
            )
            for owner, name, new in changes:
                stack.enter_context(mock.patch.object(owner, name, new))
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was)


Change = tuple[
    Any, str, Any
]  # a module or class of torch's, an attribute, what takes its place


def _questions(asked: Callable[[str], None]) -> list[Change]:
    """The functions that tell a rank its number."""

    def asking(original: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*args: Any, **kwargs: Any) -> Any:
            if is_reading():
                asked(sys._getframe(1).f_code.co_filename)
            return original(*args, **kwargs)

        return ask

    owned = [
        (dist, "get_rank"),
        *((DeviceMesh, name) for name in RANK if hasattr(DeviceMesh, name)),
    ]
    return [(owner, name, asking(getattr(owner, name))) for owner, name in owned]


def _checkpoints(
    checkpointed: Callable[[], AbstractContextManager[Any]],
) -> list[Change]:
    """torch.utils.checkpoint, both ways."""
    generator = torch.utils.checkpoint._checkpoint_without_reentrant_generator
    reentrant = torch.utils.checkpoint.CheckpointFunction.apply

    def around(*args: Any, **kwargs: Any) -> Iterator[None]:
        if not is_reading():
            return (yield from generator(*args, **kwargs))
        with checkpointed():
            yield

    def called(fn: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if not is_reading():
            return reentrant(fn, preserve, *args)
        with checkpointed():
            return fn(*args)

    return [
        (torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", around),
        (torch.utils.checkpoint.CheckpointFunction, "apply", called),
    ]


def _dtensors(making: Callable[[], None]) -> list[Change]:
    """The two ways in which a DTensor is made."""
    init, local = DTensor.__init__, DTensor.from_local

    def constructed(*args: Any, **kwargs: Any) -> None:
        if is_reading():
            making()
        init(*args, **kwargs)

    def from_local(*args: Any, **kwargs: Any) -> Any:
        if is_reading():
            making()
        return local(*args, **kwargs)

    return [
        (DTensor, "__init__", constructed),
        (DTensor, "from_local", staticmethod(from_local)),
    ]


def weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """torch._weight_norm, which has no forward-mode derivative and no batching rule (torch
    2.13).
    """
    dims = [d for d in range(v.dim()) if dim == -1 or d != dim % v.dim()]
    return v * (g / v.square().sum(dims, keepdim=True).sqrt())


# Ops that modules use and that some transform of torch.func cannot take, as others that it can.
MODULE_OPS = {torch._weight_norm: weight_norm}


def recurrent(op: Callable[..., Any]) -> Callable[..., Any] | None:
    """nn.LSTM, nn.GRU and nn.RNN written out, step by step, if this is the op of one of them:
    torch cannot vmap it (2.13).
    """
    written: dict[Any, Callable[..., Any]] = {
        torch.lstm: decompositions.lstm_impl,
        torch.gru: decompositions.gru_impl,
        torch.rnn_tanh: decompositions.rnn_tanh_input,
        torch.rnn_relu: decompositions.rnn_relu_input,
    }
    return written.get(op)
