"""Stages 2 and 3 of one traced program: the placements of its results, and each rank's program."""

from __future__ import annotations

from ... import _tree, tree_pairs
from ... import schedule as passes
from ...errors import PlacementError, TreeError, call_site, problem
from ...mesh import all_coordinates
from ...partition import Plan, emit
from ...partition.printing import local_text
from ...placements import check_pending, is_spec, marks_of
from ...types import TENSOR, LocalProgram, Marks, Program
from ..arguments import Placed
from ..options import Request


def coordinates_here(placed: Placed) -> list[tuple[int, ...]]:
    """The coordinates of the ranks that this process runs: all in a simulated world, else its
    own.
    """
    if placed.is_simulated:
        return all_coordinates(placed.axes)
    return [placed.coordinate]


def local_program(
    name: str,
    program: Program,
    placed: Placed,
    chosen: Plan,
    agreed: passes.Agenda,
    coordinate: tuple[int, ...],
    names: tuple[str, ...],
) -> LocalProgram:
    """The scheduled program of the rank at a coordinate."""
    device = placed.mesh.device_type if placed.mesh is not None else "cpu"
    graphs = passes.schedule(emit(chosen, coordinate, names, device), agreed)
    sizes = dict(zip(placed.axes.names, placed.axes.sizes, strict=True))
    elided = [
        n.name
        for n in graphs[0].nodes
        if "collective" in n.meta and sizes[n.meta["collective"].axis] == 1
    ]
    return LocalProgram(
        name=name,
        axes=placed.axes,
        graph=graphs[-1],
        unordered=graphs[-2],
        in_paths=program.in_paths,
        in_marks=tuple(slot.marks for slot in chosen.ins),
        out_marks=tuple(slot.marks for slot in chosen.outs),
        out_paths=program.out_paths,
        elided=tuple(sorted(elided)),
        show=local_text,
    )


def out_marks(
    request: Request, program: Program, placed: Placed
) -> list[Marks | None]:
    """The placements that out_placements asks for, for each tensor of the result."""
    values = [
        n.meta["val"]
        for n in program.graph.graph.find_nodes(op="output")[0].args[0]
    ]
    if request.out_placements is None:
        return [None] * len(values)
    result = _tree.unflatten(program.out_tree, program.out_leaves)
    try:
        specs = tree_pairs.broadcast_prefix(request.out_placements, result, is_spec)
        pairs = [
            spec
            for spec, leaf in zip(specs, program.out_leaves, strict=True)
            if leaf is TENSOR
        ]
        asked = [
            None if s is None else marks_of(s, v.shape, placed.axes)
            for s, v in zip(pairs, values, strict=True)
        ]
        for marks, v in zip(asked, values, strict=True):
            check_pending(marks or (), v.dtype)
        return asked
    except ValueError as error:
        kind = (
            TreeError
            if len(error.args) > 1 or "placements" in str(error)
            else PlacementError
        )
        fix = "a prefix of the result's tree, with placements that fit each tensor"
        source = call_site()
        text = problem(
            f"{request.name}, out_placements",
            *map(str, error.args),
            fix=fix,
            source=source,
        )
        raise kind(
            text, placements=request.out_placements, source=source, fix=fix
        ) from None
