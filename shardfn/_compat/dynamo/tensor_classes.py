"""Subclasses of tensors: which are plain, which hold other tensors, and how they are called in
errors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..distributed.groups import is_arriving
from ..tracing import is_fake

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def is_foreign(x: Any) -> bool:
    """Whether a tensor is of a subclass: a DTensor, a pair of tensors, a user's class."""
    kind = type(x)
    if isinstance(x, DTensor):
        return True
    if not isinstance(x, torch.Tensor) or kind in PLAIN or kind.__module__.startswith("shardfn."):
        return False
    if isinstance(x, torch.nn.Parameter):  # a harmless subclass that only names a kind of parameter
        return kind.__torch_function__ is not torch.nn.Parameter.__torch_function__
    return is_traceable_wrapper_subclass(x) or not is_fake(x)


def reads_calls(x: torch.Tensor) -> bool:
    """Whether the class of a tensor has a `__torch_function__` of its own."""
    own = type(x).__torch_function__
    plain = torch.Tensor.__torch_function__.__func__
    known = (plain, torch._C._disabled_torch_function_impl)
    return getattr(own, "__func__", own) not in known


def is_foreign_class(x: Any) -> bool:
    """Whether x is a class of tensors that neither is plain nor holds other tensors."""
    return (
        isinstance(x, type)
        and issubclass(x, torch.Tensor)
        and x not in PLAIN
        and not hasattr(x, "__tensor_flatten__")
    )


def class_name(x: torch.Tensor) -> str:
    """The name of a tensor's class in errors."""
    return "DTensor" if isinstance(x, DTensor) else type(x).__name__


def holds_tensors(x: Any) -> bool:
    """Whether a tensor is made of other tensors, and is neither a DTensor nor nested: torch calls
    its class a traceable wrapper subclass.
    """
    return (
        isinstance(x, torch.Tensor)
        and is_traceable_wrapper_subclass(x)
        and not (isinstance(x, DTensor) or is_arriving(x) or x.is_nested)
    )
