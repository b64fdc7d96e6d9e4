"""`Sweep`: the rows of one step on several meshes, in several layouts and variants, as a table."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from ..byte_sizes import human_bytes
from ..collectives import COLLECTIVES
from ..durations import human_seconds
from ..extensions import page_of
from ..inspect.memory import Memory
from ..inspect.step_time import StepTime
from ..pipelines import Schedule
from ..placement_table import ArgumentPlacements
from ..runtime.stages import Lowered
from ..types import Collective, MeshAxes

FRONT, OVER = "*", "!"
MOST_LETTERS = 400  # of a line


@attrs.frozen(eq=False)
class Row:
    """The prediction for a step on one mesh, with one layout. For a pipeline, each figure is the
    largest over the ranks of the pipeline axis.

    Args:
        axes: the names and sizes of the mesh axes.
        strategy: the name of the layout.
        options: the keyword arguments of the step: microbatches, remat, schedule.
        time: the predicted time of a step of one rank.
        mfu: the model FLOPs utilization, from 0 to 1.
        memory: the predicted memory of one rank.
        collectives: the collectives of one rank.
        placements: the placements of the arguments.
        idle: the share of the time in which the ranks of a pipeline wait for other stages.
        fullest: the rank of the pipeline axis with the largest memory peak, as text, or "".
        limit: the bytes that a rank may hold, or None.
        call: the Python code of the row, which defines a function `run`.
        again: a function that lowers the step.
        warnings: the warnings of the lowering, such as replicated compute.
        is_front: whether the row fits in memory and is on the Pareto front of time and memory peak,
            for its hardware.
    """

    axes: MeshAxes
    strategy: str
    options: Mapping[str, Any]
    time: StepTime = attrs.field(repr=False)
    mfu: float
    memory: Memory = attrs.field(repr=False)
    collectives: tuple[Collective, ...] = attrs.field(repr=False)
    placements: ArgumentPlacements = attrs.field(repr=False)
    idle: float
    fullest: str
    limit: float | None
    call: str = attrs.field(repr=False)
    again: Callable[[], Lowered] = attrs.field(repr=False)
    warnings: tuple[str, ...] = ()
    is_front: bool = False

    @property
    def hardware(self) -> str:
        """Return the name of the hardware."""
        return self.time.hardware

    @property
    def schedule(self) -> Schedule | None:
        """Return the pipeline schedule, or None."""
        return self.options.get("schedule")

    @property
    def peak(self) -> int:
        """Return the memory peak of a rank, in bytes."""
        return self.memory.peak

    @property
    def excess(self) -> float:
        """Return the bytes of the memory peak above the limit, or 0."""
        return 0.0 if self.limit is None else max(0.0, self.peak - self.limit)

    @property
    def sent(self) -> float:
        """Return the bytes that a rank sends in a step."""
        return sent_bytes(self.collectives, self.axes)

    @functools.cached_property
    def sent_by_axis(self) -> dict[str, float]:
        """Return the bytes that a rank sends over each mesh axis, without axes over which it sends
        nothing.
        """
        by_axis = {
            axis: sent_bytes([c for c in self.collectives if c.axis == axis], self.axes)
            for axis in self.axes.names
        }
        return {axis: nbytes for axis, nbytes in by_axis.items() if nbytes}

    def lowered(self) -> Lowered:
        """Lower the step of the row, without another capture, to read its program, `explain`,
        `memory` and `time`.
        """
        return self.again()

    def cells(self) -> dict[str, str]:
        """Return the cells of the table row, by column."""
        counts = Counter(f"{c.kind} over {c.axis}" for c in self.collectives)
        kinds = [f"{n} {kind}" for kind, n in sorted(counts.items())]
        by_axis = [f"{axis} {human_bytes(int(n))}" for axis, n in self.sent_by_axis.items()]
        mark = OVER if self.excess else FRONT if self.is_front else ""
        return {
            "": mark,
            "mesh": str(self.axes),
            "strategy": self.strategy,
            **self._cells_of_options(),
            "hardware": self.hardware,
            "time a step": human_seconds(self.time.total),
            "MFU": f"{self.mfu:.1%}",
            "exposed": human_seconds(self.time.exposed),
            "sent a rank": ", ".join(by_axis) or "0 B",
            "peak a rank": human_bytes(self.peak),
            "collectives": ", ".join(kinds) or "none",
        }

    def _cells_of_options(self) -> dict[str, str]:
        """Return the cells of the keywords of the step."""
        cells: dict[str, str] = {}
        for key, x in self.options.items():
            if isinstance(x, Schedule):
                cells |= {"schedule": x.name, "stages": str(x.stages)}
                cells |= {"microbatches": str(x.microbatches), "idle": f"{self.idle:.1%}"}
            else:
                cells[key] = str(x)
        return cells


@attrs.frozen(eq=False)
class Refused:
    """A combination that cannot run, with the reason.

    Args:
        axes: the names and sizes of the mesh axes.
        strategy: the name of the layout.
        options: the keyword arguments of the step.
        why: the reason, in one line of text.
    """

    axes: MeshAxes
    strategy: str
    options: Mapping[str, Any]
    why: str

    def __iter__(self) -> Iterator[Any]:
        """Yield the mesh and the reason."""
        yield from (self.axes, self.why)

    def cells(self) -> dict[str, str]:
        """Return the cells that name the combination, by column."""
        texts = {key: _text(x) for key, x in self.options.items()}
        return {"mesh": str(self.axes), "strategy": self.strategy, **texts}


@attrs.frozen(eq=False)
class Sweep:
    """A table that compares one step over meshes, strategies, keyword arguments and hardware.

    Args:
        name: the name of the step.
        rows: the rows of the table: rows that fit in memory come first, and the fastest of them is
            at the top.
        refused: the combinations of mesh, strategy, keyword arguments and hardware that cannot run,
            each with the reason.

    Example:
        >>> import shardfn as sf
        >>> def step(w, x):
        ...     return sf.bucketed_grad(lambda w: (x @ w).square().mean())(w)
        >>> w, x = sf.ShapeDtype((64, 64)), sf.ShapeDtype((32, 64))
        >>> table = sf.sweep(step, w, x, meshes=[{"dp": 2}, {"dp": 4}])
        >>> len(table.rows), table.refused
        (2, ())
    """

    name: str
    rows: tuple[Row, ...]
    refused: tuple[Refused, ...] = ()

    @property
    def best(self) -> Row:
        """Return the fastest row that fits in memory, or the fastest row if none fits."""
        return self.rows[0]

    @property
    def plans(self) -> tuple[Row, ...]:
        """Return the same rows as the field `rows`."""
        return self.rows

    @property
    def front(self) -> tuple[Row, ...]:
        """Return the rows that fit in memory and are on the Pareto front of time and memory peak,
        for each hardware.
        """
        return tuple(row for row in self.rows if row.is_front)

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        """Print the table in a notebook."""
        printer.text(str(self))

    def _repr_html_(self) -> str | None:
        """Draw a picture in a notebook."""
        return page_of(self)

    def __str__(self) -> str:
        cells = [row.cells() for row in self.rows]
        every = [*cells, *(x.cells() for x in self.refused)]
        single = {head for head in ("strategy", "hardware") if _is_single(every, head)}
        heads = [head for head in cells[0] if head not in single]
        grid = [heads, *([row[head] for head in heads] for row in cells)]
        widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
        lines = [self._title(cells[0], single)]
        for row in grid:
            texts = [x.ljust(n) for x, n in zip(row, widths, strict=True)]
            lines.append(f"  {'  '.join(texts)}".rstrip())
        lines += [f"  {_naming(cells, single)}: {why}" for cells, why in self._refused()]
        lines += self._legend()
        lines.append(
            f"{'the fastest' if self.best.excess else 'the fastest that fits'}, best.call:"
        )
        call = self.best.call.split("\n")
        return "\n".join([*lines, *(f"  {_shortened(line)}" for line in call)])

    def _refused(self) -> list[tuple[dict[str, str], str]]:
        """Return what names each refused combination, and its reason. Options of one mesh and
        layout with one reason are left out.
        """
        groups: dict[tuple[MeshAxes, str, str], list[dict[str, str]]] = {}
        for x in self.refused:
            groups.setdefault((x.axes, x.strategy, x.why), []).append(x.cells())
        return [
            (rows[0] if len(rows) == 1 else {k: rows[0][k] for k in ("mesh", "strategy")}, why)
            for (_, _, why), rows in groups.items()
        ]

    def _title(self, cells: Mapping[str, str], single: Iterable[str]) -> str:
        """Return the first line: the step, and what all rows have in common."""
        hardware = f" on {cells['hardware']}" if "hardware" in single else ""
        strategy = f", {cells['strategy']}" if "strategy" in single and cells["strategy"] else ""
        return f"{self.name}{hardware}{strategy}"

    def _legend(self) -> list[str]:
        """Return what the marks mean."""
        lines = (
            [f"  {FRONT} no other row that fits is both faster and smaller"] if self.front else []
        )
        over = [row for row in self.rows if row.excess]
        return [*lines, *([f"  {OVER} needs more memory than a rank has"] if over else [])]


def sweep_of(name: str, rows: Iterable[Row], refused: Iterable[Refused]) -> Sweep:
    """Order the rows of a sweep, and mark those of the front."""
    marked = [attrs.evolve(row, is_front=front) for row, front in _with_front([*rows])]
    ordered = sorted(marked, key=lambda row: (row.excess > 0, row.time.total, row.peak))
    return Sweep(name, tuple(ordered), tuple(refused))


def _with_front(rows: Sequence[Row]) -> list[tuple[Row, bool]]:
    """Pair each row with whether no row that fits, on its hardware, beats it in time and peak."""
    fitting = [(row.hardware, row.time.total, row.peak) for row in rows if not row.excess]
    return [(row, not row.excess and not any(_beats(x, row) for x in fitting)) for row in rows]


def _beats(other: tuple[str, float, int], row: Row) -> bool:
    """Return whether another row of the same hardware is no worse in time and peak, and better in
    one of them.
    """
    hardware, seconds, peak = other
    mine = row.time.total, row.peak
    is_no_worse = seconds <= mine[0] and peak <= mine[1]
    return hardware == row.hardware and is_no_worse and (seconds, peak) != mine


def _text(x: Any) -> str:
    """Name the value of an option."""
    return f"{x.name}, {x.microbatches} microbatches" if isinstance(x, Schedule) else str(x)


def _is_single(cells: Sequence[Mapping[str, str]], head: str) -> bool:
    """Return whether a column has one value."""
    return len({row[head] for row in cells if head in row}) <= 1


def _shortened(line: str) -> str:
    """Leave out the end of a long line."""
    return line if len(line) <= MOST_LETTERS else f"{line[:MOST_LETTERS]} ..."


def _naming(cells: Mapping[str, str], single: Iterable[str]) -> str:
    """Return what names a combination, without what all have in common."""
    return ", ".join(text for head, text in cells.items() if head not in single)


def sent_bytes(collectives: Iterable[Collective], axes: MeshAxes) -> float:
    """Sum the bytes that a rank sends in some collectives, each run as a ring."""
    sizes = dict(zip(axes.names, axes.sizes, strict=True))
    return sum(_share(c.kind, sizes[c.axis]) * c.nbytes for c in collectives)


def _share(kind: str, n: int) -> float:
    """Return the share of a collective's bytes that a rank of n sends."""
    row = COLLECTIVES[kind]
    return 1.0 if row.is_message else row.rounds * (n - 1) / n
