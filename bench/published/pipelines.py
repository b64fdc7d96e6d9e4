"""The gradient of a Llama in stages of a pipeline, with tensor and data parallelism. Layers are
stacked, one scan a stage.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.nn.functional as F

import shardfn as sf
from bench.planner.llama import HEAD, Sizes, attended, normed
from shardfn import P

from .llama import as_it_is, gathered, scattered

Tensor = torch.Tensor
Function = Callable[[Tensor], Tensor]
Axes = str | tuple[str, ...] | None
BALANCED, HIDDEN = P("dp", sf.zigzag("cp")), P("dp", sf.zigzag("cp"), "tp")


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
        cp: ranks of each sequence, balanced for causal attention. Its layers have no sequence
            parallelism beside it: they reduce over tp what others scatter and gather.
    """

    sizes: Sizes
    layers: int
    schedule: sf.Schedule
    dp: int
    tp: int
    remat: bool = True
    cp: int = 1

    @property
    def axes(self) -> dict[str, int]:
        """The axes of the mesh, with their sizes."""
        every = dict(pp=self.schedule.coordinates, dp=self.dp, cp=self.cp, tp=self.tp)
        return {name: n for name, n in every.items() if name != "cp" or n > 1}

    @property
    def tokens(self) -> float:
        """Tokens of a step for each GPU."""
        return self.sizes.batch * self.sizes.context / math.prod(self.axes.values())


def balanced(x: Tensor) -> Tensor:
    """Keep a shard of each sequence."""
    return sf.constrain(x, BALANCED)


def by_columns(x: Tensor) -> Tensor:
    """Keep a shard of each sequence, and the columns that a rank computes."""
    return sf.constrain(x, HIDDEN)


def layer(
    x: Tensor, p: dict[str, Tensor], gather: Function, scatter: Function, hidden: Function
) -> Tensor:
    """A layer under sequence parallelism, as torchtitan runs it."""
    x = x + scatter(attended(gather(normed(x, p["n1"])), p))
    h = gather(normed(x, p["n2"]))
    inner = hidden(F.silu(hidden(h @ p["wg"])) * hidden(h @ p["wu"]))
    return x + scatter(inner @ p["wd"])


def loss(params: Any, tokens: Tensor, run: Stages) -> Tensor:
    """The loss of a Llama whose layers are stacked, one stack a stage."""
    shares = (gathered, scattered, as_it_is) if run.cp == 1 else (balanced, balanced, by_columns)
    gather, scatter, hidden = shares
    one = functools.partial(layer, gather=gather, scatter=scatter, hidden=hidden)
    one = sf.checkpoint(one) if run.remat else one
    x = scatter(F.embedding(tokens, params["emb"]))
    for stack in params["stacks"]:
        x, _ = sf.scan(lambda carry, p: (one(carry, p), None), x, stack)
    logits = gather(normed(x, params["n"])) @ params["head"]
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def layers_of_stages(stages: int, layers: int) -> list[int]:
    """The layers of each stage. The first and the last have the fewest, as with torchtitan."""
    fewest, rest = divmod(layers, stages)
    return [fewest + (1 <= s <= rest) for s in range(stages)]


def shapes(stages: int, sizes: Sizes, layers: int) -> tuple[Any, sf.ShapeDtype]:
    """The parameters and the tokens."""
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
    counts = layers_of_stages(stages, layers)
    stacks = [{name: of(n, *shape) for name, shape in one.items()} for n in counts]
    head = of(width, sizes.words)
    params = dict(emb=of(sizes.words, width), stacks=stacks, n=of(width), head=head)
    return params, sf.ShapeDtype((sizes.batch, sizes.context), torch.int64)


def placements(stages: int, coordinates: int, dp: Axes) -> Any:
    """Parameters on their stages, tensor parallel, and fully sharded over an axis."""
    at = [sf.Stage(s % coordinates, s // coordinates) for s in range(stages)]
    columns, rows = (None, dp, "tp"), (None, "tp", dp)
    one: dict[str, tuple[Axes, ...]] = dict(
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
    one = functools.partial(loss, run=run)

    def step(params: Any, tokens: Tensor) -> Any:
        whole = sf.tree_map(sf.constrain, params, gathered)
        return sf.pipelined_grad(one, schedule.microbatches, schedule=schedule)(whole, tokens)

    return step


def lowered(run: Stages) -> Any:
    """The step, lowered for rank 0."""
    stages, axes = run.schedule.stages, run.axes
    with sf.fake_world(math.prod(axes.values()), numerics=False):
        mesh = sf.make_mesh(tuple(axes.values()), tuple(axes))
        sharded = placements(stages, axes["pp"], ("dp", "cp") if run.cp > 1 else "dp")
        specs = (sharded, P("dp") if run.cp == 1 else BALANCED), (P(), sharded)
        ring: dict[str, Any] = {"attention": {"cp": "ring"}} if run.cp > 1 else {}
        step = sf.shard(step_by(run), mesh, *specs, planner="greedy", **ring)
        return step.lower(*shapes(stages, run.sizes, run.layers))
