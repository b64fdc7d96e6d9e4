"""Tensors that hold other tensors: how to open and to close them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from ..tracing import read_by_dynamo


@attrs.frozen
class Shell:
    """A tensor that holds others, without those.

    `context` is what its class says of it besides its tensors. It is compared as text, which
    tells 1 from True and does not change with it.
    """

    kind: type[Any]
    names: tuple[str, ...]
    context: Any = attrs.field(eq=False)
    said: str  # the context
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_followed: bool  # by autograd

    def __repr__(self) -> str:
        return f"{self.kind.__name__}({', '.join(self.names)}; {self.said})"


def opened(x: Any) -> tuple[list[torch.Tensor], Shell]:
    """The tensors that a tensor holds, and the rest of it."""
    names, context = x.__tensor_flatten__()
    if isinstance(context, dict):
        context = dict(context)  # as it is now
    is_followed = x.requires_grad and torch.is_grad_enabled()
    shape = tuple(x.shape)
    stride = tuple(x.stride())
    said = repr(context)
    shell = Shell(type(x), tuple(names), context, said, shape, stride, is_followed)
    return [getattr(x, name) for name in names], shell


@read_by_dynamo
def closed(shell: Shell, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor that holds these tensors."""
    held = dict(zip(shell.names, tensors, strict=True))
    size = torch.Size(shell.shape)
    stride = shell.stride
    told = shell.context
    told = dict(told) if isinstance(told, dict) else told
    return shell.kind.__tensor_unflatten__(held, told, size, stride)
