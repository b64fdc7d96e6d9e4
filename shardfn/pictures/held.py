"""Which elements of a global tensor each rank holds, and the cells of their picture."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence

import attrs

from ..mesh import all_coordinates
from ..partition import layout
from ..partition.strided_shards import elements, strided_dims
from ..types import MEAN, REDUCTIONS, MeshAxes, MeshPlacements, stage_of

Run = tuple[int, int]  # the elements of a dim from the first up to, without, the second
MOST_RANKS = 32  # that a picture shows one by one
SOME_RANKS = 16  # of a mesh of more
MOST_SEGMENTS = 48  # of a dim


@attrs.frozen
class Held:
    """The elements of a global tensor that one rank holds.

    Args:
        place: of the rank in the mesh, row-major.
        coordinates: of the rank.
        runs: for each dim, the runs of its indices that the rank holds, in order. None on another
            stage of a pipeline, where a rank holds none of them.
    """

    place: int
    coordinates: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...] | None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the local tensor; None on another stage."""
        if self.runs is None:
            return None
        return tuple(sum(stop - start for start, stop in runs) for runs in self.runs)

    @property
    def is_empty(self) -> bool:
        """Whether the rank holds no element."""
        return self.runs is None or not all(self.runs)

    def local(self, index: Sequence[int]) -> tuple[int, ...]:
        """Return the place, in the local tensor, of an element of the global tensor."""
        assert self.runs is not None
        return tuple(map(_place, self.runs, index))


def _place(runs: Sequence[Run], i: int) -> int:
    """Return the place of an index among those that a rank holds."""
    before = 0
    for start, stop in runs:
        if start <= i < stop:
            return before + i - start
        before += stop - start
    raise IndexError(i)


@attrs.frozen
class Sharding:
    """A global tensor, and the elements of it that some ranks of a mesh hold.

    Args:
        shape: global.
        axes: of the mesh.
        marks: the placement on each axis.
        ranks: those that are shown, in row-major order.
    """

    shape: tuple[int, ...]
    axes: MeshAxes
    marks: MeshPlacements
    ranks: tuple[Held, ...]

    @property
    def hidden(self) -> int:
        """The number of ranks that are not shown."""
        return math.prod(self.axes.sizes) - len(self.ranks)

    @property
    def reductions(self) -> tuple[tuple[str, str], ...]:
        """The axes over which ranks hold terms of the value, each with its reduction."""
        rows = zip(self.axes.names, self.marks, strict=True)
        words = {MEAN: "mean"}
        return tuple((name, words.get(m, m)) for name, m in rows if m in REDUCTIONS)

    def holdings(self) -> list[tuple[Held, list[int]]]:
        """Group the ranks that hold the same elements: return one of each group, and their places.
        Ranks that hold none are left out.
        """
        groups: dict[tuple[tuple[Run, ...], ...], list[Held]] = {}
        for held in self.ranks:
            if held.runs is not None and not held.is_empty:
                groups.setdefault(held.runs, []).append(held)
        return [(same[0], [held.place for held in same]) for same in groups.values()]

    def words(self) -> list[str]:
        """Describe the placement on each axis."""
        return [
            _words(name, n, mark)
            for name, n, mark in zip(self.axes.names, self.axes.sizes, self.marks, strict=True)
        ]


def _words(name: str, n: int, mark: layout.AxisPlacement) -> str:
    """Describe the placement on one axis."""
    stage = stage_of(mark)
    if stage is not None:
        chunk = f", chunk {stage.chunk}" if stage.chunk else ""
        return f"coordinate {stage.coordinate}{chunk} of {name} holds it"
    if mark in REDUCTIONS:
        kind = "mean" if mark == MEAN else mark
        return f"Partial {kind} over {name}"
    cut = layout.split(mark)
    if cut is None:
        return f"replicated over {name}"
    dim, count = cut[0], layout.block_count(mark)
    if layout.is_zigzag(mark):
        return f"dim {dim} in zigzag over {name}, {2 * n} chunks"
    blocks = f"each of {count} blocks of " if count > 1 else ""
    return f"{blocks}dim {dim} sharded over {name}"


def sharding(
    shape: Sequence[int], marks: MeshPlacements, axes: MeshAxes, most: int = MOST_RANKS
) -> Sharding:
    """Compute what each rank of a mesh holds of a global tensor.

    Args:
        shape: global.
        marks: the placement on each axis.
        axes: of the mesh.
        most: ranks to show. Of larger meshes the first coordinates of each axis are shown.

    Example:
        >>> two = sharding((5,), (0,), MeshAxes(("dp",), (2,)))
        >>> [held.runs for held in two.ranks]
        [(((0, 3),),), (((3, 5),),)]
    """
    is_whole = math.prod(axes.sizes) <= most
    shown = axes.sizes if is_whole else _shown(axes.sizes, min(SOME_RANKS, most))
    ranks = tuple(
        Held(_row_major(c, axes.sizes), c, _runs(shape, marks, axes, c))
        for c in all_coordinates(attrs.evolve(axes, sizes=shown))
    )
    return Sharding(tuple(shape), axes, marks, ranks)


def _shown(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """Halve the sizes of a mesh, the largest first, until it has at most so many ranks."""
    left = list(sizes)
    while math.prod(left) > most:
        k = max(range(len(left)), key=left.__getitem__)
        left[k] = -(-left[k] // 2)
    return tuple(left)


def _row_major(coordinates: Sequence[int], sizes: Sequence[int]) -> int:
    place = 0
    for c, n in zip(coordinates, sizes, strict=True):
        place = place * n + c
    return place


def _runs(
    shape: Sequence[int], marks: MeshPlacements, axes: MeshAxes, coordinates: Sequence[int]
) -> tuple[tuple[Run, ...], ...] | None:
    """List the runs of each dim that a rank holds; None on another stage."""
    if not layout.is_here(marks, coordinates):
        return None
    strided = strided_dims(marks)
    return tuple(
        _strided(size, dim, marks, axes.sizes, coordinates)
        if dim in strided
        else _chunk(size, dim, marks, axes.sizes, coordinates)
        for dim, size in enumerate(shape)
    )


def _chunk(
    size: int, dim: int, marks: MeshPlacements, sizes: Sequence[int], coordinates: Sequence[int]
) -> tuple[Run, ...]:
    """Return the chunk of a dim that a rank holds, as a list of at most one run."""
    start, length = 0, size
    for mark, n, c in zip(marks, sizes, coordinates, strict=True):
        if layout.shards(mark, dim):
            offset, length = layout.chunk(length, layout.dim_and_unit(mark)[1], n, c)
            start += offset
    return ((start, start + length),) if length else ()


def _strided(
    size: int, dim: int, marks: MeshPlacements, sizes: Sequence[int], coordinates: Sequence[int]
) -> tuple[Run, ...]:
    """List the runs of a dim of which a rank holds a part of each block."""
    held = elements(size, dim, marks, sizes, coordinates).tolist()
    runs: list[Run] = []
    for i in held:
        if runs and runs[-1][1] == i:
            runs[-1] = runs[-1][0], i + 1
        else:
            runs.append((i, i + 1))
    return tuple(runs)


@attrs.frozen
class Cell:
    """A rectangle of a picture of a tensor, and the elements that it stands for.

    Args:
        runs: for each dim, a run of its indices.
        x, y, width, height: in the picture, from its upper left corner; the picture is 1 by 1.
    """

    runs: tuple[Run, ...]
    x: float
    y: float
    width: float
    height: float


@attrs.frozen
class Grid:
    """A tensor of any number of dims on a plane. The last dim runs to the right, the one before it
    down, the one before that again to the right, around copies of the first two; and so on.

    Args:
        segments: for each dim, the runs that it is divided into.
        sizes: of the dims. A dim with more segments than a picture has place for is cut off.
    """

    segments: tuple[tuple[Run, ...], ...]
    sizes: tuple[int, ...]

    @property
    def is_cut_off(self) -> bool:
        """Whether a dim has more elements than the picture shows."""
        ends = (runs[-1][1] if runs else 0 for runs in self.segments)
        return any(end < size for end, size in zip(ends, self.sizes, strict=True))

    def cells(self, runs: Sequence[Sequence[Run]] | None = None) -> Iterator[Cell]:
        """Yield the cells of the elements in all products of some runs; by default all cells.

        Args:
            runs: for each dim, the runs of its indices.
        """
        xs = self._spans(runs, range(len(self.sizes) - 1, -1, -2))
        ys = self._spans(runs, range(len(self.sizes) - 2, -1, -2))
        for (across, x, width), (down, y, height) in itertools.product(xs, ys):
            both = {**across, **down}
            yield Cell(tuple(both[d] for d in range(len(both))), x, y, width, height)

    def panels(self) -> Iterator[Cell]:
        """Yield the outline of each copy of the last two dims."""
        inner = len(self.sizes) - 2
        whole = [
            runs if d < inner else ((runs[0][0], runs[-1][1]),) if runs else ()
            for d, runs in enumerate(self.segments)
        ]
        coarse = Grid(tuple(whole), self.sizes)
        yield from coarse.cells()

    def _spans(
        self, runs: Sequence[Sequence[Run]] | None, dims: Sequence[int]
    ) -> list[tuple[dict[int, Run], float, float]]:
        """List the spans of some dims along one side of the picture, the innermost dim first: the
        run of each dim, where it starts, and its length.
        """
        spans: list[tuple[dict[int, Run], float, float]] = [({}, 0.0, 1.0)]
        for level, dim in enumerate(dims):
            segments = self.segments[dim]
            gap = 0.0 if level == 0 or len(segments) < 2 else 0.16 / len(segments)
            lengths = _lengths(segments, self.sizes[dim])
            mine = None if runs is None else runs[dim]
            outer = []
            start = 0.0
            for segment, length in zip(segments, lengths, strict=True):
                if mine is None or _is_within(segment, mine):
                    outer.append((segment, start, length - gap))
                start += length
            spans = [
                ({dim: segment, **inside}, at + length * x, length * width)
                for segment, at, length in outer
                for inside, x, width in spans
            ]
        return spans


def _is_within(segment: Run, runs: Sequence[Run]) -> bool:
    """Return whether a segment lies in one of some runs, which are in order."""
    k = bisect.bisect_right(runs, segment[0], key=lambda run: run[0]) - 1
    return k >= 0 and segment[1] <= runs[k][1]


def _lengths(segments: Sequence[Run], size: int) -> list[float]:
    """Return the share of a side that each segment of a dim takes: by its elements, and no less
    than a half of an equal share.
    """
    least = size / (2 * max(len(segments), 1))
    wide = [max(stop - start, least) for start, stop in segments]
    return [x / sum(wide) for x in wide]


def grid_of_blocks(x: Sharding) -> Grid:
    """Divide each dim where the elements of one rank end and those of another begin."""
    return _grid(x, [range(0) for _ in x.shape])


def grid_of_elements(x: Sharding) -> Grid:
    """Divide each dim into its elements."""
    return _grid(x, [range(size) for size in x.shape])


def _grid(x: Sharding, marks: Sequence[Sequence[int]]) -> Grid:
    segments = []
    for dim, size in enumerate(x.shape):
        cuts = {0, size, *marks[dim]}
        for held in x.ranks:
            for run in held.runs[dim] if held.runs is not None else ():
                cuts |= {*run}
        pairs = [*itertools.pairwise(sorted(cuts))]
        segments.append(tuple(pairs[:MOST_SEGMENTS]))
    return Grid(tuple(segments), x.shape)
