"""Plans of small functions: traced without Dynamo, and placed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pieces
import torch

from shardfn import _compat
from shardfn.buckets import BucketOptions
from shardfn.capture.printing import program_text
from shardfn.ops.loops import Loop, empty_results
from shardfn.ops.placement import prim_align
from shardfn.partition import Plan, propagate
from shardfn.partition import plan as steps
from shardfn.types import MeshPlacements, Program
from tests.support.stages.graphs import graph_of

LOSS_ARGS = (torch.ones(4, 4), torch.ones(4, 4), torch.ones(6, 4))
REGION = "0"


def program_of(
    fn: Callable[..., Any] | torch.fx.Graph, *args: Any, backward: Sequence[str] = ()
) -> Program:
    """The Program of a function that returns a list of tensors.

    Args:
        fn: the function, or its graph.
        args: its tensors.
        backward: the names of the nodes of the backward.
    """
    graph = fn if isinstance(fn, torch.fx.Graph) else graph_of(fn, *args)
    (output,) = graph.find_nodes(op="output")
    for node in graph.nodes:
        kept = {"val": node.meta.get("val"), "source": f"model.py:{node.name}"}
        node.meta = {**kept, "custom": {"gradients": REGION}}
        node.meta["phase"] = "backward" if node.name in backward else "forward"
    count = len(graph.find_nodes(op="placeholder"))
    return Program(
        name="f",
        graph=torch.fx.GraphModule(torch.nn.Module(), graph),
        in_paths=tuple(f"x{i}" for i in range(count)),
        out_paths=tuple(f"out{i}" for i in range(len(output.args[0]))),
        out_leaves=(),
        out_tree=None,
        show=program_text,
    )


def planned(
    fn: Callable[..., Any] | torch.fx.Graph,
    args: Sequence[Any],
    ins: Sequence[MeshPlacements],
    outs: Sequence[MeshPlacements | None] | None = None,
    sizes: tuple[int, ...] = (2,),
    **options: Any,
) -> Plan:
    """The plan of a function, with the placements of its arguments and results."""
    program = program_of(fn, *args, **options)
    leaving = outs or [None] * len(program.out_paths)
    return propagate(program, pieces.mesh_axes(sizes), ins, leaving)


def told(plan: Plan) -> list[str]:
    """A plan as text: a line for each step."""
    return [_told(step) for step in plan.steps]


def _told(step: steps.Step) -> str:
    before = ", ".join(_marks(slot) for slot in step.read)
    after = ", ".join(_marks(slot) for slot in step.made)
    how = ""
    if isinstance(step, steps.Redistribute):
        how = " by " + ", ".join(move.kind for move in step.moves)
        how += " (implicit)" if step.implicit else ""
    name = type(step).__name__.lower()
    return f"{name} {step.node.name}: {before} -> {after}{how}"


def _marks(slot: steps.Slot) -> str:
    return "|".join(map(str, slot.placements))


def gradient_step(cap: int = 10**6, **options: Any) -> Callable[..., list[Any]]:
    """The loss of two layers with its gradients, each aligned with its parameter as
    bucketed_grad does it.

    Args:
        cap: bytes at which a bucket closes.
        options: of the bucketing.
    """

    def step(v: Any, w: Any, x: Any) -> list[Any]:
        h = x @ v
        y = h @ w
        g = y.cos()
        of_w = h.t() @ g
        of_v = x.t() @ (g @ w.t())
        return [
            y.sin().sum(),
            prim_align(of_w, w, BucketOptions("w", cap, cap, **options).text),
            prim_align(of_v, v, BucketOptions("v", cap, cap, **options).text),
        ]

    return step


def data_parallel(cap: int = 10**6, **options: Any) -> Plan:
    """The plan of `gradient_step` with the rows of x sharded over two ranks."""
    ins: list[MeshPlacements] = [("R",), ("R",), (0,)]
    return planned(
        gradient_step(cap, **options),
        LOSS_ARGS,
        ins,
        [("R",), ("R",), ("R",)],
        backward=["t", "mm_2", "t_1", "t_2", "mm_3", "mm_4"],
    )


def graph_with_loop(loop: Loop, *inputs: torch.Tensor) -> torch.fx.Graph:
    """A graph that runs a loop on its inputs and returns the loop's results."""
    mode = _compat.FakeTensorMode()
    for body in loop.graphs:
        for node in body.nodes:
            node.meta.setdefault("phase", "forward")
            node.meta.setdefault("source", f"model.py:{node.name}")
    graph = torch.fx.Graph()
    holders = [graph.placeholder(f"x{i}") for i in range(len(inputs))]
    for holder, x in zip(holders, inputs, strict=True):
        holder.meta["val"] = mode.from_tensor(x)
    node = graph.call_function(loop, tuple(holders))
    node.meta["val"] = empty_results(loop)
    results = []
    for i, value in enumerate(node.meta["val"]):
        item = graph.call_function(operator.getitem, (node, i))
        item.meta["val"] = value
        results.append(item)
    graph.output(results)
    return graph
