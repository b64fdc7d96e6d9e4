"""What nn.Module does behind the back of whoever runs it: hooks on the backward, kernels of its own, questions for the rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .dynamo import RANK


@contextlib.contextmanager
def hooked_by(cls: Any) -> Iterator[None]:
    """Have modules with backward hooks make this class where they make torch's: that one fails under torch.func (2.11 to 2.15)."""
    with mock.patch.object(torch.nn.modules.module, "BackwardHook", cls):
        yield


@contextlib.contextmanager
def plain_modules(refuse_rank: Any) -> Iterator[None]:
    """Modules as they are written: attention without its fused kernel for inference; who asks for the rank gets `refuse_rank`."""
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(dist, "get_rank", refuse_rank))
            for name in RANK:
                if hasattr(DeviceMesh, name):
                    stack.enter_context(mock.patch.object(DeviceMesh, name, refuse_rank))
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was)
