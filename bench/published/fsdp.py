"""The memory that torchtitan reports for a step: what torch's caching allocator has reserved when
FSDP, and torch's pipelining, run the layers of a Llama.

One layer, the embedding and the loss are lowered, with their backwards, in bfloat16. Their tensors
are allocated and released in the order of a step, layer by layer, and those of FSDP beside them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

import shardfn as sf
from shardfn.inspect.memory import live_by_op
from shardfn.partition.lifetimes import owners
from shardfn.partition.planner.op_cost import nbytes
from shardfn.pipelines.actions import Action

from . import llama
from .allocator import Allocator
from .llama import P, Run

STEPS = 3  # the first has no optimizer's state yet, and those after it find other free blocks
GATHERED, SCATTERED = "all-gather", "reduce-scatter"  # the streams of FSDP
Changes = list[tuple[list[Node], list[Node]]]
ALONE = Action("F", 0, 0), Action("BW", 0, 0)  # of a model that is in no stages


@attrs.frozen
class Part:
    """A layer, or what stands before or after the layers, for one microbatch.

    Args:
        parameters: the bytes of each.
        forward: of each op the tensors that it makes, and those that end there.
        backward: the same.
        gradients: the place of the parameter of each.
        output: of the forward. Of the last part: the logits, which the loss reads.
        cotangent: of the input. None for the embedding.
    """

    parameters: list[int]
    forward: list[tuple[list[Node], list[Node]]]
    backward: list[tuple[list[Node], list[Node]]]
    gradients: dict[Node, int]
    output: Node
    cotangent: Node | None


@attrs.frozen
class Parts:
    """The parts of a model: its embedding, one of its equal layers, and its loss."""

    first: Part
    layer: Part
    last: Part


@attrs.frozen
class Stage:
    """What one coordinate of a pipeline has of a model, or all of it.

    Args:
        parts: in the order of their forward.
        groups: the places of the parts whose parameters are gathered together: each layer alone,
            the others at once.
        is_last: whether it has the loss.
    """

    parts: list[Part]
    groups: list[list[int]]
    is_last: bool


def stage_of(parts: Parts, layers: int, *, is_first: bool = True, is_last: bool = True) -> Stage:
    """Build a stage of so many layers."""
    every = [parts.first] * is_first + [parts.layer] * layers + [parts.last] * is_last
    rest = [i for i, x in enumerate(every) if x is not parts.layer]
    alone = [[i] for i, x in enumerate(every) if x is parts.layer]
    return Stage(every, [rest, *alone] if rest else alone, is_last)


def parts_of(run: Run) -> Parts:
    """Lower the parts of a Llama. Tensor parallelism shards them; FSDP does not."""
    run = attrs.evolve(run, dp=1, model=attrs.evolve(run.model, layers=1))
    of = lambda *shape: sf.ShapeDtype(shape, torch.bfloat16)
    params = sf.tree_map(lambda x: of(*x.shape), llama.shapes(run))
    where = llama.placements(run)
    x, tokens = of(run.batch, run.context, run.model.width), (run.batch, run.context)
    words = sf.ShapeDtype(tokens, torch.int64)
    rows = llama.SCATTERED if run.tp > 1 else P("dp")
    ends = ("n", "head")

    def first(p: Any, x: torch.Tensor, g: torch.Tensor) -> Any:
        y, pull = sf.vjp(lambda p: llama.embedded(p, x, run), p)
        return *pull(g), y

    def layer(p: Any, x: torch.Tensor, g: torch.Tensor) -> Any:
        y, pull = sf.vjp(lambda p, x: llama.checkpointed(x, p["layers"][0], run), p, x)
        return *pull(g), y

    def last(p: Any, x: torch.Tensor, words: torch.Tensor) -> Any:
        def loss(p: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = llama.logits(x, p, run)
            return llama.loss_of(logits, words), logits

        return sf.grad(loss, (0, 1), has_aux=True)(p, x)

    with sf.fake_world(run.tp, numerics=False):
        mesh = sf.make_mesh((1, run.tp), ("dp", "tp"))

        def lowered(fn: Any, names: Sequence[str], specs: Any, *args: Any) -> tuple[Graph, int]:
            own, at = ({name: tree[name] for name in names} for tree in (params, where))
            step = sf.shard(fn, mesh, (at, *specs), backend="aten", planner="greedy")
            graph = step.lower(own, *args).program.graph
            return graph, len(tree_leaves(own))

        embedding = part_of(*lowered(first, ["emb"], (P("dp"), rows), words, x), 0, 1)
        one = part_of(*lowered(layer, ["layers"], (rows, rows), x, x), 1, 1)
        return Parts(embedding, one, part_of(*lowered(last, ends, (rows, P("dp")), x, words), 1, 0))


def part_of(graph: Graph, parameters: int, cotangents: int, outputs: int) -> Part:
    """Read a graph of parameters first, and of their gradients, the cotangent of the input and the
    output. Ops of its backward may stand before those of its forward.

    Args:
        graph: of the part.
        parameters: their number.
        cotangents: 1 if there is a cotangent of the input.
        outputs: 1 if the output stays. Otherwise it ends where it is last read.
    """
    (output,) = graph.find_nodes(op="output")
    late = set[Node]()
    for node in [*graph.nodes]:
        is_late = node.meta.get("phase") == "backward" or late.intersection(node.all_input_nodes)
        if node.op == "call_function" and is_late:
            late.add(node)
            output.prepend(node)
    owner = owners(graph)
    results = [owner[x] for x in output.args[0]]
    if not outputs:
        output.args = (output.args[0][:-1],)
    changes = [*_changes(graph)]
    forward, backward = ([x[1:] for x in changes if (x[0] in late) is k] for k in (False, True))
    inputs = [x for x in graph.find_nodes(op="placeholder") if x.meta["val"].is_floating_point()]
    return Part(
        [_nbytes(x) for x in inputs[:parameters]],
        forward,
        backward,
        {x: k for k, x in enumerate(results[:parameters])},
        results[-1],
        results[parameters] if cotangents else None,
    )


def _changes(graph: Graph) -> Iterator[tuple[Node, list[Node], list[Node]]]:
    """Yield each op with the tensors that it makes, and those that nothing reads after it."""
    tensors = lambda alive: {x: None for x in alive if x.op != "placeholder"}
    moments = [(node, tensors(alive)) for node, alive in live_by_op(graph)]
    before: dict[Node, None] = {}
    for (node, now), (_, after) in itertools.pairwise([*moments, moments[-1]]):
        yield node, [x for x in now if x not in before], [x for x in now if x not in after]
        before = now


def _nbytes(x: Node) -> int:
    """Return the bytes of a tensor. Those of a tuple are of the ops that read it."""
    value = x.meta.get("val")
    return nbytes(value) if isinstance(value, torch.Tensor) else 0


class Steps:
    """Training steps of one rank.

    A rank's parameters, and AdamW's state after the first step, are in float32. FSDP gathers those
    of a layer in bfloat16 for its forward, and again for its backward; those of the ends, of the
    last layer, and all of a pipeline stay. What is gathered and what is scattered has a buffer,
    which stays until the next is there. Gradients are made by the scatter, on a stream of its own,
    whose memory activations do not share.

    A pipeline sums gradients of microbatches in float32, and scatters those of all parts after the
    last backward of a stage. It has a buffer for each value that it receives. As torch's of
    December 2024 did, it holds outputs of stages and gradients of their inputs until the end of the
    step, and concatenates what the last stage gave.

    Args:
        stages: those of the rank, by number.
        actions: of the rank, in order.
        dp: the ranks over which parameters are sharded.

    Source: torch/distributed/fsdp/_fully_shard, torch/distributed/pipelining/stage.py before
        pytorch#153383, #159251 and #164329 released what is held.
    """

    def __init__(
        self, stages: Mapping[int, Stage], dp: int, actions: Sequence[Action] = ALONE
    ) -> None:
        self.stages, self.dp, self.actions = stages, dp, actions
        self.is_pipeline = actions is not ALONE
        self.allocator = Allocator()
        self.buffers: dict[str, int] = {GATHERED: 0, SCATTERED: 0}  # the number of the last one
        self.last = {x.stage: x.microbatch for x in actions}

    def reserved(self) -> int:
        """Return the bytes that are reserved after some steps."""
        allocator = self.allocator
        masters = {
            (s, i, k): 2 * n // self.dp
            for s, stage in self.stages.items()
            for i, part in enumerate(stage.parts)
            for k, n in enumerate(part.parameters)
        }
        allocator.allocate_all("parameter", masters)
        if self.is_pipeline:
            allocator.allocate_all("received", dict(map(self._received, self.actions)))
        for step in range(STEPS):
            for x in self.actions:
                self._forward(x) if x.kind == "F" else self._backward(x)
            self._concatenate()
            for name in ("mean", "variance") if not step else ():
                allocator.allocate_all(name, masters)
            allocator.allocate_all("root", masters)  # of AdamW's `foreach`
            for key in masters:
                allocator.release(("root", key))
            for key in masters:
                allocator.release(("gradient", key))
            held = [x for x in allocator.blocks if isinstance(x[0], Node)]
            for key in held:
                allocator.release(key)
        return allocator.reserved

    def _received(self, x: Action) -> tuple[Action, int]:
        """Return the bytes that an action receives."""
        stage = self.stages[x.stage]
        if x.kind == "F":
            end = stage.parts[0].cotangent
        else:
            end = None if stage.is_last else stage.parts[-1].output
        return x, 0 if end is None else _nbytes(end)

    def _forward(self, x: Action) -> None:
        """Run the forward of a microbatch."""
        stage = self.stages[x.stage]
        for i, part in enumerate(stage.parts):
            group = _group_of(stage, i)
            self._gather(x.stage, group)
            self._run(part, part.forward, (x.stage, i, x.microbatch))
            if not self.is_pipeline and len(group) == 1 and group != stage.groups[-1]:
                self._release("weight", x.stage, group)
        if not self.is_pipeline:  # the script has the logits until it has the loss
            end = len(stage.parts) - 1
            self.allocator.release((stage.parts[end].output, (x.stage, end, x.microbatch)))

    def _backward(self, x: Action) -> None:
        """Run the backward of a microbatch."""
        stage, allocator = self.stages[x.stage], self.allocator
        parts = dict(enumerate(stage.parts))
        for i, part in reversed(parts.items()):
            group = _group_of(stage, i)
            self._gather(x.stage, group)
            if i - 1 in parts:
                self._gather(x.stage, _group_of(stage, i - 1))  # ahead, during this backward
            self._run(part, part.backward, (x.stage, i, x.microbatch))
            self._sum(part, (x.stage, i, x.microbatch))
            is_held = self.is_pipeline and i + 1 not in parts
            self._end(
                (x.stage, i, x.microbatch), {part.cotangent, part.output if is_held else None}
            )
            if i - 1 in parts:
                allocator.release((parts[i - 1].output, (x.stage, i - 1, x.microbatch)))
            if i + 1 in parts:
                allocator.release((parts[i + 1].cotangent, (x.stage, i + 1, x.microbatch)))
            if not self.is_pipeline and i == group[0]:
                self._scatter(x.stage, group)
        if not self.is_pipeline:
            allocator.release((parts[0].cotangent, (x.stage, 0, x.microbatch)))
        elif x.microbatch == self.last[x.stage]:
            for group in stage.groups:
                self._scatter(x.stage, group)

    def _run(self, part: Part, changes: Changes, run: tuple[int, int, int]) -> None:
        """Run the ops of a part."""
        for made, dead in changes:
            for x in made:
                self.allocator.allocate((x, run), _nbytes(x))
            for x in dead:
                if x is not part.output:  # logits end later than their last reader
                    self.allocator.release((x, run))

    def _sum(self, part: Part, run: tuple[int, int, int]) -> None:
        """Add the gradients of a part to the sums, in float32 if there are microbatches."""
        for x, k in part.gradients.items():
            key = "sum", (*run[:2], k)
            if key not in self.allocator.blocks:
                self.allocator.allocate(key, _nbytes(x) * (2 if self.is_pipeline else 1))
            self.allocator.release((x, run))

    def _concatenate(self) -> None:
        """Concatenate what the last stage gave, which nothing reads."""
        for s, stage in self.stages.items():
            if self.is_pipeline and stage.is_last:
                size = _nbytes(stage.parts[-1].output) * (1 + self.last[s])
                self.allocator.allocate(("logits",), size)
                self.allocator.release(("logits",))

    def _end(self, run: tuple[int, int, int], stays: set[Node | None]) -> None:
        """Release the tensors of a part for a microbatch."""
        for key in [*self.allocator.blocks]:
            if isinstance(key[0], Node) and key[1] == run and key[0] not in stays:
                self.allocator.release(key)

    def _gather(self, s: int, group: list[int]) -> None:
        """Gather the parameters of some parts, if they are not gathered."""
        weights = self._sizes(s, group)
        if not any(("weight", key) in self.allocator.blocks for key in weights):
            self._buffer(GATHERED, sum(weights.values()), GATHERED)
            self.allocator.allocate_all("weight", weights)

    def _scatter(self, s: int, group: list[int]) -> None:
        """Scatter the gradients of some parts, which gives up their parameters."""
        weights = self._sizes(s, group)
        self._buffer(SCATTERED, 2 * sum(weights.values()))
        for name in ("sum", "weight"):
            self._release(name, s, group)
        shards = {key: 2 * n // self.dp for key, n in weights.items()}
        self.allocator.allocate_all("gradient", shards, SCATTERED)

    def _buffer(self, kind: str, size: int, stream: str = "") -> None:
        """Allocate what is gathered or scattered, and release the one before."""
        number = self.buffers[kind] = self.buffers[kind] + 1
        self.allocator.allocate((kind, number), size, stream)
        self.allocator.release((kind, number - 1))

    def _release(self, name: str, s: int, group: list[int]) -> None:
        for key in self._sizes(s, group):
            self.allocator.release((name, key))

    def _sizes(self, s: int, group: list[int]) -> dict[tuple[int, int, int], int]:
        """Return the bytes of the parameters of some parts."""
        parts = self.stages[s].parts
        return {(s, i, k): n for i in group for k, n in enumerate(parts[i].parameters)}


def _group_of(stage: Stage, i: int) -> list[int]:
    return next(group for group in stage.groups if i in group)
