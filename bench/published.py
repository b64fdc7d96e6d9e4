"""What others have measured and published, beside what `lowered.time` says of the same program,
`make bench-published`: Llama 3 405B on 512 H100, by two schedules of a pipeline.

Source: torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: FSDP 8 x TP 8 x PP 8, 8,192 tokens,
local batch 32, full recompute, float8.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

import shardfn as sf
from bench.planner.llama import HEAD, Sizes, attended, normed
from shardfn import P

AXES, COORDINATES, LAYERS = ("pp", "dp", "tp"), 8, 126
LLAMA = Sizes(width=16384, inner=53248, batch=8 * 32, context=8192)
REPLICATED, SEQUENCE = P("dp"), P("dp", "tp")  # of activations
# tokens a second and GPU, and GiB at the peak, as published; microbatches by the default at that
# commit, the number of stages
PUBLISHED = {"1f1b": "100, 82.5 GiB", "interleaved": "128, 72.7 GiB"}
SCHEDULES = {
    "1f1b": sf.schedules.one_f_one_b(COORDINATES, 8),
    "interleaved": sf.schedules.interleaved(COORDINATES, 16, chunks=2),
    "interleaved, 8 microbatches": sf.schedules.interleaved(COORDINATES, 8, chunks=2),
}


def layer(x: torch.Tensor, p: dict[str, torch.Tensor]) -> torch.Tensor:
    """A layer under sequence parallelism, as torchtitan runs it."""
    h = sf.constrain(normed(x, p["n1"]), REPLICATED)
    x = x + sf.constrain(attended(h, p), SEQUENCE)
    h = sf.constrain(normed(x, p["n2"]), REPLICATED)
    y = (F.silu(h @ p["wg"]) * (h @ p["wu"])) @ p["wd"]
    return x + sf.constrain(y, SEQUENCE)


def loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of a Llama whose layers are stacked, one stack a stage."""
    one = sf.checkpoint(layer)
    x = sf.constrain(F.embedding(tokens, params["emb"]), SEQUENCE)
    for stack in params["stacks"]:
        x, _ = sf.scan(lambda carry, p: (one(carry, p), None), x, stack)
    h = sf.constrain(normed(x, params["n"]), REPLICATED)
    logits = h @ params["head"]
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def shapes(stages: int, sizes: Sizes = LLAMA, layers: int = LAYERS) -> tuple[Any, sf.ShapeDtype]:
    """The parameters and the tokens. The first stage and the last have the fewest layers."""
    of = lambda *shape: sf.ShapeDtype(shape, sizes.dtype)
    width, keys = sizes.width, sizes.groups * HEAD
    one = dict(
        n1=(width,),
        n2=(width,),
        wq=(width, width),
        wk=(width, keys),
        wv=(width, keys),
        wo=(width, width),
        wg=(width, sizes.inner),
        wu=(width, sizes.inner),
        wd=(sizes.inner, width),
    )
    fewest, rest = divmod(layers, stages)
    counts = [fewest + (1 <= s <= rest) for s in range(stages)]
    stacks = [{name: of(n, *shape) for name, shape in one.items()} for n in counts]
    head = of(width, sizes.words)
    params = dict(emb=of(sizes.words, width), stacks=stacks, n=of(width), head=head)
    return params, sf.ShapeDtype((sizes.batch, sizes.context), torch.int64)


def placements(stages: int, dp: str | None) -> Any:
    """Parameters on their stages, tensor parallel, and fully sharded over an axis."""
    at = [sf.Stage(s % COORDINATES, s // COORDINATES) for s in range(stages)]
    columns, rows = (None, dp, "tp"), (None, "tp", dp)
    one: dict[str, tuple[str | None, ...]] = dict(
        n1=(), n2=(), wq=columns, wk=columns, wv=columns, wo=rows, wg=columns, wu=columns, wd=rows
    )
    stacks = [{name: P(*parts, pp=k) for name, parts in one.items()} for k in at]
    return dict(emb=P("tp", pp=0), stacks=stacks, n=P(pp=at[-1]), head=P(dp, "tp", pp=at[-1]))


def step_by(schedule: sf.Schedule) -> Callable[..., Any]:
    """The gradient by a schedule. Parameters are gathered once a step, as torchtitan gathers them
    with pipelines.
    """
    gathered = placements(schedule.stages, None)

    def step(params: Any, tokens: torch.Tensor) -> Any:
        whole = sf.tree_map(sf.constrain, params, gathered)
        return sf.pipelined_grad(loss, schedule.microbatches, schedule=schedule)(whole, tokens)

    return step


def lowered_by(schedule: sf.Schedule, sizes: Sizes = LLAMA, layers: int = LAYERS) -> Any:
    """The step, lowered for rank 0 of 512."""
    with sf.fake_world(8 * 8 * COORDINATES, numerics=False):
        mesh = sf.make_mesh((COORDINATES, 8, 8), AXES)
        sharded = placements(schedule.stages, "dp")
        specs = (sharded, P("dp")), (P(), sharded)
        run = sf.shard(step_by(schedule), mesh, *specs, planner="greedy")
        return run.lower(*shapes(schedule.stages, sizes, layers))


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table of tokens a second and of memory."""
    parser = argparse.ArgumentParser(prog="python -m bench.published")
    parser.add_argument("--only", choices=SCHEDULES)
    args = parser.parse_args(argv)
    ranks, tokens = 8 * 8 * COORDINATES, LLAMA.batch * LLAMA.context
    print(
        "Llama 3 405B, 512 H100, FSDP 8 x TP 8 x PP 8: tokens a second and GPU, peak of memory; "
        "here of the gradient alone, on rank 0, bfloat16"
    )
    print("| schedule | microbatches | published | here | s a step | idle | lowered in |")
    print("|---|---|---|---|---|---|---|")
    for name, schedule in SCHEDULES.items():
        if args.only not in (None, name):
            continue
        start = time.perf_counter()
        lowered = lowered_by(schedule)
        predicted, peak = lowered.time("H100"), lowered.memory.peak / 2**30
        took = time.perf_counter() - start
        rate, idle = tokens / ranks / predicted.total, predicted.bubble / predicted.total
        print(
            f"| {name} | {schedule.microbatches} | {PUBLISHED.get(name, 'none')} "
            f"| {rate:.1f}, {peak:.1f} GiB | {predicted.total:.2f} | {idle:.1%} | {took:.0f} s |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
