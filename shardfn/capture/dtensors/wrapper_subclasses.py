"""Wrapper subclasses, whose tensors hold inner tensors, in the code of one rank."""

from __future__ import annotations

import attrs
import torch

from ... import _compat


@_compat.of_trees
def inner_tensor_names(x: torch.Tensor) -> list[str]:
    """The names of the inner tensors of a wrapper subclass; none of a plain tensor or a DTensor."""
    return list(_compat.opened(x)[1].names) if _compat.holds_tensors(x) else []


@_compat.of_trees
def spec_with_shape(x: torch.Tensor, shape: tuple[int, ...]) -> _compat.Shell:
    """The spec of a wrapper subclass without its inner tensors, for another shape."""
    stride = torch.empty(shape, device="meta").stride()
    return attrs.evolve(_compat.opened(x)[1], shape=shape, stride=stride)
