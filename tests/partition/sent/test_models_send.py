"""What models send, counted: data parallel one reduction for each parameter and no activation,
tensor parallel the all-reduces of the textbook.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import shardfn as sf
from shardfn import P

DTYPE = torch.float64
T, B, E = 2, 30, 4  # a batch that is larger than any parameter's dims
SCALAR = 8  # bytes


def drawn(*shape: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(math.prod(shape))
    return torch.randn(shape, generator=g, dtype=DTYPE)


def lowered(
    module: nn.Module, mesh: dict[str, int], placed: Any, args: Any, specs: Any
) -> tuple[dict[str, torch.Tensor], Any]:
    """A module's parameters, and the lowered gradient of the sum of squares of its results."""
    fn, params, buffers = sf.functionalize(module.to(DTYPE).eval())

    def loss(params: Any, *args: Any) -> torch.Tensor:
        results = [x for x in tree_leaves(fn(params, buffers, *args)[0]) if x is not None]
        return sum((x * x).sum() for x in results)

    with sf.fake_world(math.prod(mesh.values())):
        at = sf.make_mesh(tuple(mesh.values()), tuple(mesh))
        where = sf.placements(params, placed, default=P()) if placed else P()
        step = sf.shard(sf.value_and_grad(loss), at, (where, *specs), backend="aten")
        return params, step.lower(params, *args)


class Itself(nn.Module):
    """An attention layer whose queries, keys and values are one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(*args, **kwargs)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        return self.layer(x, x, x, key_padding_mask=mask)


class Fused(nn.Module):
    """Causal attention of GPT-2: queries, keys and values are one product."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, E)
        self.places = nn.Embedding(T, E)
        self.norm = nn.LayerNorm(E)
        self.qkv = nn.Linear(E, 3 * E)
        self.out = nn.Linear(E, E)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        q, k, v = (
            y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).split(E, -1)
        )
        scores = (q @ k.mT).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return (x + self.out(y)) @ self.words.weight.t()


class Masked(nn.Module):
    """A mask that is read by the numbers of its rows and columns, as Hugging Face does."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(E, E)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(x.shape[0])[:, None, None]
        columns = (torch.arange(x.shape[1]) + 0)[None, None]
        q = self.proj(x)
        scores = torch.where(mask[rows, columns], q @ q.mT, -1e9)
        return scores.softmax(-1) @ x


class Cached(nn.Module):
    """Attention whose keys join a cache, which is empty before the first token."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Linear(E, E)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = torch.cat([x.new_empty(0), self.keys(x)], dim=-2)
        return (x @ keys.mT).softmax(-1) @ keys


class Last(nn.Module):
    """The last row of each sequence, by the strides of all, as compiled code reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(E, E)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.tanh()
        return self.out(rows.as_strided((B, E), (T * E, 1), (T - 1) * E))


SEQUENCE_FIRST = P(None, "dp")
PADDING = torch.arange(B * T).view(B, T) % 3 == 0
TOKENS = torch.arange(B * T).view(B, T) % 7
# (module, arguments, their placements)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], tuple[P, ...]]] = {
    "LSTM": (lambda: nn.LSTM(E, 3, 2), (drawn(T, B, E),), (SEQUENCE_FIRST,)),
    "LSTM, a small batch": (lambda: nn.LSTM(E, 8), (drawn(T, 4, E),), (SEQUENCE_FIRST,)),
    "GRU, both directions": (
        lambda: nn.GRU(E, 3, bidirectional=True),
        (drawn(T, B, E),),
        (SEQUENCE_FIRST,),
    ),
    "Transformer": (
        lambda: nn.Transformer(E, 2, 1, 1, 6, dropout=0.0),
        (drawn(T, B, E), drawn(3, B, E)),
        (SEQUENCE_FIRST,) * 2,
    ),
    "MultiheadAttention": (lambda: Itself(E, 2), (drawn(T, B, E),), (SEQUENCE_FIRST,)),
    "MultiheadAttention, all options": (
        lambda: Itself(E, 2, add_bias_kv=True, add_zero_attn=True),
        (drawn(T, B, E), PADDING),
        (SEQUENCE_FIRST, P("dp")),
    ),
    "GPT-2": (Fused, (TOKENS,), (P("dp"),)),
    "a mask": (Masked, (drawn(B, T, E), ~PADDING), (P("dp"), P("dp"))),
    "an empty cache": (Cached, (drawn(B, T, E),), (P("dp"),)),
    "the last row": (Last, (drawn(B, T, E),), (P("dp"),)),
    "nearest images": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 1), nn.Upsample(scale_factor=2)),
        (drawn(B, 2, 2, 3),),
        (P("dp"),),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_data_parallel_sends_no_activation(name: str) -> None:
    make, args, specs = MODELS[name]
    params, low = lowered(make(), {"dp": 2}, None, args, specs)
    assert {c.kind for c in low.collectives} == {"all_reduce"}
    sent = collections.Counter(c.nbytes for c in low.collectives)
    parameters = collections.Counter(p.numel() * SCALAR for p in params.values())
    assert not parameters - sent
    sums = {SCALAR, 2 * SCALAR}  # of the loss, two that one op reads together
    assert set(sent - parameters) <= sums


class Layer(nn.Module):
    """One layer with eager attention, before or after its norms, with fewer key heads."""

    def __init__(self, *, norm_first: bool) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.q = nn.Linear(8, 8)
        self.k = nn.Linear(8, 4)
        self.v = nn.Linear(8, 4)
        self.o = nn.Linear(8, 8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)])

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        k, v = (y[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for y in (k, v))
        y = (q @ k.mT).softmax(-1) @ v
        return self.o(y.transpose(1, 2).flatten(2))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part, norm in zip((self.attention, self.mlp), self.norms, strict=True):
            x = x + part(norm(x)) if self.norm_first else norm(x + part(x))
        return x


COLUMNS = {f"**.{name}.weight": P("tp") for name in ("q", "k", "v", "up")}
BIASES = {f"**.{name}.bias": P("tp") for name in ("q", "k", "v", "up")}
ROWS = {f"**.{name}.weight": P(None, "tp") for name in ("o", "down")}


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 3, "tp": 2}], ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["Llama", "BERT"])
def test_tensor_parallel_sends_two_all_reduces_a_layer_and_pass(
    norm_first: bool, mesh: dict[str, int]
) -> None:
    """The input needs no gradient, so the backward of the first layer sends one less, and the
    gradients of a norm before it.
    """
    layers = 2
    module = nn.Sequential(*(Layer(norm_first=norm_first) for _ in range(layers)))
    x = drawn(9, 3, 8)
    plan = {**COLUMNS, **BIASES, **ROWS}
    batch = P("dp") if "dp" in mesh else P()
    _, low = lowered(module, mesh, plan, (x,), (batch,))
    over_tp = [c for c in low.collectives if c.axis == "tp"]
    activation = x.numel() * SCALAR // mesh.get("dp", 1)
    assert {c.kind for c in over_tp} == {"all_reduce"}
    sent = collections.Counter(c.nbytes for c in over_tp)
    of_norm = {8 * SCALAR: 2} if norm_first else {}
    assert sent == {activation: 2 * layers + 2 * layers - 1, **of_norm}
