"""Convolutions with other padding before a dim of space than after it, as causal ones have. torch
writes one as a convolution of a padded input, or as a slice of a convolution with more padding,
whose chunks along that dim do not line up with those of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten
_library = torch.library.Library("shardfn", "FRAGMENT")
Sizes = Sequence[int]


def padding_of(before: Sizes, after: Sizes) -> list[int]:
    """Return the padding of all dims of space, as constant_pad_nd takes it: the last dim first."""
    pairs = [*zip(before, after, strict=True)]
    return [n for pair in reversed(pairs) for n in pair]


def _forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sizes,
    before: Sizes,
    after: Sizes,
    dilation: Sizes,
    groups: int,
) -> torch.Tensor:
    padded, none = aten.constant_pad_nd.default(x, padding_of(before, after)), [0] * len(before)
    return aten.convolution.default(
        padded, weight, bias, stride, none, dilation, False, none, groups
    )


def _backward(
    g: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Sizes | None,
    stride: Sizes,
    before: Sizes,
    after: Sizes,
    dilation: Sizes,
    groups: int,
    mask: Sequence[bool],
) -> Any:
    padded, none = aten.constant_pad_nd.default(x, padding_of(before, after)), [0] * len(before)
    of_x, *others = aten.convolution_backward.default(
        g, padded, weight, bias, stride, none, dilation, False, none, groups, mask
    )
    if mask[0]:
        of_x = aten.constant_pad_nd.default(of_x, [-n for n in padding_of(before, after)])
    return (of_x, *others)


def _define(schema: str, fn: Callable[..., Any]) -> Any:
    """Define an op in our namespace."""
    _library.define(schema)
    name = schema.partition("(")[0]
    _library.impl(name, fn, "CompositeImplicitAutograd")
    return getattr(torch.ops.shardfn, name).default


SETTINGS = "int[] stride, int[] before, int[] after, int[] dilation, int groups"
PADDED = _define(
    f"padded_convolution(Tensor x, Tensor weight, Tensor? bias, {SETTINGS}) -> Tensor", _forward
)
PADDED_BACKWARD = _define(
    f"padded_convolution_backward(Tensor g, Tensor x, Tensor weight, int[]? bias, {SETTINGS}, "
    "bool[3] mask) -> (Tensor, Tensor, Tensor)",
    _backward,
)
