"""Small training steps that the laws are tested on: a GPT, a Llama-style block, a convnet, an
MLP; odd sizes, float64.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F

import shardfn as sf

VOCAB, CONTEXT, HEADS, HEAD, LAYERS, BATCH = 11, 5, 3, 2, 2, 7
WIDTH = HEADS * HEAD


def _weights(seed: int, dtype: torch.dtype = torch.float64) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) * 0.3
    )


def gpt_params(layers: int = LAYERS, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    w, one = (
        _weights(0, dtype),
        lambda: {"w": torch.ones(WIDTH, dtype=dtype), "b": torch.zeros(WIDTH, dtype=dtype)},
    )
    layer = lambda: {
        "ln1": one(),
        "q": w(WIDTH, WIDTH),
        "k": w(WIDTH, WIDTH),
        "v": w(WIDTH, WIDTH),
        "o": w(WIDTH, WIDTH),
        "ln2": one(),
        "up": w(WIDTH, 2 * WIDTH),
        "down": w(2 * WIDTH, WIDTH),
    }
    blocks = [layer() for _ in range(layers)]
    return {
        "tok": w(VOCAB, WIDTH),
        "pos": w(CONTEXT, WIDTH),
        "layers": blocks,
        "ln": one(),
        "head": w(WIDTH, VOCAB),
    }


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(x.shape[0], x.shape[1], -1, HEAD).transpose(1, 2)  # (B, H, T, D)


def _norm(x: torch.Tensor, ln: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), ln["w"], ln["b"])


def gpt_loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = F.embedding(x, params["tok"]) + params["pos"]  # (B, T, W)
    for layer in params["layers"]:
        n = _norm(h, layer["ln1"])
        a = F.scaled_dot_product_attention(
            _heads(n @ layer["q"]), _heads(n @ layer["k"]), _heads(n @ layer["v"]), is_causal=True
        )
        h = h + a.transpose(1, 2).reshape(h.shape) @ layer["o"]
        h = h + F.gelu(_norm(h, layer["ln2"]) @ layer["up"]) @ layer["down"]
    return F.cross_entropy((_norm(h, params["ln"]) @ params["head"]).flatten(0, 1), y.flatten())


def tokens(batch: int = BATCH, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randint(
        0, VOCAB, (2, batch, CONTEXT), generator=torch.Generator().manual_seed(seed)
    )
    return x, y


KV = 1  # key heads of the grouped-query attention below; 3 query heads each


def llama_params(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    w = _weights(2, dtype)
    return {
        "n1": torch.ones(WIDTH, dtype=dtype),
        "q": w(WIDTH, WIDTH),
        "k": w(WIDTH, KV * HEAD),
        "v": w(WIDTH, KV * HEAD),
        "o": w(WIDTH, WIDTH),
        "n2": torch.ones(WIDTH, dtype=dtype),
        "gate": w(WIDTH, 8),
        "up": w(WIDTH, 8),
        "down": w(8, WIDTH),
    }


def _rms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def _rotary(x: torch.Tensor) -> torch.Tensor:  # (B, H, T, D)
    t, half = x.shape[2], x.shape[3] // 2
    angle = torch.arange(t, dtype=x.dtype)[:, None] / 10000 ** (
        torch.arange(half, dtype=x.dtype) / half
    )
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def _repeat(x: torch.Tensor, times: int) -> torch.Tensor:
    b, h, t, d = x.shape
    return x[:, :, None].expand(b, h, times, t, d).reshape(b, h * times, t, d)


def llama_loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    n = _rms(x, params["n1"])  # (B, T, W)
    q, k, v = (
        _rotary(_heads(n @ params["q"])),
        _rotary(_heads(n @ params["k"])),
        _heads(n @ params["v"]),
    )
    a = F.scaled_dot_product_attention(
        q, _repeat(k, HEADS // KV), _repeat(v, HEADS // KV), is_causal=True
    )
    h = x + a.transpose(1, 2).reshape(x.shape) @ params["o"]
    n = _rms(h, params["n2"])
    h = h + (F.silu(n @ params["gate"]) * (n @ params["up"])) @ params["down"]
    return F.mse_loss(h, y)


def activations(batch: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    w = _weights(3)
    return w(batch, CONTEXT, WIDTH), w(batch, CONTEXT, WIDTH)


def conv_params() -> dict[str, Any]:
    w = _weights(4)
    g = torch.ones(6, dtype=torch.float64)
    return {
        "c1": w(6, 3, 3, 3),
        "b1": w(6),
        "g": g,
        "c2": w(5, 6, 3, 3),
        "b2": w(5),
        "fc": w(20, 7),
        "bias": w(7),
    }


def conv_loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = F.conv2d(x, params["c1"], params["b1"], padding=1)  # (B, 6, 8, 8)
    mean, var = (h.mean((0, 2, 3), keepdim=True), h.var((0, 2, 3), unbiased=False, keepdim=True))
    h = F.relu((h - mean) * torch.rsqrt(var + 1e-5) * params["g"][:, None, None])
    h = F.max_pool2d(h, 2)  # (B, 6, 4, 4)
    h = F.avg_pool2d(F.relu(F.conv2d(h, params["c2"], params["b2"], padding=1)), 2)  # (B, 5, 2, 2)
    return F.cross_entropy(F.linear(h.flatten(1), params["fc"].t(), params["bias"]), y)


def images(batch: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    return _weights(5)(batch, 3, 8, 8), torch.randint(
        0, 7, (batch,), generator=torch.Generator().manual_seed(6)
    )


def mlp_params(widths: tuple[int, ...] = (6, 8, 5, 3)) -> list[dict[str, torch.Tensor]]:
    w = _weights(7)
    return [{"w": w(a, b), "b": w(b)} for a, b in itertools.pairwise(widths)]


def mlp_loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for layer in params[:-1]:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return F.mse_loss(x @ params[-1]["w"] + params[-1]["b"], y)


LOSSES = {
    "gpt": (gpt_loss, gpt_params, tokens),
    "llama": (llama_loss, llama_params, activations),
    "conv": (conv_loss, conv_params, images),
}


def sgd_step(loss_fn: Any) -> Any:
    """(params, x, y) -> (new params, gradients, loss)."""

    def step(params: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss, grads = sf.value_and_grad(loss_fn)(params, x, y)
        return sf.tree_map(lambda p, g: p - 0.1 * g, params, grads), grads, loss

    return step


STEPS = {name: sgd_step(loss) for name, (loss, _, _) in LOSSES.items()}


def oracle(loss_fn: Any, params: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """What `sgd_step` returns, by torch.autograd on one device."""
    leaves = sf.tree_map(lambda p: p.clone().requires_grad_(), params)
    loss = loss_fn(leaves, x, y)
    loss.backward()
    grads = sf.tree_map(lambda p: p.grad, leaves)
    return (sf.tree_map(lambda p, g: p - 0.1 * g, params, grads), grads, loss.detach())
