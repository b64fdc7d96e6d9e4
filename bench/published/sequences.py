"""Llama 3 8B with long sequences, fully sharded and with its sequence sharded.

The recomputation that torchtitan calls full keeps the inputs of layers alone, and the loss is
computed at once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import shardfn as sf
from bench.planner.llama import Sizes, layer, normed
from shardfn import P

from .llama import logits_of

LAYERS, RANKS = 32, 8
AXES = ("dp", "cp")
CONTEXTS = {1: 32768, 2: 65536, 4: 131072, 8: 262144}  # ranks of the sequence -> its tokens


def loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of a Llama whose layers are computed again in the backward."""
    one = sf.checkpoint(layer)
    x = F.embedding(tokens, params["emb"])
    x, _ = sf.scan(lambda carry, p: (one(carry, p), None), x, params["layers"])
    logits = logits_of(normed(x, params["n"]), params["head"])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def shapes(sizes: Sizes) -> Any:
    """The parameters, layers stacked."""
    of = lambda *shape: sf.ShapeDtype(shape, sizes.dtype)
    width, keys, inner = sizes.width, sizes.groups * 128, sizes.inner
    one = dict(
        n1=(width,),
        n2=(width,),
        wq=(width, width),
        wk=(width, keys),
        wv=(width, keys),
        wo=(width, width),
        wg=(width, inner),
        wu=(width, inner),
        wd=(inner, width),
    )
    layers = {name: of(LAYERS, *shape) for name, shape in one.items()}
    return dict(emb=of(sizes.words, width), layers=layers, n=of(width), head=of(width, sizes.words))


def lowered_by(cp: int) -> tuple[Any, int]:
    """The gradient, lowered for rank 0 of 8, and the tokens of a step. Attention sends keys around
    a ring, as torch computes it block by block.
    """
    context = CONTEXTS[cp]
    sizes = Sizes(width=4096, inner=14336, batch=RANKS // cp, context=context)
    params = shapes(sizes)
    tokens = sf.ShapeDtype((sizes.batch, context), torch.int64)
    with sf.fake_world(RANKS, numerics=False):
        mesh = sf.make_mesh((RANKS // cp, cp), AXES)
        first = {name: P(None, AXES) for name in params["layers"]}  # behind the dim of layers
        where = dict(emb=P(AXES), layers=first, n=P(AXES), head=P(AXES))
        ring: dict[str, Any] = {"attention": {"cp": "ring"}} if cp > 1 else {}
        step = sf.shard(
            sf.bucketed_grad(loss),
            mesh,
            (where, P("dp", sf.zigzag("cp"))),
            backend="inductor",
            planner="greedy",
            **ring,
        )
        return step.lower(params, tokens), sizes.batch * context
