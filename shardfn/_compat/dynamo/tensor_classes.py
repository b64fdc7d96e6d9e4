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
    """Return whether a tensor is of any subclass: DTensor, wrapper subclass, user class."""
    kind = type(x)
    if isinstance(x, DTensor):
        return True
    if (
        not isinstance(x, torch.Tensor)
        or kind in PLAIN
        or (kind.__module__ or "").startswith("shardfn.")
    ):
        return False
    if isinstance(x, torch.nn.Parameter):  # a harmless subclass that only names a kind of parameter
        return kind.__torch_function__ is not torch.nn.Parameter.__torch_function__
    return is_traceable_wrapper_subclass(x) or not is_fake(x)


def reads_calls(x: torch.Tensor) -> bool:
    """Return whether a tensor's class defines its own `__torch_function__`."""
    own = type(x).__torch_function__
    plain = torch.Tensor.__torch_function__.__func__
    known = (plain, torch._C._disabled_torch_function_impl)
    return getattr(own, "__func__", own) not in known


def is_foreign_class(x: Any) -> bool:
    """Return whether x is a tensor class that is neither plain nor a wrapper subclass."""
    return (
        isinstance(x, type)
        and issubclass(x, torch.Tensor)
        and x not in PLAIN
        and not hasattr(x, "__tensor_flatten__")
    )


def class_name(x: torch.Tensor) -> str:
    """Return the name of a tensor's class for errors."""
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
