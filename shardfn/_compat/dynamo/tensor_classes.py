"""Subclasses of tensors: which are plain, and how the others are called in errors."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..tracing import is_fake

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def is_foreign(x: Any) -> bool:
    """Whether a tensor is of a subclass: a DTensor, a pair of tensors, a user's class."""
    kind = type(x)
    if isinstance(x, DTensor):
        return True
    if (
        not isinstance(x, torch.Tensor)
        or kind in PLAIN
        or kind.__module__.startswith("shardfn.")
    ):
        return False
    if isinstance(
        x, torch.nn.Parameter
    ):  # a harmless subclass that only names a kind of parameter
        return kind.__torch_function__ is not torch.nn.Parameter.__torch_function__
    return is_traceable_wrapper_subclass(x) or not is_fake(x)


def class_name(x: torch.Tensor) -> str:
    """The name of a tensor's class in errors."""
    return "DTensor" if isinstance(x, DTensor) else type(x).__name__


def holds_tensors(x: torch.Tensor) -> bool:
    """Whether a tensor is made of other tensors."""
    return is_traceable_wrapper_subclass(x)
