"""A byte-level GPT as pure functions of global tensors. Only `placements` refers to mesh axes."""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from shardfn import P

Params = dict[str, Any]

COLUMN, ROW, WHOLE = P(None, "tp"), P("tp", None), P()


@attrs.frozen(kw_only=True)
class Config:
    """The sizes of the model.

    Args:
        vocab: different tokens; 256 for bytes.
        context: tokens that a prediction may see, T.
        width: features of a token, C; a multiple of `heads`.
        heads: attention heads, H.
        layers: blocks of attention and feed-forward.
        dropout: the probability that training sets an activation to zero.
    """

    vocab: int = 256
    context: int = 64
    width: int = 128
    heads: int = 4
    layers: int = 4
    dropout: float = 0.0


def init(config: Config, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Params:
    """Fresh parameters, the same for a seed on every machine and rank.

    Args:
        config: the sizes.
        seed: of the random numbers.
        dtype: of the parameters.

    Returns:
        A tree of tensors: tables `tok` (V, C) and `pos` (T, C), `layers`, the last norm `ln`,
        and `head` (C, V).

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2),
    section 2.3: standard deviation 0.02, and 1/sqrt(2 * layers) of it for the matrices that
    write to the residual stream.

    Example:
        >>> params = init(Config(width=8, heads=2, layers=3))
        >>> len(params["layers"]), tuple(params["layers"][0]["up"].shape)
        (3, (8, 32))
    """
    generator = torch.Generator().manual_seed(seed)
    width, quiet = config.width, 0.02 / math.sqrt(2 * config.layers)

    def weight(n: int, k: int, std: float = 0.02) -> Tensor:
        return (torch.randn(n, k, generator=generator) * std).to(dtype)

    def norm() -> Params:
        return {"w": torch.ones(width, dtype=dtype), "b": torch.zeros(width, dtype=dtype)}

    def layer() -> Params:
        return {
            "ln1": norm(),
            "q": weight(width, width),
            "k": weight(width, width),
            "v": weight(width, width),
            "o": weight(width, width, quiet),
            "ln2": norm(),
            "up": weight(width, 4 * width),
            "down": weight(4 * width, width, quiet),
        }

    return {
        "tok": weight(config.vocab, width),
        "pos": weight(config.context, width),
        "layers": [layer() for _ in range(config.layers)],
        "ln": norm(),
        "head": weight(width, config.vocab),
    }


def logits(params: Params, x: Tensor, *, heads: int, dropout: float = 0.0) -> Tensor:
    """The model's prediction after each token.

    Args:
        params: as `init` makes them.
        x: tokens, int64 (B, T), T at most the context.
        heads: attention heads, H.
        dropout: the probability that an element becomes zero, of the embedding and of what
            attention and feed-forward add to it; 0 draws no random numbers.

    Returns:
        Unnormalised log-probabilities (B, T, V).
    """
    h = F.embedding(x, params["tok"]) + params["pos"][: x.shape[1]]  # (B, T, C)
    h = dropped(h, dropout)
    for layer in params["layers"]:
        mixed = attention(layer, normed(h, layer["ln1"]), heads=heads)
        h = h + dropped(mixed, dropout)
        hidden = F.gelu(normed(h, layer["ln2"]) @ layer["up"])
        h = h + dropped(hidden @ layer["down"], dropout)
    return normed(h, params["ln"]) @ params["head"]


def dropped(h: Tensor, rate: float) -> Tensor:
    """Dropout, by the numbers of `sf.random.state`."""
    return F.dropout(h, rate) if rate else h


def normed(h: Tensor, ln: Params) -> Tensor:
    """Layer norm over the features."""
    return F.layer_norm(h, (h.shape[-1],), ln["w"], ln["b"])


def attention(layer: Params, h: Tensor, *, heads: int) -> Tensor:
    """Causal self-attention over h (B, T, C); q, k and v are separate matrices, so that heads
    are runs of columns.
    """
    q, k, v = (split_heads(h @ layer[name], heads) for name in ("q", "k", "v"))  # (B, H, T, C / H)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(1, 2).reshape(h.shape) @ layer["o"]


def split_heads(z: Tensor, heads: int) -> Tensor:
    """(B, T, C) as (B, H, T, C / H)."""
    return z.reshape(*z.shape[:2], heads, -1).transpose(1, 2)


def loss_fn(params: Params, x: Tensor, y: Tensor, *, heads: int, dropout: float = 0.0) -> Tensor:
    """Mean cross-entropy of the next token, in nats.

    Args:
        params: as `init` makes them.
        x: tokens, int64 (B, T).
        y: the tokens that follow, int64 (B, T).
        heads: attention heads.
        dropout: as for `logits`.

    Returns:
        A 0-d tensor.

    Example:
        >>> params = init(Config(vocab=2, width=8, heads=2, layers=1))
        >>> tokens = torch.tensor([[0, 1, 0, 1]])
        >>> round(
        ...     loss_fn(params, tokens, 1 - tokens, heads=2).item(), 1
        ... )  # knows nothing yet: log(2)
        0.7
    """
    z = logits(params, x, heads=heads, dropout=dropout)
    return F.cross_entropy(z.flatten(0, 1), y.flatten())


def placements(params: Params) -> Params:
    """The placement of each parameter under tensor parallelism: heads, hidden features and the
    vocabulary are sharded over "tp".

    Args:
        params: as `init` makes them.

    Returns:
        A tree of the same structure, of `P`.

    Source: Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3.

    Example:
        >>> placements(init(Config(layers=1)))["head"] == P(None, "tp")
        True
    """
    norm = {"w": WHOLE, "b": WHOLE}
    layer = {
        "ln1": norm,
        **dict.fromkeys(("q", "k", "v", "up"), COLUMN),
        "ln2": norm,
        **dict.fromkeys(("o", "down"), ROW),
    }
    return {
        "tok": ROW,
        "pos": WHOLE,
        "layers": [layer] * len(params["layers"]),
        "ln": norm,
        "head": COLUMN,
    }
