"""The demo's training step in JAX: the same model, optimizer and first batch."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def normed(h: Any, ln: Any) -> Any:
    """Layer norm over the features."""
    mean = h.mean(-1, keepdims=True)
    variance = ((h - mean) ** 2).mean(-1, keepdims=True)
    return (h - mean) / jnp.sqrt(variance + 1e-5) * ln["w"] + ln["b"]


def attention(layer: Any, h: Any, heads: int) -> Any:
    """Causal self-attention."""
    shape = (*h.shape[:2], heads, -1)
    q, k, v = ((h @ layer[name]).reshape(shape) for name in ("q", "k", "v"))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return mixed.reshape(h.shape) @ layer["o"]


def loss_fn(params: Any, x: Any, y: Any, heads: int) -> Any:
    """Mean cross-entropy of the next token."""
    h = params["tok"][x] + params["pos"][: x.shape[1]]
    for layer in params["layers"]:
        h = h + attention(layer, normed(h, layer["ln1"]), heads)
        hidden = jax.nn.gelu(normed(h, layer["ln2"]) @ layer["up"], approximate=False)
        h = h + hidden @ layer["down"]
    z = normed(h, params["ln"]) @ params["head"]
    return -jnp.take_along_axis(jax.nn.log_softmax(z), y[..., None], -1).mean()


def updated(params: Any, grads: Any, state: Any, lr: float) -> Any:
    """One step of AdamW, as the demo's."""
    count = state["step"] + 1
    m = jax.tree.map(lambda a, g: 0.9 * a + 0.1 * g, state["m"], grads)
    v = jax.tree.map(lambda a, g: 0.95 * a + 0.05 * g * g, state["v"], grads)

    def moved(p: Any, a: Any, b: Any) -> Any:
        a, b = a / (1 - 0.9**count), b / (1 - 0.95**count)
        return p * (1 - lr * 0.01) - lr * a / (jnp.sqrt(b) + 1e-8)

    return jax.tree.map(moved, params, m, v), {"step": count, "m": m, "v": v}


@functools.partial(jax.jit, static_argnums=5)
def step(params: Any, state: Any, x: Any, y: Any, lr: float, heads: int) -> Any:
    """One training step."""
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y, heads)
    params, state = updated(params, grads, state, lr)
    return params, state, loss


def first_loss(folder: str) -> float:
    """The first loss, from the arguments that another process has written."""
    said = json.loads(Path(folder, "tree.json").read_text())
    leaves = np.load(Path(folder, "leaves.npz"))
    args = jax.tree.map(lambda i: jnp.asarray(leaves[f"arr_{i}"]), said["arguments"])
    return float(step(*args, said["lr"], said["heads"])[2])
