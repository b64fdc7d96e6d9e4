"""The training loss of a Llama of 70 billion parameters, as a function of shapes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import shardfn as sf
from shardfn import P

WIDTH, HEADS, GROUPS, INNER, WORDS = 8192, 64, 8, 28672, 128256
HEAD = WIDTH // HEADS
BATCH, CONTEXT = 256, 4096
Tensor = torch.Tensor


def normed(x: Tensor, weight: Tensor) -> Tensor:
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    return x * scale.to(x.dtype) * weight


def turned(x: Tensor) -> Tensor:
    """Rotary positions, (B, H, T, D)."""
    half = x.shape[-1] // 2
    rates = 500_000 ** -(torch.arange(half).float() / half)
    angles = torch.arange(x.shape[-2]).float()[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def attended(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    q = (x @ p["wq"]).unflatten(-1, (HEADS, HEAD)).transpose(1, 2)
    k = (x @ p["wk"]).unflatten(-1, (GROUPS, HEAD)).transpose(1, 2)
    v = (x @ p["wv"]).unflatten(-1, (GROUPS, HEAD)).transpose(1, 2)
    k = k.repeat_interleave(HEADS // GROUPS, 1)
    v = v.repeat_interleave(HEADS // GROUPS, 1)
    out = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
    return out.transpose(1, 2).flatten(2) @ p["wo"]


def layer(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    x = x + attended(normed(x, p["n1"]), p)
    h = normed(x, p["n2"])
    return x + (F.silu(h @ p["wg"]) * (h @ p["wu"])) @ p["wd"]


def loss(params: Any, tokens: Tensor, pinned: P | None = None) -> Tensor:
    """The loss. `pinned` constrains the embedded tokens, as a person would."""
    x = params["emb"][tokens]
    if pinned is not None:
        x = sf.constrain(x, pinned)
    if isinstance(params["layers"], dict):
        x, _ = sf.scan(lambda c, p: (layer(c, p), None), x, params["layers"])
    else:
        for p in params["layers"]:
            x = layer(x, p)
    logits = normed(x, params["n"]) @ params["head"]
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def shapes(layers: int, stacked: bool) -> tuple[Any, sf.ShapeDtype]:
    """The parameters and the tokens. Stacked layers are run by a scan."""
    of = lambda *shape: sf.ShapeDtype(shape, torch.bfloat16)
    inner = GROUPS * HEAD
    one = dict(
        n1=of(WIDTH),
        n2=of(WIDTH),
        wq=of(WIDTH, WIDTH),
        wk=of(WIDTH, inner),
        wv=of(WIDTH, inner),
        wo=of(WIDTH, WIDTH),
        wg=of(WIDTH, INNER),
        wu=of(WIDTH, INNER),
        wd=of(INNER, WIDTH),
    )
    rows = {name: of(layers, *w.shape) for name, w in one.items()}
    params = dict(
        emb=of(WORDS, WIDTH),
        n=of(WIDTH),
        head=of(WIDTH, WORDS),
        layers=rows if stacked else [one] * layers,
    )
    return params, sf.ShapeDtype((BATCH, CONTEXT), torch.int64)


def placements(layers: int, stacked: bool, embedding: P) -> Any:
    """Fully sharded over dp, tensor parallel over tp."""
    column, row = P("dp", "tp"), P("tp", "dp")
    one = dict(
        n1=P(),
        n2=P(),
        wq=column,
        wk=column,
        wv=column,
        wo=row,
        wg=column,
        wu=column,
        wd=row,
    )
    rows = {name: P(None, *place.parts) for name, place in one.items()}
    each = rows if stacked else [one] * layers
    return dict(emb=embedding, n=P(), head=column, layers=each)
