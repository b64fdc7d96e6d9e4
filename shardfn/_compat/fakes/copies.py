"""Deep copies of fake tensors, which have no memory to copy from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


def on_fakes(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function to call in place of one of torch whose tensors may be fake.

    `Tensor.__deepcopy__` copies the memory of a fake tensor that has an address, as one made from
    a number has, and so overwrites memory of the process (torch 2.13).
    """
    return _copied if func is torch.Tensor.__deepcopy__ else func


def _copied(x: torch.Tensor, memo: dict[int, Any]) -> Any:
    """Tensor.__deepcopy__.

    Args:
        x: the tensor.
        memo: what `copy.deepcopy` has copied so far, by id.
    """
    if not isinstance(x, FakeTensor) or not x.is_leaf or id(x) in memo:
        return torch.Tensor.__deepcopy__(x, memo)
    with torch.no_grad():
        copy = x.clone()
    if isinstance(x, torch.nn.Parameter):
        copy = torch.nn.Parameter(copy, x.requires_grad)
    elif x.requires_grad:
        copy.requires_grad_()
    memo[id(x)] = copy
    return copy
