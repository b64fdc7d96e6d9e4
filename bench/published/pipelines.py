"""The gradient of a Llama in stages of a pipeline, with tensor and data parallelism. Layers are
stacked, one scan a stage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.nn.functional as F

import shardfn as sf
from bench.planner.llama import HEAD, Sizes, attended, normed
from shardfn import P

from .llama import gathered, scattered

AXES = ("pp", "dp", "tp")


@attrs.frozen
class Stages:
    """How a Llama was run in stages.

    Args:
        sizes: of the model and the batch of all ranks.
        layers: of the model.
        schedule: of the pipeline.
        dp: ranks of data parallelism. Parameters are gathered once a step.
        tp: ranks of tensor parallelism.
        remat: whether the backward computes layers again.
    """

    sizes: Sizes
    layers: int
    schedule: sf.Schedule
    dp: int
    tp: int
    remat: bool = True

    @property
    def tokens(self) -> float:
        """Tokens of a step for each GPU."""
        return (
            self.sizes.batch * self.sizes.context / (self.schedule.coordinates * self.dp * self.tp)
        )


def layer(x: torch.Tensor, p: dict[str, torch.Tensor]) -> torch.Tensor:
    """A layer under sequence parallelism, as torchtitan runs it."""
    x = x + scattered(attended(gathered(normed(x, p["n1"])), p))
    h = gathered(normed(x, p["n2"]))
    return x + scattered((F.silu(h @ p["wg"]) * (h @ p["wu"])) @ p["wd"])


def loss(params: Any, tokens: torch.Tensor, remat: bool) -> torch.Tensor:
    """The loss of a Llama whose layers are stacked, one stack a stage."""
    one = sf.checkpoint(layer) if remat else layer
    x = scattered(F.embedding(tokens, params["emb"]))
    for stack in params["stacks"]:
        x, _ = sf.scan(lambda carry, p: (one(carry, p), None), x, stack)
    logits = gathered(normed(x, params["n"])) @ params["head"]
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def shapes(stages: int, sizes: Sizes, layers: int) -> tuple[Any, sf.ShapeDtype]:
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


def placements(stages: int, coordinates: int, dp: str | None) -> Any:
    """Parameters on their stages, tensor parallel, and fully sharded over an axis."""
    at = [sf.Stage(s % coordinates, s // coordinates) for s in range(stages)]
    columns, rows = (None, dp, "tp"), (None, "tp", dp)
    one: dict[str, tuple[str | None, ...]] = dict(
        n1=(), n2=(), wq=columns, wk=columns, wv=columns, wo=rows, wg=columns, wu=columns, wd=rows
    )
    stacks = [{name: P(*parts, pp=k) for name, parts in one.items()} for k in at]
    return dict(emb=P("tp", pp=0), stacks=stacks, n=P(pp=at[-1]), head=P(dp, "tp", pp=at[-1]))


def step_by(run: Stages) -> Callable[..., Any]:
    """The gradient by a schedule. Parameters are gathered once a step, as torchtitan gathers them
    with pipelines.
    """
    schedule = run.schedule
    gathered = placements(schedule.stages, schedule.coordinates, None)
    one = functools.partial(loss, remat=run.remat)

    def step(params: Any, tokens: torch.Tensor) -> Any:
        whole = sf.tree_map(sf.constrain, params, gathered)
        return sf.pipelined_grad(one, schedule.microbatches, schedule=schedule)(whole, tokens)

    return step


def lowered(run: Stages) -> Any:
    """The step, lowered for rank 0."""
    stages, coordinates = run.schedule.stages, run.schedule.coordinates
    with sf.fake_world(coordinates * run.dp * run.tp, numerics=False):
        mesh = sf.make_mesh((coordinates, run.dp, run.tp), AXES)
        sharded = placements(stages, coordinates, "dp")
        specs = (sharded, P("dp")), (P(), sharded)
        step = sf.shard(step_by(run), mesh, *specs, planner="greedy")
        return step.lower(*shapes(stages, run.sizes, run.layers))
