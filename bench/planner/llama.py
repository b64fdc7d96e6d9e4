"""The training loss of a Llama, as a function of shapes; by default of 70 billion parameters."""

from __future__ import annotations

from typing import Any

import attrs
import torch
import torch.nn.functional as F

import shardfn as sf
from shardfn import P

HEAD = 128  # features of a head
Tensor = torch.Tensor


@attrs.frozen
class Sizes:
    """The sizes of a Llama and of its batch."""

    width: int = 8192
    groups: int = 8  # heads of keys and values
    inner: int = 28672
    words: int = 128256
    batch: int = 256
    context: int = 4096
    dtype: torch.dtype = torch.bfloat16


SEVENTY = Sizes()


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
    heads, groups = (p[name].shape[-1] // HEAD for name in ("wq", "wk"))
    q = (x @ p["wq"]).unflatten(-1, (heads, HEAD)).transpose(1, 2)
    k = (x @ p["wk"]).unflatten(-1, (groups, HEAD)).transpose(1, 2)
    v = (x @ p["wv"]).unflatten(-1, (groups, HEAD)).transpose(1, 2)
    k = k.repeat_interleave(heads // groups, 1)
    v = v.repeat_interleave(heads // groups, 1)
    out = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
    return out.transpose(1, 2).flatten(2) @ p["wo"]


def layer(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    x = x + attended(normed(x, p["n1"]), p)
    h = normed(x, p["n2"])
    return x + (F.silu(h @ p["wg"]) * (h @ p["wu"])) @ p["wd"]


def loss(params: Any, tokens: Tensor, pinned: P | None = None, remat: bool = False) -> Tensor:
    """The loss. `pinned` constrains the embedded tokens, as a person would; `remat` computes
    layers again in the backward.
    """
    one = sf.checkpoint(layer) if remat else layer
    x = params["emb"][tokens]
    if pinned is not None:
        x = sf.constrain(x, pinned)
    if isinstance(params["layers"], dict):
        x, _ = sf.scan(lambda c, p: (one(c, p), None), x, params["layers"])
    else:
        for p in params["layers"]:
            x = one(x, p)
    logits = normed(x, params["n"]) @ params["head"]
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def shapes(layers: int, stacked: bool, sizes: Sizes = SEVENTY) -> tuple[Any, sf.ShapeDtype]:
    """The parameters and the tokens. Stacked layers are run by a scan."""
    of = lambda *shape: sf.ShapeDtype(shape, sizes.dtype)
    width, inner = sizes.width, sizes.groups * HEAD
    one = dict(
        n1=of(width),
        n2=of(width),
        wq=of(width, width),
        wk=of(width, inner),
        wv=of(width, inner),
        wo=of(width, width),
        wg=of(width, sizes.inner),
        wu=of(width, sizes.inner),
        wd=of(sizes.inner, width),
    )
    rows = {name: of(layers, *w.shape) for name, w in one.items()}
    params = dict(
        emb=of(sizes.words, width),
        n=of(width),
        head=of(width, sizes.words),
        layers=rows if stacked else [one] * layers,
    )
    return params, sf.ShapeDtype((sizes.batch, sizes.context), torch.int64)


def placements(layers: int, stacked: bool, embedding: P) -> Any:
    """Fully sharded over dp, tensor parallel over tp."""
    column, row = P("dp", "tp"), P("tp", "dp")
    one = dict(
        n1=P(), n2=P(), wq=column, wk=column, wv=column, wo=row, wg=column, wu=column, wd=row
    )
    rows = {name: P(None, *place.parts) for name, place in one.items()}
    each = rows if stacked else [one] * layers
    return dict(emb=embedding, n=P(), head=column, layers=each)
