"""Zeros that stand for no tangent, among fake tensors: what torch gets wrong of them (torch 2.11 to 2.13)."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .threads import is_capturing

ATEN = torch.ops.aten
VIEWS = ("view", "_reshape_alias", "as_strided")  # with a kernel for such zeros that makes a real tensor of a fake one
_dispatch = FakeTensorMode.dispatch


def _mended(mode: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """What a mode does with a call where tangents may be such zeros; another thread's goes its way."""
    if not is_capturing():
        return _dispatch(mode, func, types, args, kwargs)
    if func is ATEN.expand.default and not isinstance(args[0], torch.Tensor):  # a number that was added to such a zero
        args = (torch.scalar_tensor(args[0]), *args[1:])
    if func is ATEN._has_same_storage_numel.default and args[0].stride() != args[1].stride():
        return True  # a zero comes here as one expanded number; where strides do differ, torch asks for them next
    return _dispatch(mode, func, types, args, kwargs)


@contextlib.contextmanager
def zeros_kept_fake() -> Iterator[None]:
    """While it is entered, fake zeros are treated like other fake tensors: views of them go the way of all views, and stay fake."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings(action="ignore"):  # that it overrides a kernel
            for name in VIEWS:
                library.impl(name, torch.library.fallthrough_kernel, "ZeroTensor", allow_override=True)
        with mock.patch.object(FakeTensorMode, "dispatch", _mended):
            yield
    finally:
        library._destroy()
