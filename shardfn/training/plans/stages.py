"""The stage of each parameter of a pipeline: even by the work of its layers, or by patterns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...errors import PlacementError
from ...patterns import compiled
from ...placement import P, Stage
from ...placement_table import Leaf

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
        stages: "even", or for patterns of paths the number of a stage.
        chunks: how many stages a coordinate has.
        order: "loop" or "v": on which coordinate the stages are.

    Raises:
        PlacementError: another kind of option, parameters without a stage, a stage that there is
            not, or fewer layers than stages.
    """
    _check_options(where, chunks, order)
    count = size * chunks
    by_path = {leaf.path: leaf for leaf in leaves}
    if stages == EVEN:
        numbers = _even(where, [by_path[p] for p in _paths_as_written(tree) if p in by_path], count)
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
        got = f'{chunks} stages a coordinate, and order="v" goes there and back'
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


def _even(where: str, leaves: Sequence[Leaf], count: int) -> dict[str, int]:
    """Stages of consecutive layers, of which the largest has the fewest elements: the arithmetic
    of a layer is that of its matrices, and its bytes are too.
    """
    rows = _layers(leaves)
    if len(rows) < count:
        raise PlacementError.of(
            f"{where}, stages",
            f"{len(rows)} layers for {count} stages",
            needed="a layer for each stage",
            fix="fewer stages, or stages={pattern: number}",
        )
    weights = [sum(math.prod(leaf.shape) for leaf in row) for row in rows]
    ends = _even_ends(weights, count)
    numbers = {}
    for i, row in enumerate(rows):
        stage = sum(i >= end for end in ends)
        numbers.update({leaf.path: stage for leaf in row})
    return numbers


def _layers(leaves: Sequence[Leaf]) -> list[list[Leaf]]:
    """The parameters of each layer, in order: those with a path that is equal up to its first
    number, and those between two such layers. Where no path has a number, those of each module.
    """
    names = [_numbered(leaf.path) for leaf in leaves]
    if not any(names):
        names = [leaf.path.rpartition(".")[0] or leaf.path for leaf in leaves]
    pairs = itertools.groupby(zip(names, leaves, strict=True), lambda pair: pair[0])
    return [[leaf for _, leaf in group] for _, group in pairs]


def _numbered(path: str) -> str:
    """A path up to its first number; empty if it has none."""
    parts = path.split(".")
    i = next((i for i, part in enumerate(parts) if part.isdecimal()), -1)
    return ".".join(parts[: i + 1])


def _even_ends(weights: Sequence[int], count: int) -> list[int]:
    """Where to cut a row into so many parts, none empty, so that the heaviest is as light as it can
    be, and the parts are as equal as they can be.
    """
    n = len(weights)
    before = [0]
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
            needed='"even", or a dict of patterns to numbers of stages',
            fix='{"layers.0.*": 0, "layers.1.*": 1}',
        )
    wrong = [
        f"{pattern!r} is for stage {number!r}, and there are the stages 0 to {count - 1}"
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
        fix = "a pattern for each parameter, with the number of a stage"
        raise PlacementError.of(f"{where}, stages", *wrong, fix=fix)
    return numbers
