"""Stages 2 and 3 of one traced program: the placements of its results, and each rank's program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor

from ... import _tree, tree_pairs
from ... import schedule as passes
from ...capture import placement_of
from ...errors import PlacementError, TreeError, call_site, problem
from ...mesh import all_coordinates, group_names
from ...ops.text_formats import is_part, parse_placed
from ...partition import Plan, emit, local_sizes
from ...partition.collective_bytes import collectives_in
from ...partition.plan import on_one_rank
from ...partition.printing import local_text
from ...partition.split_backward import INPUT, RESULT, SplitPlan
from ...placement import check_pending, is_spec, marks_of
from ...types import TENSOR, IfPartial, LocalProgram, MeshPlacements, Program
from ..arguments import Placed
from ..options import Request


def coordinates_here(placed: Placed) -> list[tuple[int, ...]]:
    """List the coordinates of the ranks that run in this process: all in a simulated world."""
    if placed.is_simulated:
        return all_coordinates(placed.axes)
    return [placed.coordinate]


def local_program(
    name: str,
    program: Program,
    placed: Placed,
    chosen: Plan,
    agreed: passes.SchedulePlan,
    coordinate: tuple[int, ...],
    names: tuple[str, ...],
) -> LocalProgram:
    """Emit and schedule the local program of the rank at a coordinate."""
    emitted = emit(chosen, coordinate, names, placed.device)
    graphs = passes.schedule(emitted, agreed)
    return LocalProgram(
        name=name,
        axes=placed.axes,
        graph=graphs[-1],
        unordered=graphs[-2],
        in_paths=program.in_paths,
        in_placements=tuple(slot.placements for slot in chosen.ins),
        out_placements=tuple(slot.placements for slot in chosen.outs),
        out_paths=program.out_paths,
        elided=tuple(sorted(on_one_rank(chosen))),
        show=local_text,
        records=collectives_in,
    )


def programs_of_all(lowered: Any) -> Callable[[], dict[tuple[int, ...], LocalProgram]] | None:
    """A function that makes the programs of all ranks, also of those that run elsewhere. None
    for code of one rank, of which each kind of rank has a capture of its own.
    """
    traced = lowered.traced
    if traced.ranks:
        return None
    name, placed = traced.request.name, traced.placed
    chosen, agreed = lowered.partition, lowered.schedule_plan
    names = group_names(placed.mesh)

    def programs() -> dict[tuple[int, ...], LocalProgram]:
        sizes = local_sizes(chosen, all_coordinates(placed.axes))
        by_size = {sizes[c]: x for c, x in lowered.programs.items()}
        found = {}
        for c, size in sizes.items():
            if size not in by_size:
                by_size[size] = local_program(
                    name, traced.program, placed, chosen, agreed, c, names
                )
            found[c] = by_size[size]
        return found

    return programs


def forward_of(program: Program, both: SplitPlan) -> Program:
    """Name the inputs and results of a forward, with the residuals that it saves."""
    results = program.out_paths[: program.out_leaves.count(TENSOR)]
    saved = [f"saved {i}" for i in range(len(both.forward.outs) - len(results))]
    return attrs.evolve(program, out_paths=(*results, *saved))


def backward_of(program: Program, both: SplitPlan) -> Program:
    """Name the inputs of a backward, and its gradients."""
    count = program.out_leaves.count(TENSOR)
    results = program.out_paths[:count]
    names = {INPUT: program.in_paths, RESULT: results}
    residuals = [names[kind][i] if kind in names else f"saved {i}" for kind, i in both.residuals]
    floating = floating_results(program)
    cotangents = [f"cotangent of {results[floating[i]]}" for i in both.cotangents]
    paths = (*residuals, *cotangents)
    return attrs.evolve(program, in_paths=paths, out_paths=program.out_paths[count:])


def floating_results(program: Program) -> list[int]:
    """List the positions of differentiable results, by dtype."""
    (output,) = program.graph.graph.find_nodes(op="output")
    count = program.out_leaves.count(TENSOR)
    rows = enumerate(output.args[0][:count])
    return [i for i, node in rows if _tree.is_floating(node.meta["val"])]


def gradient_marks(request: Request, placed: Placed) -> list[MeshPlacements | None]:
    """The placements of the gradients that a backward returns. That of a plain tensor is
    replicated, and in the code of one rank a row of its own; that of a DTensor is placed as the
    DTensor.
    """
    if request.followed is None:
        return []
    replicated = ("R",) * len(placed.axes.names)
    kinds = dict(zip(placed.tensors, placed.dtensors, strict=True))
    leaves = [kinds[i] for i in request.followed.leaves]
    is_own = request.rank is not None
    closed = [is_own or isinstance(x, DTensor) for x in request.followed.closed_over]
    return [None if is_placed else replicated for is_placed in leaves + closed]


def out_marks(request: Request, program: Program, placed: Placed) -> list[MeshPlacements | None]:
    """Determine the placements that `out_placements` asks for, for each tensor of the result."""
    (output,) = program.graph.graph.find_nodes(op="output")
    count = program.out_leaves.count(TENSOR)
    values = [node.meta["val"] for node in output.args[0][:count]]
    if request.rank is not None:
        return _partial_marks(program, values, placed)
    if request.out_placements is None:
        return [None] * len(values)
    result = _tree.unflatten(program.out_tree, program.out_leaves)
    try:
        specs = tree_pairs.broadcast_prefix(request.out_placements, result, is_spec)
        pairs = [
            spec for spec, leaf in zip(specs, program.out_leaves, strict=True) if leaf is TENSOR
        ]
        asked = [
            None if s is None else marks_of(s, v.shape, placed.axes)
            for s, v in zip(pairs, values, strict=True)
        ]
        for marks, v in zip(asked, values, strict=True):
            check_pending(marks or (), v.dtype)
        return asked
    except ValueError as error:
        kind = TreeError if len(error.args) > 1 or "placements" in str(error) else PlacementError
        fix = "give a prefix of the result's tree, with placements that fit each tensor"
        source = call_site()
        text = problem(
            f"{request.name}, out_placements", *map(str, error.args), fix=fix, source=source
        )
        raise kind(text, placements=request.out_placements, source=source, fix=fix) from None


def _partial_marks(
    program: Program, values: Sequence[torch.Tensor], placed: Placed
) -> list[MeshPlacements | None]:
    """Determine the placements of per-rank results that torch leaves Partial."""
    leaves = program.out_leaves
    half = len(leaves) // 2
    texts = leaves[half:]
    none: list[MeshPlacements | None] = [None] * len(values)
    if len(leaves) != 2 * half or not all(isinstance(x, str) for x in texts):
        return none
    said = [x for x, leaf in zip(texts, leaves[:half], strict=True) if leaf is TENSOR]
    if len(said) != len(values):
        return none
    rows = zip(said, values, strict=True)
    return [_partial(text.strip(), x, placed) for text, x in rows]


def _partial(text: str, x: torch.Tensor, placed: Placed) -> MeshPlacements | None:
    """Parse the placements of a Partial result; None if no rule handles them."""
    known = {} if is_part(text) else dict(parse_placed(text))
    if not known or any(said[0] == "?" for said in known.values()):
        return None
    placements = [placement_of(known.get(name, "R")) for name in placed.axes.names]
    try:
        marks = marks_of(placements, x.shape, placed.axes)
        check_pending(marks, x.dtype)
    except ValueError:
        return None  # reduced: two kinds of Partial do not commute
    return IfPartial(marks)


def beside(mine: Any, others: Sequence[Any]) -> Any:
    """Join the lowered program of this kind of rank with those of the other kinds.

    Raises:
        PlacementError: a DTensor among the results would be another one on each.
    """
    programs = dict(mine.programs)
    for other in others:
        name = mine.traced.request.name
        _refuse_other_results(name, mine.partition, other.partition)
        programs.update(other.programs)
    return attrs.evolve(mine, programs=programs)


def _refuse_other_results(name: str, a: Plan, b: Plan) -> None:
    for x, y in zip(a.outs, b.outs, strict=True):
        is_own = x.value.shape[1:] != y.value.shape[1:]
        if x.placements != y.placements and not is_own:
            got = f"a result is placed {x.placements} on one rank, but {y.placements} on another"
            fix = "return x.redistribute(mesh, placements) in place of the result x"
            raise PlacementError.of(name, got, fix=fix)
