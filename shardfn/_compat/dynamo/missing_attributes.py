"""An attribute that an object does not have raises AttributeError. For an object of a builtin
class, Dynamo makes a stand-in for an attribute of any name (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

SCALARS = np.float64, np.int64  # to Dynamo, they are arrays
TENSORS = DTensor, AsyncCollectiveTensor  # to Dynamo, they are plain tensors


def attribute_loaded(_: Any, load: Callable[..., Any], tx: Any, name: str) -> None:
    """Patch Dynamo's load of an attribute, as `x.name`."""
    load(tx, name)
    _raise_if_missing(tx, tx.stack[-1])


def attribute_asked(
    _: Any, ask: Callable[..., Any], builtin: Any, tx: Any, args: Any, kwargs: Any
) -> Any:
    """Patch Dynamo's getattr. Dynamo's own hasattr of a tensor asks here, by a getattr that is
    not the code's and so has no source, and expects the stand-in.
    """
    attribute = ask(builtin, tx, args, kwargs)
    if len(args) == 2 and (builtin.source or not args[0].is_tensor()):
        _raise_if_missing(tx, attribute)
    return attribute


def _raise_if_missing(tx: Any, attribute: Any) -> None:
    """Raise AttributeError in the captured code for the stand-in of a missing attribute."""
    from torch._dynamo.exc import raise_observed_exception
    from torch._dynamo.variables import GetAttrVariable

    if type(attribute) is not GetAttrVariable or attribute.py_type is not None:
        return
    x, name = attribute.obj, attribute.name
    try:
        cls = x.python_type()
    except NotImplementedError:
        return
    if any(name in vars(base) for base in cls.__mro__) or _has(tx, x, cls, name):
        return
    is_class = issubclass(cls, type) and x.is_python_constant()
    owner = (
        f"type object '{x.as_python_constant().__name__}'"
        if is_class
        else f"'{cls.__name__}' object"
    )
    raise_observed_exception(AttributeError, tx, args=[f"{owner} has no attribute '{name}'"])


def _has(tx: Any, x: Any, cls: type, name: str) -> bool:
    """Whether an object has, or may have, an attribute that its class does not have."""
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.variables import AutogradFunctionVariable

    if isinstance(x, AutogradFunctionVariable):
        return hasattr(x.fn_cls, name)
    if cls is tuple and x.source is None:
        return True  # to Dynamo, a PackedSequence that the code makes is a tuple
    if x.is_tensor():
        others = SCALARS if issubclass(cls, np.ndarray) else TENSORS
        return any(hasattr(other, name) for other in others)
    try:
        return x.call_obj_hasattr(tx, name).as_python_constant()
    except Unsupported:
        return bool(cls.__dictoffset__) and not issubclass(cls, BaseException)
