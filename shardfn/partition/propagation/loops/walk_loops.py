"""Propagation through loops and branches. Their graphs are walked like the Program, to a fixed
point of the carry placements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import attrs
import torch

from ....ops.loops import Branch, Loop, Scan, While, loop_of
from ....ops.nodes import args_of
from ....types import PENDING, Marks, MeshAxes
from ... import layout, rules
from ... import plan as steps
from ..values import Value, at_one_placement, is_partial
from ..walk import Walk
from .carries import Inside, LoopBody, natural, plain, settle, shifted, stacked


class Placed(NamedTuple):
    """The placements of a loop and its graphs."""

    ins: list[Marks]
    outs: list[Marks]
    plans: list[steps.Plan]  # of each graph
    varies: list[frozenset[str]]  # the axes over which each result varies
    after: dict[int, Marks]  # the placements of some results right after the loop


def scan(walk: Walk, node: torch.fx.Node) -> None:
    """Place a scan, and its body at the fixed point of the placements of its carries."""
    scan = loop_of(node)
    assert isinstance(scan, Scan)
    values = [walk.values[x] for x in args_of(node)]
    end = scan.consts + scan.carries
    consts = [natural(v, walk.axes) for v in values[: scan.consts]]
    inputs = [
        _without_rows(natural(v, walk.axes), v.fake.shape, walk.axes.sizes) for v in values[end:]
    ]
    init = values[scan.consts : end]
    body = LoopBody(walk, node, scan.graphs[0], init, inputs, values)
    carries, consts, inner, after = settle(body, consts)
    outputs = [
        _reduced_to(natural(output, walk.axes), output, inner, end)
        for output in inner.results()[scan.carries :]
    ]
    placed = Placed(
        ins=[*consts, *carries, *map(stacked, inputs)],
        outs=[*carries, *map(stacked, outputs)],
        plans=[inner.finished([*carries, *outputs])],
        varies=inner.varies(),
        after=after,
    )
    _nest(walk, node, values, placed)


def while_loop(walk: Walk, node: torch.fx.Node) -> None:
    """Place a while loop, with its test and its body."""
    loop = loop_of(node)
    assert isinstance(loop, While)
    values = [walk.values[x] for x in args_of(node)]
    test_graph, body_graph = loop.graphs
    consts = [natural(v, walk.axes) for v in values[: loop.consts]]
    init = values[loop.consts :]
    body = LoopBody(walk, node, body_graph, init, [], values)
    carries, consts, inner, after = settle(body, consts)
    test = Inside(walk, test_graph, [*consts, *carries], values)
    placed = Placed(
        ins=[*consts, *carries],
        outs=carries,
        plans=[test.finished([walk.replicated]), inner.finished(carries)],
        varies=inner.varies(),
        after=after,
    )
    _nest(walk, node, values, placed)


def branch(walk: Walk, node: torch.fx.Node) -> None:
    """Place a cond, and both branches: they leave their results alike."""
    branch = loop_of(node)
    assert isinstance(branch, Branch)
    values = [walk.values[x] for x in args_of(node)]
    *inputs, condition = values
    ins = [natural(v, walk.axes) for v in inputs]
    walks = [Inside(walk, graph, ins, inputs) for graph in branch.graphs]
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
    """Add the step of a loop whose graphs are placed, and the values of its results."""
    ins = tuple(
        walk.redistribute(value, marks, node, implicit=True)
        for value, marks in zip(values, placed.ins, strict=True)
    )
    outs = tuple(
        walk.slot(fake, marks) for fake, marks in zip(node.meta["val"], placed.outs, strict=True)
    )
    walk.steps.append(steps.Nested(node, ins, outs, tuple(placed.plans)))
    results = [
        at_one_placement(slot, varies=varies)
        for slot, varies in zip(outs, placed.varies, strict=True)
    ]
    for k, marks in placed.after.items():
        slot = walk.redistribute(results[k], marks, node, implicit=False)
        results[k] = at_one_placement(slot, varies=placed.varies[k])
    walk.values[node] = results


def _without_rows(marks: Marks, shape: Sequence[int], sizes: Sequence[int]) -> Marks:
    """The placements of one per-step input or output. No axis may shard the step dim."""
    marks = tuple("R" if layout.split(m) and layout.cut_of(m)[0] == 0 else m for m in marks)
    whole = layout.canonical(shape, marks, sizes)
    return tuple(shifted(m, -1) for m in whole or ("R",) * len(marks))


def _reduced_to(marks: Marks, result: Value, inner: Inside, first: int) -> Marks:
    """The placements of a per-step output. A Partial one is reduce-scattered to the sharding of
    a per-step input of the same shape, such as a parameter of fully sharded layers.

    Args:
        marks: the output's placements from propagation.
        result: the output.
        inner: the walk over the body.
        first: the index of the first per-step input.
    """
    shape = tuple(result.fake.shape)
    alike = [s.marks for s in inner.ins[first:] if tuple(s.value.shape) == shape]
    for like in alike:
        reduced = tuple(
            there if m in PENDING and not isinstance(there, str) else m
            for m, there in zip(marks, like, strict=True)
        )
        if reduced != marks and inner.walk.reaches(result, reduced):
            return reduced
    return marks


def _advised(walk: Walk, result: tuple[torch.fx.Node, int], yes: Value, no: Value) -> Marks | None:
    """The placement that a plan of all ops has for a result of a cond, if both branches can place
    it so.
    """
    marks = walk.advice.branches.get(result)
    if marks is None:
        return None
    fits_yes = walk.reaches(yes, marks)
    fits_no = walk.reaches(no, marks)
    return marks if fits_yes and fits_no else None


def _agreed(walk: Walk, yes: Value, no: Value) -> Marks:
    """One placement for a result of two branches. If it is Partial in both, it stays Partial
    and is reduced once, after the cond.
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


def _like_other(constant: Value, other: Value, marks: Marks) -> Marks:
    """The placements of a result that is constant in one branch: those of the other branch, if
    the constant can have them.
    """
    assert constant.fill is not None
    number = constant.fill[1]
    fits = other.fill is None and all(rules.fill_fits(number, m) for m in marks)
    return plain(marks) if fits else _without_partial(marks)


def _leaving(value: Value, axes: MeshAxes) -> Marks:
    """A result of a branch at its placements from propagation, or reduced if the branch also
    has it reduced.
    """
    marks = natural(value, axes)
    if value.fill is not None or not is_partial(marks):
        return marks
    for slot in value.readable("backward"):
        if not is_partial(slot.marks):
            return tuple(layout.without_halo(m) if isinstance(m, tuple) else m for m in slot.marks)
    return marks


def _without_partial(marks: Marks) -> Marks:
    """The placements with Partial reduced."""
    return tuple("R" if m in PENDING else m for m in plain(marks))


def evolved(loop: Loop, graphs: Sequence[torch.fx.Graph], coordinates: int) -> Loop:
    """The loop with the graphs of one rank. They take the rank's coordinates first."""
    return attrs.evolve(loop, graphs=tuple(graphs), consts=loop.consts + coordinates)
