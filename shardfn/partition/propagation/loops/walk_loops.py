"""Propagation through loops and branches. Their graphs are walked like the Program, to a fixed
point of the carry placements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import attrs
import torch

from ....ops.loops import Branch, Loop, Scan, While, loop_of
from ....ops.nodes import args_of
from ....types import PENDING, Marks, MeshAxes
from ... import layout, rules
from ... import plan as steps
from ...protocols import Walk
from ..values import Value, is_partial
from .carries import Inside, LoopBody, natural, plain, settle, shifted, stacked


class Placed(NamedTuple):
    """The placements of a loop and its graphs."""

    ins: list[Marks]
    outs: list[Marks]
    plans: list[steps.Plan]  # of each graph
    varies: list[frozenset[str]]  # the axes over which each result varies
    after: dict[int, Marks]  # the placements of some results right after the loop


def nest(walk: Walk, node: torch.fx.Node) -> None:
    """Place a loop and its graphs.

    Args:
        walk: the walk over the graph that has the loop.
        node: the node of the loop.

    Raises:
        PlacementError: a carry is constrained to a placement that differs from its initial one.
    """
    loop = loop_of(node)
    values = [walk.values[x] for x in args_of(node)]
    placed = PLACE[type(loop)](walk, node, loop, values)
    ins = tuple(
        walk.redistribute(value, marks, node, implicit=True)
        for value, marks in zip(values, placed.ins, strict=True)
    )
    outs = tuple(
        walk.slot(fake, marks) for fake, marks in zip(node.meta["val"], placed.outs, strict=True)
    )
    walk.steps.append(steps.Nested(node, ins, outs, tuple(placed.plans)))
    results = [walk.valued(slot, varies) for slot, varies in zip(outs, placed.varies, strict=True)]
    for k, marks in placed.after.items():
        slot = walk.redistribute(results[k], marks, node, implicit=False)
        results[k] = walk.valued(slot, placed.varies[k])
    walk.values[node] = results


def _scan(walk: Walk, node: torch.fx.Node, scan: Scan, values: list[Value]) -> Placed:
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
    return Placed(
        ins=[*consts, *carries, *map(stacked, inputs)],
        outs=[*carries, *map(stacked, outputs)],
        plans=[inner.finished([*carries, *outputs])],
        varies=inner.varies(),
        after=after,
    )


def _while(walk: Walk, node: torch.fx.Node, loop: While, values: list[Value]) -> Placed:
    test_graph, body_graph = loop.graphs
    consts = [natural(v, walk.axes) for v in values[: loop.consts]]
    init = values[loop.consts :]
    body = LoopBody(walk, node, body_graph, init, [], values)
    carries, consts, inner, after = settle(body, consts)
    test = Inside(walk, test_graph, [*consts, *carries], values)
    return Placed(
        ins=[*consts, *carries],
        outs=carries,
        plans=[test.finished([_replicated(walk)]), inner.finished(carries)],
        varies=inner.varies(),
        after=after,
    )


def _branch(walk: Walk, node: torch.fx.Node, branch: Branch, values: list[Value]) -> Placed:
    *inputs, condition = values
    ins = [natural(v, walk.axes) for v in inputs]
    walks = [Inside(walk, graph, ins, inputs) for graph in branch.graphs]
    pairs = zip(*(w.results() for w in walks), strict=True)
    outs = [
        _advised(walk, (node, k), *pair) or _agreed(walk, *pair) for k, pair in enumerate(pairs)
    ]
    varies = zip(*(w.varies() for w in walks), strict=True)
    return Placed(
        ins=[*ins, _replicated(walk)],
        outs=outs,
        plans=[w.finished(outs) for w in walks],
        varies=[first | second | condition.varies for first, second in varies],
        after={},
    )


PLACE: dict[type[Loop], Callable[..., Placed]] = {Scan: _scan, While: _while, Branch: _branch}


def _replicated(walk: Walk) -> Marks:
    return ("R",) * len(walk.axes.sizes)


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
