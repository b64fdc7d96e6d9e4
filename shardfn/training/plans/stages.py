"""The stage of each parameter of a pipeline: even by the elements of its layers or by the work of a
traced function, or by patterns.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...errors import PlacementError
from ...partition.stages.work import work_of
from ...patterns import compiled
from ...placement import P, Stage
from ...placement_table import Leaf
from ...types import Program

EVEN = "even"
ORDERS = ("loop", "v")


def stage_placements(
    where: str, leaves: Sequence[Leaf], tree: Any, size: int, stages: Any, chunks: int, order: str
) -> dict[str, Stage]:
    """The placement of each parameter on the axis of the stages, by path.

    Args:
        where: the function, for errors.
        leaves: the parameters.
        tree: their tree, in whose order the layers run.
        size: of the mesh axis.
        stages: "even", a traced function of the parameters, or for patterns of paths the number
            of a stage.
        chunks: how many stages a coordinate has.
        order: "loop" or "v": on which coordinate the stages are.

    Raises:
        PlacementError: another kind of option, parameters without a stage, a stage that there is
            not, or fewer layers than stages.
    """
    _check_options(where, chunks, order)
    count = size * chunks
    by_path = {leaf.path: leaf for leaf in leaves}
    program = getattr(stages, "program", None)
    if isinstance(program, Program):
        numbers = _even(where, _by_work(where, program, by_path), count)
    elif stages == EVEN:
        written = [by_path[path] for path in _paths_as_written(tree) if path in by_path]
        numbers = _even(where, [(leaf, math.prod(leaf.shape)) for leaf in written], count)
    else:
        numbers = _by_pattern(where, leaves, stages, count)
    return {path: _placed(number, size, order) for path, number in numbers.items()}


def with_stage(spec: P, axis: str, stage: Stage) -> P:
    """A placement with a stage on one more axis."""
    number = stage if stage.chunk else stage.coordinate
    return P(*spec.parts, **{**spec.stages, axis: number})


def _check_options(where: str, chunks: Any, order: Any) -> None:
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise PlacementError.of(
            f"{where}, chunks", f"it is {chunks!r}", needed="a number of stages, 1 or more"
        )
    if order not in ORDERS:
        raise PlacementError.of(f"{where}, order", f"it is {order!r}", needed='"loop" or "v"')
    if order == "v" and chunks != 2:
        got = f'chunks is {chunks}, but order="v" needs two stages per pipeline rank'
        raise PlacementError.of(f"{where}, chunks", got, fix="chunks=2")


def _placed(number: int, size: int, order: str) -> Stage:
    """The coordinate that has a stage, and which of its stages it is."""
    chunk, at = divmod(number, size)
    return Stage(size - 1 - at if order == "v" and chunk else at, chunk)


def _paths_as_written(tree: Any, path: str = "") -> Iterator[str]:
    """The paths of a tree's leaves, dicts in the order of their keys as they were written."""
    if isinstance(tree, Mapping):
        rows = [*tree.items()]
    elif isinstance(tree, (list, tuple)):
        rows = [*enumerate(tree)]
    else:
        yield path
        return
    for key, x in rows:
        yield from _paths_as_written(x, f"{path}.{key}" if path else str(key))


def _by_work(where: str, program: Program, leaves: Mapping[str, Leaf]) -> list[tuple[Leaf, float]]:
    """The parameters in the order in which a program reads them, each with the time of its ops.

    Raises:
        PlacementError: the first argument of the program has other tensors.
    """
    first = program.in_paths[0].partition("[")[0] if program.in_paths else ""
    paths = {
        i: ".".join(key.strip("'") for key in re.findall(r"\[('[^']*'|\d+)\]", path))
        for i, path in enumerate(program.in_paths)
        if path.partition("[")[0] == first
    }
    nodes = program.graph.graph.find_nodes(op="placeholder")
    shapes = {path: tuple(nodes[i].meta["val"].shape) for i, path in paths.items()}
    expected = {path: leaf.shape for path, leaf in leaves.items()}
    wrong = [path for path in {**expected, **shapes} if expected.get(path) != shapes.get(path)]
    if wrong:
        told = lambda rows, path: rows.get(path, "not there")
        raise PlacementError.of(
            f"{where}, stages",
            *(
                (
                    f"{path}: {told(expected, path)} in params, but {told(shapes, path)} in "
                    f"{program.name}"
                )
                for path in wrong
            ),
            needed="a traced function whose first argument is params",
            fix="stages=sf.jit(loss_fn).trace(params, batch)",
        )
    return [(leaves[paths[i]], time) for i, time in work_of(program, [*paths])]


def _even(where: str, leaves: Sequence[tuple[Leaf, float]], count: int) -> dict[str, int]:
    """Stages of consecutive layers, of which the heaviest is as light as it can be.

    Raises:
        PlacementError: fewer layers than stages.
    """
    rows = _layers(leaves)
    if len(rows) < count:
        raise PlacementError.of(
            f"{where}, stages",
            f"{len(rows)} layers for {count} stages",
            needed="a layer for each stage",
            fix="fewer stages, or stages={pattern: number}",
        )
    ends = _even_ends([sum(weight for _, weight in row) for row in rows], count)
    numbers = {}
    for i, row in enumerate(rows):
        stage = sum(i >= end for end in ends)
        numbers.update({leaf.path: stage for leaf, _ in row})
    return numbers


def _layers(leaves: Sequence[tuple[Leaf, float]]) -> list[list[tuple[Leaf, float]]]:
    """The parameters of each layer, in order: those with a path that is equal up to its first
    number, and those between two such layers. Where no path has a number, those of each module.
    """
    names = [_numbered(leaf.path) for leaf, _ in leaves]
    if not any(names):
        names = [leaf.path.rpartition(".")[0] or leaf.path for leaf, _ in leaves]
    pairs = itertools.groupby(zip(names, leaves, strict=True), lambda pair: pair[0])
    return [[row for _, row in group] for _, group in pairs]


def _numbered(path: str) -> str:
    """A path up to its first number; empty if it has none."""
    parts = path.split(".")
    i = next((i for i, part in enumerate(parts) if part.isdecimal()), -1)
    return ".".join(parts[: i + 1])


def _even_ends(weights: Sequence[float], count: int) -> list[int]:
    """Where to cut a row into so many parts, none empty, so that the heaviest is as light as it can
    be, and the parts are as equal as they can be.
    """
    n = len(weights)
    before = [0.0]
    for weight in weights:
        before.append(before[-1] + weight)
    # best[k][i]: (the heaviest part, the sum of squares, the cuts) of the first i in k parts
    best: list[dict[int, tuple[float, float, tuple[int, ...]]]] = [{0: (0.0, 0.0, ())}]
    for k in range(1, count + 1):
        row = {}
        for i in range(k, n - (count - k) + 1):
            options = (
                (max(heavy, part := before[i] - before[j]), squares + part * part, (*cuts, i))
                for j, (heavy, squares, cuts) in best[-1].items()
                if j < i
            )
            row[i] = min(options)
        best.append(row)
    return [*best[count][n][2][:-1]]


def _by_pattern(where: str, leaves: Sequence[Leaf], stages: Any, count: int) -> dict[str, int]:
    """Stages by the first pattern that matches the path of a parameter."""
    if not isinstance(stages, Mapping):
        raise PlacementError.of(
            f"{where}, stages",
            f"it is {stages!r}",
            needed='"even", a traced function, or a dict from patterns to stage numbers',
            fix='{"layers.0.*": 0, "layers.1.*": 1}, or sf.jit(loss_fn).trace(params, batch)',
        )
    wrong = [
        f"{pattern!r} is for stage {number!r}, but the stages are 0 to {count - 1}"
        for pattern, number in stages.items()
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < count
    ]
    rows = [(compiled(pattern), number) for pattern, number in stages.items()]
    numbers = {}
    for leaf in leaves:
        found = next((k for row, k in rows if row.fullmatch(leaf.path)), None)
        if found is None:
            wrong.append(f"{leaf.path} is on no stage")
        else:
            numbers[leaf.path] = found
    if wrong:
        fix = "give a pattern for each parameter, with a stage number"
        raise PlacementError.of(f"{where}, stages", *wrong, fix=fix)
    return numbers
