"""Long sequences as others have measured them: Llama 3 8B on 8 H100, fully sharded and with its
sequence sharded, beside what `lowered.time` and `lowered.memory` say. Part of
`make bench-published`.

Source: torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: FSDP x CP, one sequence for each
group of the sequence's ranks, full recompute, float8. The recomputation that torchtitan calls full
keeps the inputs of layers alone, and the loss is computed at once.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.nn.functional as F

import shardfn as sf
from bench.planner.llama import Sizes, layer, normed
from shardfn import P

LAYERS, RANKS = 32, 8
AXES = ("dp", "cp")
ROOM = 80 * 2**30
# ranks of the sequence -> its tokens; tokens a second and GPU as published, and GiB at the peak
PUBLISHED = {1: (32768, 3890), 2: (65536, 2540), 4: (131072, 1071), 8: (262144, 548)}


def loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of a Llama whose layers are computed again in the backward."""
    one = sf.checkpoint(layer)
    x = F.embedding(tokens, params["emb"])
    x, _ = sf.scan(lambda carry, p: (one(carry, p), None), x, params["layers"])
    logits = normed(x, params["n"]) @ params["head"]
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


def lowered_by(cp: int, attention: str | None = None) -> tuple[Any, int]:
    """The gradient, lowered for rank 0 of 8, and the tokens of a step."""
    context, _ = PUBLISHED[cp]
    sizes = Sizes(width=4096, inner=14336, batch=RANKS // cp, context=context)
    params = shapes(sizes)
    tokens = sf.ShapeDtype((sizes.batch, context), torch.int64)
    with sf.fake_world(RANKS, numerics=False):
        mesh = sf.make_mesh((RANKS // cp, cp), AXES)
        first = {name: P(None, AXES) for name in params["layers"]}  # behind the dim of layers
        where = dict(emb=P(AXES), layers=first, n=P(AXES), head=P(AXES))
        options = {} if attention is None else {"attention": {"cp": attention}}
        step = sf.shard(
            sf.bucketed_grad(loss),
            mesh,
            (where, P("dp", sf.zigzag("cp"))),
            backend="aten",
            **options,
        )
        return step.lower(params, tokens), sizes.batch * context


def main() -> int:
    """Print a table of tokens a second and of memory."""
    print(
        "Llama 3 8B, 8 H100, FSDP x CP, one sequence for each group: tokens a second and GPU, peak "
        "of memory; here of the gradient alone, on rank 0, bfloat16"
    )
    print("| FSDP x CP | tokens of a sequence | published | here | peak | lowered in |")
    print("|---|---|---|---|---|---|")
    rates: list[float] = []
    peaks: list[int] = []
    for cp, (context, rate) in PUBLISHED.items():
        start = time.perf_counter()
        lowered, tokens = lowered_by(cp)
        seconds, peak = lowered.time("H100").total, lowered.memory.peak
        took = time.perf_counter() - start
        rates.append(tokens / RANKS / seconds)
        peaks.append(peak)
        print(
            f"| {RANKS // cp} x {cp} | {context:,} | {rate:,} | {rates[-1]:,.0f} "
            f"| {peak / 2**30:.1f} GiB | {took:.0f} s |",
            flush=True,
        )
    is_ordered = rates == sorted(rates, reverse=True)
    return 0 if is_ordered and max(peaks) <= ROOM else 1


if __name__ == "__main__":
    sys.exit(main())
