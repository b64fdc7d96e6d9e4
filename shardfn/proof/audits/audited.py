"""The comparison of a distributed step with that of one device, value by value."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from ...errors import DivergenceError, TreeError, listed
from .causes import OTHER, UNREDUCED, Axis, Difference, Pair, difference, size, tolerance
from .observed import Observed
from .other_roundings import Rounding
from .shards_of_ranks import Holdings, LocalValue, parts_of, reduced
from .weights import mean, mean_of_means

TELLING = 100  # roundings of a parameter, of an update that tells whether it is right
MANY = 4  # rows with one cause that are written together
INDENT: dict[str, Any] = {"initial_indent": "  ", "subsequent_indent": "  "}
START, LOSS, GRADIENT = "start", "loss", "gradient"
AFTER, BUFFER, RESULT = "parameter after the step", "buffer", "result"


OTHER_START = (
    "starts with different values: call torch.manual_seed(0) in both steps before the module "
    "is made, or broadcast the values of one rank"
)
APART_START = (
    "starts with values that differ between ranks: use the same seed on all ranks before the "
    "module is made, or broadcast the values of one rank"
)
FROZEN = "on one device this parameter has no gradient: it is not trained there"
UNKNOWN = "on one device no parameter has this name or these values"
RANDOM = (
    "the steps draw random numbers, as dropout does, and ranks draw different numbers than "
    "one device; compare with dropout of 0"
)
OF_UPDATES = {  # the words for gradients, and those for updates by them
    "reduced twice, or summed in place of averaged": "learning rate multiplied",
    "divided once more": "learning rate divided once more",
}


@attrs.frozen
class Row:
    """A value of the distributed step that differs from the value on one device.

    Args:
        name: the name of the parameter, buffer, or part of the result.
        kind: the kind of value: start (initial value), loss, gradient, parameter after the step,
            buffer, or result.
        step: the optimizer step, from 0.
        ratio: the factor by which the value is too large on every rank, or None if there is no
            common factor.
        difference: the largest difference of an element.
        ranks: the ranks on which the value differs.
        cause: the probable cause.
    """

    name: str
    kind: str
    step: int
    ratio: float | None
    difference: float
    ranks: tuple[int, ...]
    cause: str

    def __str__(self) -> str:
        where = f" at step {self.step}" if self.step else ""
        size = "" if math.isnan(self.difference) else f"differs by {self.difference:.2g}, "
        return f"{self.kind} of {self.name}{where}: {self.cause} ({size}{listed(self.ranks)})"


@attrs.frozen
class Audit:
    """The result of an audit, which prints as a table.

    Args:
        name: the name of the distributed step.
        world: the number of ranks.
        rows: one row for each value that differs between the two steps, in the order: initial
            values, gradients, parameters after the step, buffers, results, losses.
        compared: the number of values that were compared.
        notes: remarks, such as parts of the step that the audit could not follow, and losses that
            are means of means.

    Example:
        >>> import torch, shardfn as sf
        >>> audit = sf.audit(lambda x: x.sum() / 2, lambda x: x.sum(), torch.ones(4), world=2)
        >>> audit.ok, audit.compared, [row.kind for row in audit]
        (False, 1, ['loss'])
    """

    name: str
    world: int
    rows: tuple[Row, ...]
    compared: int
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no value differs between the distributed step and the step on one device."""
        return not self.rows

    def __bool__(self) -> bool:
        return self.ok

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __str__(self) -> str:
        counted = f"{self.compared} values of {self.name} on {self.world} ranks"
        first = f"{counted} equal those of one device"
        if self.rows:
            first = f"{len(self.rows)} of {counted} differ from those of one device"
        groups = itertools.groupby(
            self.rows, lambda row: (row.kind, row.step, row.cause, row.ranks)
        )
        lines = [f"  {line}" for _, rows in groups for line in _lines([*rows])]
        return "\n".join([first, *lines, *(f"  note: {x}" for x in self.notes)])

    __repr__ = __str__


def _lines(rows: Sequence[Row]) -> list[str]:
    """Write rows with one cause: one by one, or together where there are many."""
    if len(rows) < MANY:
        return [str(row) for row in rows]
    largest = max(rows, key=lambda row: row.difference)
    together = attrs.evolve(largest, name=f"{len(rows)} parameters")
    return [str(together), *textwrap.wrap(", ".join(row.name for row in rows), 96, **INDENT)]


class Comparison:
    """The comparison of what is seen of ranks with what is seen of one device.

    Args:
        name: of the program, for errors.
        alone: of one device.
        ranks: of each rank.
        axes: the groups of ranks.
        rounding: how far rounding moves values, if they are computed in 16 bits.
    """

    def __init__(
        self,
        name: str,
        alone: Observed,
        ranks: Sequence[Observed],
        axes: Sequence[Axis],
        rounding: Rounding | None = None,
    ) -> None:
        self.name, self.alone, self.ranks, self.axes = name, alone, ranks, axes
        self.rounding = rounding
        self.rows: list[Row] = []
        self.compared = 0
        self.notes: list[str] = []
        self.names = [each.names() for each in ranks]
        self.names_alone = alone.names()
        self.starts = {self.names_alone[p]: x.value for p, x in alone.start.items()}
        holdings = Holdings(self.starts, _close)
        self.held = [
            holdings.of_rank({names[p]: x for p, x in each.start.items()})
            for each, names in zip(ranks, self.names, strict=True)
        ]

    def audit(self, step: str) -> Audit:
        """Compare all."""
        self.check()
        self.compare_starts()
        if not self.rows:
            for number in range(len(self.alone.steps)):
                self.compare_step(number)
                if self.rows:
                    break
        if not self.rows:
            self.compare_buffers()
            self.compare_results()
        if any(row.cause == OTHER for row in self.rows):
            self.notes += self.of_losses()
        if self.rows:
            self.notes += self.of_batches()
        if self.rows and (self.alone.draws or any(each.draws for each in self.ranks)):
            self.notes.append(RANDOM)
        if not self.compared:
            raise TreeError.of(
                self.name,
                "the two steps have no parameter name or result name in common",
                *self.notes,
                needed="a parameter or a result with the same name in both steps",
                fix="return the loss and the module from both steps",
            )
        return Audit(step, len(self.ranks), tuple(self.rows), self.compared, tuple(self.notes))

    def losses(self, number: int) -> tuple[list[float], list[float]]:
        """Return the losses of a step, of one device and of ranks."""
        alone = [float(x.value.value) for x in self.alone.losses_of(number)]
        ranks = [float(x.value.value) for each in self.ranks for x in each.losses_of(number)]
        return alone, ranks

    def has_right_loss(self, number: int) -> bool | None:
        """Whether the mean or the sum of the losses of ranks is that of one device; None where
        there are none.
        """
        alone, ranks = self.losses(number)
        if not alone or not ranks:
            return None
        one = mean(alone)
        bound = 4 * tolerance(self.alone.losses[0].value.value.dtype) * max(abs(one), 1e-30)
        return abs(one - mean(ranks)) <= bound or abs(one - sum(ranks)) <= bound

    def of_losses(self) -> list[str]:
        """Say whether the losses of the first step that differs agree, or forwards differ."""
        number = self.rows[0].step
        is_right = self.has_right_loss(number)
        if is_right is None:
            return []
        if is_right:
            return [f"the loss of step {number} is right: the difference is in the backward"]
        one, of_ranks = map(mean, self.losses(number))
        return [
            f"the loss of step {number} is {one:.6g} on one device, but {of_ranks:.6g} as the "
            "mean over ranks"
        ]

    def of_batches(self) -> list[str]:
        """Say where the ranks see more or fewer rows than one device."""
        if not self.alone.rows or not all(each.rows for each in self.ranks):
            return []
        one, ranks = self.alone.rows[0], [each.rows[0] for each in self.ranks]
        if one in (sum(ranks), *ranks) or any(sum(ranks) == one * a.size for a in self.axes):
            return []
        return [
            f"the first batch has {one} rows on one device, but {sum(ranks)} rows on all ranks "
            "together"
        ]

    def check(self) -> None:
        """Refuse steps with nothing to compare."""
        for who, each in (("the single-device step", self.alone), ("distributed", self.ranks[0])):
            if not each.start and not each.losses and not each.tensors():
                raise TreeError.of(
                    self.name,
                    f"{who} called no module, took no gradient and returned no tensor",
                    needed="a step with a loss, gradients, parameters or tensors to compare",
                    fix="return the loss and the module",
                )
        if any(each.is_flattened for each in self.ranks):
            raise TreeError.of(
                self.name,
                "FullyShardedDataParallel flattens parameters, so the part of a parameter on a "
                "rank is not a slice of the parameter along a dim",
                needed="whole parameters on each rank, or slices of parameters along a dim",
                fix="use fully_shard or DistributedDataParallel, not FullyShardedDataParallel",
            )
        counts = {len(self.alone.steps), *(len(each.steps) for each in self.ranks)}
        if len(counts) > 1:
            raise DivergenceError.of(
                self.name,
                f"one device takes {len(self.alone.steps)} optimizer steps, but ranks take "
                f"{', '.join(str(len(each.steps)) for each in self.ranks)}",
                needed="as many steps on one device as on each rank",
                fix="write another single-device step, if the number of steps depends on the "
                "number of ranks",
            )

    # What is compared

    def compare_starts(self) -> None:
        """Compare the values that parameters begin with."""
        wrong: dict[str, list[int]] = {}
        for rank, (each, names, held) in enumerate(
            zip(self.ranks, self.names, self.held, strict=True)
        ):
            for parameter in each.start:
                name = names[parameter]
                known = held.get(name)
                if known is None or not known.is_equal:
                    wrong.setdefault(name, []).append(rank)
        self.compared += len(self.starts)
        unknown: dict[str, list[int]] = {x: wrong.pop(x) for x in [*wrong] if x not in self.starts}
        for name, ranks in wrong.items():
            cause = APART_START if self.has_other_replicas(name) else OTHER_START
            self.rows.append(Row(name, START, 0, None, math.nan, tuple(ranks), cause))
        everyone = tuple(range(len(self.ranks)))
        for name, x in self.starts.items():
            parts = [
                h.elements.reshape(-1)
                for held in self.held
                for h in held.values()
                if h.name == name
            ]
            elements = torch.cat([torch.zeros(0, dtype=torch.int64), *parts]).unique()
            if len(elements) < x.numel() and name not in wrong:
                cause = f"{x.numel() - len(elements)} of {x.numel()} elements are on no rank"
                self.rows.append(Row(name, START, 0, None, math.nan, everyone, cause))
        is_missing = len(self.rows) > len(wrong)
        for name, ranks in unknown.items():
            if is_missing:
                self.rows.append(Row(name, START, 0, None, math.nan, tuple(ranks), UNKNOWN))
            else:  # besides all that one device has, as an optimizer's own copy
                self.notes.append(f"{name} of {listed(ranks)} is not compared: {UNKNOWN}")

    def has_other_replicas(self, name: str) -> bool:
        """Whether ranks begin with whole parameters of one name that differ."""
        whole = self.starts[name].shape
        values = [
            x.value
            for each, names in zip(self.ranks, self.names, strict=True)
            for parameter, x in each.start.items()
            if names[parameter] == name and x.value.shape == whole
        ]
        return any(not torch.equal(values[0], x) for x in values[1:])

    def compare_step(self, number: int) -> None:
        """Compare what one optimizer step reads and writes."""
        alone = self.alone.steps[number]
        gradients = self.by_name({p: x for p, x in alone.gradients.items() if x is not None})
        scale = max((float(x.abs().max()) for x in gradients.values() if x.numel()), default=0.0)
        hint = self.hint(number)
        ranks = self.gradients_of_ranks(number)
        for name, expected in gradients.items():
            noise = 16 * _eps(expected) * scale
            if self.rounding is not None:
                moved = self.rounding.gradient(number, name)
                noise = self.rounding.bound(moved, expected)
            pairs = self.pairs(name, expected, ranks)
            self.compare(name, GRADIENT, number, pairs, noise, hint)
        for parameter, x in alone.gradients.items():
            if x is None:
                self.compare_without(number, self.names_alone[parameter], ranks)
        self.compare_common_ratio()
        rows, self.rows = self.rows, []
        wrong = {row.name for row in rows if not row.cause.startswith(UNREDUCED)}
        for name, after in self.by_name(alone.after).items():
            if name not in wrong:
                self.compare_update(number, name, after)
        self.rows = [row for row in rows if not self.is_reduced_later(row)] + [
            row for row in self.rows if row.name not in {x.name for x in rows}
        ]

    def is_reduced_later(self, row: Row) -> bool:
        """Return whether gradients are each rank's own, and parameters after the step are right:
        the optimizer reduces them, or the ranks average what they have.
        """
        if not row.cause.startswith(UNREDUCED) or row.name in {x.name for x in self.rows}:
            return False
        before = self.before(row.step)[row.name]
        after = self.by_name(self.alone.steps[row.step].after)[row.name]
        return self.alone.has_stepped and size(after - before) > TELLING * rounding_of(after)

    def compare_without(self, number: int, name: str, ranks: Sequence[Mapping[Any, Any]]) -> None:
        """Compare a gradient that one device has not, which is one of zeros."""
        zeros = torch.zeros_like(self.starts[name])
        pairs = self.pairs(name, zeros, ranks)
        sizes = {r: size(p.value) for r, p in pairs.items() if p.value is not None}
        if wrong := tuple(rank for rank, x in sizes.items() if x):
            largest = max(sizes.values())
            self.rows.append(Row(name, GRADIENT, number, None, largest, wrong, FROZEN))

    def gradients_of_ranks(self, number: int) -> list[dict[nn.Parameter, LocalValue | None]]:
        """Return the gradients of each rank. Those that DTensors leave Partial are reduced: an
        optimizer that reads them does that.
        """
        steps = [each.steps[number].gradients for each in self.ranks]
        named = [
            {names[p]: x for p, x in gradients.items()}
            for names, gradients in zip(self.names, steps, strict=True)
        ]
        whole = {
            name: reduced([each.get(name) for each in named])
            for name in {name for each in named for name in each}
        }
        return [
            {p: whole[names[p]][rank] for p in gradients}
            for rank, (names, gradients) in enumerate(zip(self.names, steps, strict=True))
        ]

    def by_name(self, values: Mapping[nn.Parameter, LocalValue]) -> dict[str, torch.Tensor]:
        """Return values of the single-device program by name."""
        return {self.names_alone[p]: x.value for p, x in values.items()}

    def pairs(
        self, name: str, expected: torch.Tensor, ranks: Sequence[Mapping[Any, LocalValue | None]]
    ) -> dict[int, Pair]:
        """Pair a value of one device with those of the ranks that hold parts of its parameter."""
        flat = expected.reshape(-1)
        pairs = {}
        for rank, (values, names, held) in enumerate(
            zip(ranks, self.names, self.held, strict=True)
        ):
            for parameter, x in values.items():
                known = held.get(names[parameter])
                if known is not None and known.name == name:
                    value = None if x is None else x.value.reshape(known.elements.shape)
                    pairs[rank] = Pair(value, flat[known.elements], known.elements)
        return pairs

    def compare(
        self,
        name: str,
        kind: str,
        number: int,
        pairs: Mapping[int, Pair],
        noise: float,
        hint: str | None = None,
    ) -> None:
        """Compare one value, and note a row if it differs."""
        self.compared += 1
        dtypes = [x.dtype for p in pairs.values() for x in (p.value, p.expected) if x is not None]
        largest = max(
            (float(p.expected.abs().max()) for p in pairs.values() if p.expected.numel()),
            default=0.0,
        )
        bound = tolerance(*dtypes) * largest + noise
        found = difference(pairs, self.axes, bound, hint, is_summed=kind != AFTER)
        if found is not None:
            self.note(name, kind, number, found)

    def note(self, name: str, kind: str, number: int, found: Difference) -> None:
        """Note a row."""
        self.rows.append(
            Row(name, kind, number, found.ratio, found.largest, found.ranks, found.cause)
        )

    def compare_common_ratio(self) -> None:
        """Say of gradients that all are scaled by one number what that looks like."""
        slack = 1e-3 if self.rounding is None else 8 * self.rounding.eps
        ratios = [row.ratio for row in self.rows if row.ratio is not None]
        whole = [row for row in self.rows if row.cause.endswith(": scaled")]
        are_equal = ratios and max(ratios) - min(ratios) < slack * abs(max(ratios))
        if len(whole) == len(self.rows) > 1 and are_equal:
            text = (
                "every gradient is scaled by the same factor: the loss or the clipping norm differs"
            )
            self.rows = [
                attrs.evolve(row, cause=row.cause.replace(": scaled", f": {text}"))
                for row in self.rows
            ]

    def compare_update(self, number: int, name: str, after: torch.Tensor) -> None:
        """Compare how an optimizer has changed a parameter whose gradient is right."""
        before = self.before(number)[name]
        steady = self.steady(number, name).reshape(-1)
        written = self.pairs(name, after - before, [s.steps[number].after for s in self.ranks])
        read = self.pairs(name, before, [s.before(number) for s in self.ranks])
        values: dict[int, Pair] = {}
        for rank, pair in written.items():
            start = read[rank].value if rank in read else None
            here = steady[pair.elements]
            is_known = pair.value is not None and start is not None
            value = (pair.value - start) * here if is_known else None  # type: ignore[operator]
            values[rank] = Pair(value, pair.expected * here, pair.elements)
        noise = rounding_of(after)
        if self.rounding is not None:
            moved = self.rounding.after(number, name)
            update = (after - before).reshape(-1) * steady
            noise += self.rounding.bound(
                None if moved is None else moved.reshape(-1) * steady, update
            )
        rows = len(self.rows)
        self.compare(name, AFTER, number, values, noise)
        if len(self.rows) > rows and (row := self.rows[-1]).ratio is not None:
            words = row.cause
            for gradients, updates in OF_UPDATES.items():
                words = words.replace(gradients, updates)
            self.rows[-1] = attrs.evolve(row, cause=f"the update is {words}")

    def steady(self, number: int, name: str) -> torch.Tensor:
        """Return the elements of a parameter whose updates are no noise. An adaptive optimizer
        divides by the size of gradients: where one is noise, its sign and the update are.
        """
        found = torch.ones_like(self.starts[name], dtype=torch.bool)
        for step in self.alone.steps[: number + 1]:
            gradient = self.by_name({p: x for p, x in step.gradients.items() if x is not None})
            if step.is_adaptive and name in gradient:
                g = gradient[name].abs()
                found &= g > 100 * tolerance(g.dtype) * g.max()
        for earlier in range(number + 1 if self.rounding is not None else 0):
            assert self.rounding is not None
            moved, step = self.rounding.gradient(earlier, name), self.alone.steps[earlier]
            gradient = self.by_name({p: x for p, x in step.gradients.items() if x is not None})
            if step.is_adaptive and moved is not None and name in gradient:
                found &= (
                    gradient[name].abs()
                    > 20 * moved + 4 * self.rounding.eps * gradient[name].abs().max()
                )
        return found

    def before(self, number: int) -> dict[str, torch.Tensor]:
        """Return the single-device parameters before a step."""
        return self.by_name(self.alone.before(number))

    def hint(self, number: int) -> str | None:
        """Say whether the loss of a step is a mean of means."""
        losses = [each.losses_of(number) for each in self.ranks]
        rows = [each.rows for each in self.ranks]
        eps = 2 * self.rounding.eps if self.rounding is not None else 0.0
        found = mean_of_means(losses, rows, self.alone.losses_of(number), self.axes, eps)
        if found is not None:
            self.notes.append(f"the loss of step {number} is {found}")
        return found

    def compare_buffers(self) -> None:
        """Compare the buffers at the end."""
        alone = self.alone.buffers()
        found = [each.buffers() for each in self.ranks]
        for name, x in alone.items():
            noise = 0.0
            if self.rounding is not None:
                noise = self.rounding.bound(self.rounding.buffer(name), x.value)
            self.compare_named(name, BUFFER, x.value, [each.get(name) for each in found], noise)

    def compare_results(self) -> None:
        """Compare the tensors that the steps return."""
        found = [each.tensors() for each in self.ranks]
        alone = self.alone.tensors()
        for path in {path for each in found for path in each} ^ alone.keys():
            who = "one device returns" if path in alone else "ranks return"
            self.notes.append(f"only {who} {path or 'a tensor'}, so it is not compared")
        for path in alone.keys() & {path for each in found for path in each}:
            x, values = alone[path], [each.get(path) for each in found]
            name, noise = path or "the result", 0.0
            if self.rounding is not None:
                noise = self.rounding.bound(self.rounding.result(path), x.value)
            if x.value.numel() == 1 and all(v is None or v.value.numel() == 1 for v in values):
                self.compare_scalar(name, x.value, values, noise)
            else:
                self.compare_named(name, RESULT, x.value, values, noise)

    def compare_scalar(
        self, name: str, expected: torch.Tensor, values: Sequence[LocalValue | None], noise: float
    ) -> None:
        """Compare a number, such as a loss: of all ranks, or of each rank's part."""
        self.compared += 1
        numbers = [float(v.value) for v in values if v is not None]
        want = float(expected)
        bound = 4 * tolerance(expected.dtype) * max(abs(want), 1e-30) + noise
        right = lambda x: abs(x - want) <= bound
        if not numbers or all(map(right, numbers)):
            return
        is_one = all(abs(x - numbers[0]) <= bound for x in numbers)
        of_parts = [mean(numbers), sum(numbers), *self.sums(numbers), *self.weighted(numbers)]
        if not is_one and any(map(right, of_parts)):
            return
        pairs = {
            r: Pair(
                None if v is None else v.value.reshape(()), expected.reshape(()), torch.zeros(())
            )
            for r, v in enumerate(values)
        }
        found = difference(pairs, self.axes, bound, self.hint(0))
        if found is not None:
            self.note(name, LOSS if expected.is_floating_point() else RESULT, 0, found)

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums of a number over each axis, where the groups agree."""
        found = []
        for axis in self.axes:
            sums = [sum(numbers[r] for r in group if r < len(numbers)) for group in axis.groups]
            if max(sums) - min(sums) <= 1e-6 * max(map(abs, sums)):
                found.append(sums[0])
        return found

    def weighted(self, numbers: Sequence[float]) -> list[float]:
        """Return the mean of losses weighted by their elements, if those are known."""
        counts = [each.losses[-1].count for each in self.ranks if each.losses]
        known = [c for c in counts if c is not None]
        return [mean(numbers, known)] if len(known) == len(numbers) else []

    def compare_named(
        self,
        name: str,
        kind: str,
        expected: torch.Tensor,
        values: Sequence[LocalValue | None],
        noise: float,
    ) -> None:
        """Compare a tensor with those of ranks, which may be parts of it."""
        pairs = {}
        for rank, x in enumerate(values):
            if x is not None and (pair := _closest(expected, x)) is not None:
                pairs[rank] = pair
        apart = [rank for rank in range(len(values)) if rank not in pairs]
        if apart:
            shape = [*expected.shape]
            self.notes.append(
                f"{kind} {name}, {shape} on one device, is not compared on {listed(apart)}: it "
                "is missing there, or is not a shard of that tensor"
            )
        if pairs:
            self.compare(name, kind, len(self.alone.steps) - 1, pairs, noise)


def _closest(expected: torch.Tensor, x: LocalValue) -> Pair | None:
    """Pair a tensor of a rank with the part of a single-device one that is the closest to it."""
    elements = x.elements()
    flat = expected.reshape(-1)
    if elements is not None:
        if tuple(expected.shape) != x.shape:
            return None
        return Pair(x.value, flat[elements], elements)
    parts = [e for e, _, _ in parts_of(expected.shape, x.value.shape)]
    pairs = [Pair(x.value, flat[e].reshape(x.value.shape), e) for e in parts]
    return min(pairs, key=_apart, default=None)


def _apart(pair: Pair) -> tuple[float, float]:
    """Measure how far a tensor is from a multiple of another, and that multiple from 1."""
    assert pair.value is not None
    x, y = pair.value.double().reshape(-1), pair.expected.double().reshape(-1)
    ratio = float(x @ y) / max(float(y @ y), 1e-300)
    return round(float((x - ratio * y).norm() / max(float(x.norm()), 1e-300)), 6), abs(ratio - 1)


def _eps(x: torch.Tensor) -> float:
    return torch.finfo(x.dtype).eps if x.dtype.is_floating_point else 0.0


def rounding_of(after: torch.Tensor) -> float:
    """Return how far rounding may move a parameter that an optimizer writes."""
    return 8 * _eps(after) * size(after)


def _close(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether parameters are equal, but for the rounding of their making."""
    if x.numel() != y.numel():
        return False
    x = x.reshape(y.shape)
    bound = tolerance(x.dtype, y.dtype)
    return not x.numel() or bool((x - y).abs().max() <= bound * max(float(y.abs().max()), 1e-30))
