"""Local graphs for tests of passes: made of redistributions, and shown as a program prints them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import pieces
import torch

from shardfn import _compat, schedule
from shardfn.partition import Plan, emit
from shardfn.partition import plan as steps
from shardfn.partition.collective_bytes import collectives_in
from shardfn.partition.printing import local_text
from shardfn.partition.redistribute import route
from shardfn.types import LocalProgram, MeshPlacements

SIZES = (2, 3)
AXES = pieces.mesh_axes(SIZES)


def text(graph: torch.fx.Graph, axes: Any = AXES) -> str:
    """The ops of a local graph, as a printed program has them."""
    (output,) = graph.find_nodes(op="output")
    count = len(graph.find_nodes(op="placeholder")) - len(axes.names)
    program = LocalProgram(
        name="f",
        axes=axes,
        graph=graph,
        unordered=graph,
        in_paths=tuple(f"x{i}" for i in range(count)),
        in_placements=(),
        out_placements=((),) * len(output.args[0]),
        out_paths=tuple(f"out{i}" for i in range(len(output.args[0]))),
        elided=(),
        show=local_text,
        records=collectives_in,
    )
    before, after = str(program).split("\n  return")
    ops = [line.split("  #")[0] for line in before.splitlines() if line.startswith("  %")]
    returned = ", ".join(re.findall(r"out\d+ = (%[\w.]+):", after))
    return "\n".join([" ".join(line.split()) for line in ops] + [f"return {returned}"])


def redistributed(
    src: MeshPlacements,
    targets: Sequence[tuple[MeshPlacements, str]],
    sizes: tuple[int, ...] = SIZES,
) -> torch.fx.Graph:
    """One value of 6 elements brought from one placement to others, each on behalf of a phase."""
    axes, fake = (
        pieces.mesh_axes(sizes),
        _compat.FakeTensorMode().from_tensor(torch.zeros(6, dtype=torch.float64)),
    )
    source, made = steps.Slot(0, fake, src), []
    for k, (dst, phase) in enumerate(targets):
        node = torch.fx.Graph().placeholder(f"user{k}")
        node.meta.update(phase=phase, source=f"model.py:{k + 1}")
        found = route((6,), 8, src, dst, axes)
        assert found is not None
        made.append(steps.Redistribute(node, source, steps.Slot(k + 1, fake, dst), found[1], False))
    plan = Plan(
        axes=axes, steps=tuple(made), ins=(source,), outs=tuple(step.target for step in made)
    )
    return emit(plan, (0,) * len(sizes), tuple(f"group:{a}" for a in axes.names), "cpu")


def nothing_agreed(axes: Any = AXES) -> schedule.SchedulePlan:
    """The schedule of a program that sends nothing: what these passes read of it is the mesh."""
    return schedule.plan_schedule(Plan(axes=axes, steps=(), ins=(), outs=()), "f")


def add(graph: torch.fx.Graph, target: Any, *args: Any) -> torch.fx.Node:
    """One more op before the output, with its value."""
    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(output):
        node = graph.call_function(target, args)
    node.meta["val"] = target(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]))
    return node


def returns(graph: torch.fx.Graph, *nodes: torch.fx.Node) -> None:
    graph.find_nodes(op="output")[0].args = (list(nodes),)


def same_text(got: str, wanted: str) -> None:
    assert got == textwrap.dedent(wanted).strip()


def before_and_after(
    run: Callable[..., Any], graph: torch.fx.Graph, axes: Any = AXES
) -> tuple[str, str]:
    """The text before and after a pass, which leaves the graph that it is given alone."""
    before, metas = (text(graph, axes), [(n.name, dict(n.meta)) for n in graph.nodes])
    schedule.check(graph, axes)
    after = run(graph, nothing_agreed(axes))
    schedule.check(after, axes)
    assert text(graph, axes) == before
    assert [(n.name, n.meta) for n in graph.nodes] == metas
    assert text(run(after, nothing_agreed(axes)), axes) == text(after, axes), "once is enough"
    return before, text(after, axes)
