"""Tensors that hold other tensors: how to open and to close them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from ..tracing import read_by_dynamo


@attrs.frozen(hash=False)
class Shell:
    """A tensor that holds others, without those.

    `context` is what its class says of it besides its tensors.
    """

    kind: type[Any]
    names: tuple[str, ...]
    context: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_followed: bool  # by autograd

    def __hash__(self) -> int:
        return hash((self.kind, self.names, self.shape))

    def __repr__(self) -> str:
        return f"{self.kind.__name__}({', '.join(self.names)}; {self.context!r})"


def opened(x: Any) -> tuple[list[torch.Tensor], Shell]:
    """The tensors that a tensor holds, and the rest of it."""
    names, context = x.__tensor_flatten__()
    is_followed = x.requires_grad and torch.is_grad_enabled()
    shape, stride = tuple(x.shape), tuple(x.stride())
    shell = Shell(type(x), tuple(names), context, shape, stride, is_followed)
    return [getattr(x, name) for name in names], shell


@read_by_dynamo
def closed(shell: Shell, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor that holds these tensors."""
    held = dict(zip(shell.names, tensors, strict=True))
    size, stride = torch.Size(shell.shape), shell.stride
    return shell.kind.__tensor_unflatten__(held, shell.context, size, stride)
