"""A layer of Megatron's GPT under tensor and sequence parallelism, and the closed form of the bytes
that it saves for its backward.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022),
equation 6: 34 s b h / t with what attention computes inside left out, as fused attention does.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import shardfn as sf
from shardfn import P

Tensor = torch.Tensor
# the model of 22 billion parameters of the paper
SEQUENCE, BATCH, WIDTH, HEADS, RANKS = 2048, 4, 6144, 64, 8
SCATTERED = P(None, "tp")
CLOSED_FORM = 34 * SEQUENCE * BATCH * WIDTH / RANKS


@sf.custom_vjp
def gathered(x: Tensor) -> Tensor:
    """Gather sequences; their gradients are scattered."""
    return sf.constrain(x, P())


gathered.defvjp(lambda x: (gathered(x), None), lambda _, g: (sf.constrain(g, SCATTERED),))


def products(x: Tensor, pairs: Any) -> list[Tensor]:
    """Products of gathered sequences with weights."""
    x = gathered(x)
    return [x @ w + b for w, b in pairs]


def layer(x: Tensor, p: dict[str, Any]) -> Tensor:
    """A layer. Sequences are gathered again in the backward."""
    inside = sf.checkpoint(products, policy=sf.checkpoint_policies.dots_saveable)
    normed = lambda x, p: F.layer_norm(x, (WIDTH,), *p)
    outside = lambda x, p: sf.constrain(x @ p[0], SCATTERED) + p[1]
    heads = [
        y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in inside(normed(x, p["n1"]), p["qkv"])
    ]
    y = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
    x = x + F.dropout(outside(y, p["o"]), 0.1)
    (h,) = inside(normed(x, p["n2"]), [p["up"]])
    return x + F.dropout(outside(F.gelu(h), p["down"]), 0.1)


def lowered(layers: int) -> Any:
    """The gradient of some layers, lowered for rank 0."""
    of = lambda *shape: sf.ShapeDtype(shape, torch.bfloat16)
    pair = lambda *shape: [of(*shape), of(shape[-1])]
    norm, column, row = [of(WIDTH)] * 2, [P(None, "tp"), P("tp")], [P("tp"), P()]
    inner = 4 * WIDTH
    one = dict(n1=norm, n2=norm, qkv=[pair(WIDTH, WIDTH)] * 3, o=pair(WIDTH, WIDTH))
    one.update(up=pair(WIDTH, inner), down=pair(inner, WIDTH))
    where = dict(n1=P(), n2=P(), qkv=[column] * 3, o=row, up=column, down=row)

    def loss(params: Any, x: Tensor) -> Tensor:
        for p in params:
            x = layer(x, p)
        return x.float().square().mean()

    with sf.fake_world(RANKS, numerics=False):
        mesh = sf.make_mesh((RANKS,), ("tp",))
        specs = [where] * layers, SCATTERED
        step = sf.shard(sf.value_and_grad(loss), mesh, specs, backend="aten", planner="greedy")
        return step.lower([one] * layers, of(BATCH, SEQUENCE, WIDTH))


def saved_bytes() -> float:
    """The bytes that a layer adds to the peak, without its parameters: half of what two add."""
    few, more = lowered(2).memory, lowered(4).memory
    arguments = more.of("arguments") - few.of("arguments")
    return (more.peak - few.peak - arguments) / 2
