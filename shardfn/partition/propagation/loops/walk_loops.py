"""Propagation through loops and branches. Their graphs are walked like the Program, to a fixed
point of the carry placements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import attrs
import torch

from ....ops.loops import Branch, Loop, Scan, While, loop_of
from ....ops.nodes import args_of
from ....types import PARTIAL_KINDS, MeshAxes, MeshPlacements
from ... import layout, rules
from ... import plan as steps
from ..values import Value, is_partial, value_of_slot
from ..walk import Walk
from .carries import BodyWalk, LoopBody, plain, propagated, shifted, stable_placements, stacked


class Placed(NamedTuple):
    """The placements of a loop's inputs and results, and the plans of its bodies."""

    ins: list[MeshPlacements]
    outs: list[MeshPlacements]
    plans: list[steps.Plan]  # of each graph
    varies: list[frozenset[str]]  # the axes over which each result varies
    after: dict[int, MeshPlacements]  # the placements of some results right after the loop


def scan(walk: Walk, node: torch.fx.Node) -> None:
    """Place a scan: its body is walked until the placements of its carries are stable. A loop
    around it walks it again, mostly with the same inputs.
    """
    values = [walk.values[x] for x in args_of(node)]
    key = node, *[_decisive(value, walk.axes) for value in values]
    placed = walk.placed_scans.get(key)
    if placed is None:
        placed = walk.placed_scans[key] = _scan_placed(walk, node, values)
    _nest(walk, node, values, placed)


def _decisive(value: Value, axes: MeshAxes) -> tuple[Any, ...]:
    """What the placement of a scan depends on of an input, besides what its node says."""
    return propagated(value, axes), value.varies, value.early


def _scan_placed(walk: Walk, node: torch.fx.Node, values: list[Value]) -> Placed:
    scan = loop_of(node)
    assert isinstance(scan, Scan)
    end = scan.consts + scan.carries
    consts = [propagated(v, walk.axes) for v in values[: scan.consts]]
    inputs = [
        _without_rows(propagated(v, walk.axes), v.fake.shape, walk.axes.sizes) for v in values[end:]
    ]
    init = values[scan.consts : end]
    body = LoopBody(walk, node, scan.graphs[0], init, inputs, values)
    carries, consts, inner, after = stable_placements(body, consts)
    outputs = [
        _reduced_to(propagated(output, walk.axes), output, inner, end)
        for output in inner.results()[scan.carries :]
    ]
    return Placed(
        ins=[*consts, *carries, *map(stacked, inputs)],
        outs=[*carries, *map(stacked, outputs)],
        plans=[inner.finished([*carries, *outputs])],
        varies=inner.varies(),
        after=after,
    )


def while_loop(walk: Walk, node: torch.fx.Node) -> None:
    """Place a while loop: its test, and its body with stable carry placements."""
    loop = loop_of(node)
    assert isinstance(loop, While)
    values = [walk.values[x] for x in args_of(node)]
    test_graph, body_graph = loop.graphs
    consts = [propagated(v, walk.axes) for v in values[: loop.consts]]
    init = values[loop.consts :]
    body = LoopBody(walk, node, body_graph, init, [], values)
    carries, consts, inner, after = stable_placements(body, consts)
    test = BodyWalk(walk, test_graph, [*consts, *carries], values)
    placed = Placed(
        ins=[*consts, *carries],
        outs=carries,
        plans=[test.finished([walk.replicated]), inner.finished(carries)],
        varies=inner.varies(),
        after=after,
    )
    _nest(walk, node, values, placed)


def branch(walk: Walk, node: torch.fx.Node) -> None:
    """Place a cond: both branches return their results at equal placements."""
    branch = loop_of(node)
    assert isinstance(branch, Branch)
    values = [walk.values[x] for x in args_of(node)]
    *inputs, condition = values
    ins = [propagated(v, walk.axes) for v in inputs]
    walks = [BodyWalk(walk, graph, ins, inputs) for graph in branch.graphs]
    pairs = zip(*(w.results() for w in walks), strict=True)
    outs = [
        _advised(walk, (node, k), *pair) or _agreed(walk, *pair) for k, pair in enumerate(pairs)
    ]
    varies = zip(*(w.varies() for w in walks), strict=True)
    placed = Placed(
        ins=[*ins, walk.replicated],
        outs=outs,
        plans=[w.finished(outs) for w in walks],
        varies=[first | second | condition.varies for first, second in varies],
        after={},
    )
    _nest(walk, node, values, placed)


def _nest(walk: Walk, node: torch.fx.Node, values: Sequence[Value], placed: Placed) -> None:
    """Add the Nested step of a loop whose bodies are placed, and the values of its results."""
    ins = tuple(
        walk.redistribute(value, placements, node, implicit=True)
        for value, placements in zip(values, placed.ins, strict=True)
    )
    outs = tuple(
        walk.slot(fake, placements)
        for fake, placements in zip(node.meta["val"], placed.outs, strict=True)
    )
    walk.steps.append(steps.Nested(node, ins, outs, tuple(placed.plans)))
    results = [
        value_of_slot(slot, varies=varies) for slot, varies in zip(outs, placed.varies, strict=True)
    ]
    for k, placements in placed.after.items():
        slot = walk.redistribute(results[k], placements, node, implicit=False)
        results[k] = value_of_slot(slot, varies=placed.varies[k])
    walk.values[node] = results


def _without_rows(
    placements: MeshPlacements, shape: Sequence[int], sizes: Sequence[int]
) -> MeshPlacements:
    """Return the placements of one slice of a stacked input, whose step dim is not sharded."""
    placements = tuple(
        "R" if layout.split(m) and layout.dim_and_unit(m)[0] == 0 else m for m in placements
    )
    whole = layout.canonical(shape, placements, sizes)
    return tuple(shifted(m, -1) for m in whole or ("R",) * len(placements))


def _reduced_to(
    placements: MeshPlacements, result: Value, inner: BodyWalk, first: int
) -> MeshPlacements:
    """Reduce-scatter a Partial per-step output to the shards of a per-step input of its shape.

    Args:
        placements: the output's placements from propagation.
        result: the output.
        inner: the walk over the body.
        first: the index of the first per-step input.
    """
    shape = tuple(result.fake.shape)
    alike = [s.placements for s in inner.ins[first:] if tuple(s.value.shape) == shape]
    for like in alike:
        reduced = tuple(
            there if m in PARTIAL_KINDS and not isinstance(there, str) else m
            for m, there in zip(placements, like, strict=True)
        )
        if reduced != placements and inner.walk.reaches(result, reduced):
            return reduced
    return placements


def _advised(
    walk: Walk, result: tuple[torch.fx.Node, int], yes: Value, no: Value
) -> MeshPlacements | None:
    """Return the planner's placement of a cond's result, if both branches can return it so."""
    placements = walk.advice.branches.get(result)
    if placements is None:
        return None
    fits_yes = walk.reaches(yes, placements)
    fits_no = walk.reaches(no, placements)
    return placements if fits_yes and fits_no else None


def _agreed(walk: Walk, yes: Value, no: Value) -> MeshPlacements:
    """Choose one placement for the results of two branches; what is Partial in both stays
    Partial.
    """
    first = _leaving(yes, walk.axes)
    second = _leaving(no, walk.axes)
    if yes.fill is not None:
        return _like_other(yes, no, second)
    if no.fill is not None:
        return _like_other(no, yes, first)
    if first == second:
        return first
    if plain(first) == plain(second):
        return plain(first)
    both = tuple(a if a == b else "R" for a, b in zip(first, second, strict=True))
    return _without_partial(both)


def _like_other(constant: Value, other: Value, placements: MeshPlacements) -> MeshPlacements:
    """Choose the placement of a result that is constant in one branch: that of the other branch."""
    assert constant.fill is not None
    number = constant.fill[1]
    fits = other.fill is None and all(rules.fill_fits(number, m) for m in placements)
    return plain(placements) if fits else _without_partial(placements)


def _leaving(value: Value, axes: MeshAxes) -> MeshPlacements:
    """Return the placements of a branch's result, reduced if the branch reduces it anyway."""
    placements = propagated(value, axes)
    if value.fill is not None or not is_partial(placements):
        return placements
    for slot in value.readable("backward"):
        if not is_partial(slot.placements):
            return tuple(
                layout.without_halo(m) if isinstance(m, tuple) else m for m in slot.placements
            )
    return placements


def _without_partial(placements: MeshPlacements) -> MeshPlacements:
    """Replace Partial by replicated."""
    return tuple("R" if m in PARTIAL_KINDS else m for m in plain(placements))


def with_graphs(loop: Loop, graphs: Sequence[torch.fx.Graph], coordinates: int) -> Loop:
    """Return the loop with the graphs of one rank, which take its coordinates first."""
    return attrs.evolve(loop, graphs=tuple(graphs), consts=loop.consts + coordinates)
