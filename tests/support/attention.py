"""Attention on sharded sequences, beside the same on one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
from shardfn import P


@attrs.frozen
class Case:
    """One attention: sizes, and what its queries see."""

    name: str
    queries: int = 7
    keys: int = 7
    heads: int = 3
    few: int = 3  # key heads
    causal: bool = False
    mask: tuple[int, ...] | None = None  # its shape
    window: int | None = None

    def tensors(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
        """Queries, keys and values, (batch, heads, sequence, features), and the mask."""
        generator = torch.Generator().manual_seed(len(self.name))
        make = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)
        q = make(2, self.heads, self.queries, 4)
        k, v = (make(2, self.few, self.keys, 4) for _ in range(2))
        mask = () if self.mask is None else (make(*self.mask),)
        if self.window is not None:
            rows = torch.arange(self.queries)[:, None] - torch.arange(self.keys)
            hidden = (rows < 0) | (rows >= self.window)
            mask = (torch.zeros(rows.shape, dtype=dtype).masked_fill(hidden, -math.inf),)
        return (q, k, v, *mask)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """The attention."""
        few = self.heads != self.few
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=self.causal, enable_gqa=few
        )

    def placements(self, rows: Any, batch: Any = None) -> tuple[P, ...]:
        """Queries, keys and values sharded on their sequence, the mask on its rows."""
        sequence = P(batch, None, rows)
        shape = self.mask if self.window is None else (self.queries, self.keys)
        if shape is None:
            return (sequence,) * 3
        by_rows = [None] * len(shape)
        if shape[-2] > 1:
            by_rows[-2] = rows
        return (*(sequence,) * 3, P(*by_rows))


CASES = (
    Case("plain"),
    Case("causal", causal=True),
    Case("long", queries=17, keys=17, causal=True),
    Case("more keys", keys=9, causal=True),
    Case("fewer keys", keys=5, causal=True),
    Case("across", queries=5, keys=11),
    Case("few key heads", heads=8, few=2, causal=True),
    Case("one key head", heads=4, few=1),
    Case("mask", mask=(7, 7)),
    Case("mask of each head", mask=(2, 3, 7, 7)),
    Case("mask of one row", mask=(2, 1, 1, 7)),
    Case("mask of one column", mask=(1, 3, 7, 1)),
    Case("mask of few key heads", heads=4, few=2, mask=(1, 1, 7, 7)),
    Case("window", queries=11, keys=11, window=3),
)


def cubed(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss of an attention."""
    return lambda *args: (attend(*args) ** 3).sum()


def value_and_gradients(case: Case, args: Sequence[Tensor]) -> tuple[Tensor, Any]:
    """The attention of one device, and its gradients in queries, keys and values."""
    return case.attend(*args), torch.func.grad(cubed(case.attend), (0, 1, 2))(*args)


def sharded(case: Case, mesh: Any, args: Sequence[Tensor], *axes: Any, **options: Any) -> Any:
    """The same over a mesh."""
    placed = case.placements(*axes)
    options = {"backend": "aten", **options}
    value = sf.shard(case.attend, mesh, placed, placed[0], **options)
    gradients = sf.shard(sf.grad(cubed(case.attend), (0, 1, 2)), mesh, placed, **options)
    return sf.full((value(*args), gradients(*args)))
