"""What nn.Module does behind the back of whoever runs it: hooks on the backward, kernels of its own, questions for the rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch._decomp import decompositions
from torch.distributed.device_mesh import DeviceMesh

from .dynamo import RANK


@contextlib.contextmanager
def hooked_by(cls: Any) -> Iterator[None]:
    """Have modules with backward hooks make this class where they make torch's: that one fails under torch.func (2.11 to 2.15)."""
    with mock.patch.object(torch.nn.modules.module, "BackwardHook", cls):
        yield


@contextlib.contextmanager
def plain_modules(refuse_rank: Callable[..., Any], checkpointed: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Modules as they are written: attention without its fused kernel for inference, and two things done otherwise.

    Args:
        refuse_rank: what is called in place of a question for the rank.
        checkpointed: makes what a call of torch.utils.checkpoint runs in; its own way fails under torch.func (2.11 to 2.15).
    """
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)

    def around(*_: Any, **__: Any) -> Iterator[None]:
        with checkpointed():
            yield

    def called(fn: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        with checkpointed():
            return fn(*args)

    try:
        with contextlib.ExitStack() as stack:
            owned = [(dist, "get_rank"), *((DeviceMesh, name) for name in RANK if hasattr(DeviceMesh, name))]
            changes = [(owner, name, refuse_rank) for owner, name in owned]
            changes += [(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", around)]
            changes += [(torch.utils.checkpoint.CheckpointFunction, "apply", called)]
            for owner, name, new in changes:
                stack.enter_context(mock.patch.object(owner, name, new))
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was)


def weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """torch._weight_norm, which has no forward-mode derivative and no batching rule (torch 2.13)."""
    dims = [d for d in range(v.dim()) if dim == -1 or d != dim % v.dim()]
    return v * (g / v.square().sum(dims, keepdim=True).sqrt())


# Ops that modules use and that some transform of torch.func cannot take, as others that it can.
MODULE_OPS = {torch._weight_norm: weight_norm}


def recurrent(op: Callable[..., Any]) -> Callable[..., Any] | None:
    """nn.LSTM, nn.GRU and nn.RNN written out, step by step, if this is the op of one of them: torch cannot vmap it (2.13)."""
    written: dict[Any, Callable[..., Any]] = {
        torch.lstm: decompositions.lstm_impl,
        torch.gru: decompositions.gru_impl,
        torch.rnn_tanh: decompositions.rnn_tanh_input,
        torch.rnn_relu: decompositions.rnn_relu_input,
    }
    return written.get(op)
