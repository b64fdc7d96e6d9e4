"""The comparison of two recorded runs by their digests: that of a cluster with that of a laptop,
or two of a cluster.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch

from ...errors import DivergenceError, ShardError, call_site, listed
from ...types import REDUCTIONS, MeshAxes
from .read_digests import FIX, RecordedCall, RecordedValue, read_digests
from .rounding import epsilons

JUMP = 32.0  # how much more than its inputs a value must differ to differ by itself
SUMS = ("add", "sub", "sum", "mean")  # ops whose results may cancel
ROUNDINGS = 16.0  # of a value that has no differing input


@attrs.frozen
class DigestDifference:
    """A value that differs more between two recorded runs than the inputs of its op.

    Args:
        call: the number of the call, from 0.
        name: the name of the called function.
        value: the name of the value in the program.
        op: the op that computes the value.
        line: the user's source line as `file:line`, or None.
        phase: "forward" or "backward".
        a: the placements of the value in run a, as text.
        b: the placements of the value in run b, as text.
        difference: the relative difference of the norms or projections, or None if only the bytes
            of local tensors can be compared.
        inputs: the largest relative difference of an input of the op.
        ranks: the ranks whose bytes differ, if both runs have the same layout.
    """

    call: int
    name: str
    value: str
    op: str
    line: str | None
    phase: str
    a: str
    b: str
    difference: float | None
    inputs: float
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        where = f" at {self.line}" if self.line else ""
        size = "" if self.difference is None else f" by {self.difference:.1e} of its norm"
        lines = [
            f"{self.op}{where}, {self.phase}, in call {self.call} of {self.name}: differs{size}"
        ]
        lines.append(f"  its inputs by {self.inputs:.1e}")
        lines += [f"  a: {self.a}", f"  b: {self.b}"]
        if self.ranks:
            lines.append(f"  other bytes on {listed(self.ranks)}")
        return "\n".join(lines)


@attrs.frozen
class DigestComparison:
    """The comparison of two recorded runs, whose truth value is True if no value differs more than
    its inputs.

    Args:
        a: the path of the first run.
        b: the path of the second run.
        values: the number of compared values.
        same: the number of compared values with equal bytes on all ranks.
        differences: the values that differ by more than rounding and by more than their inputs, in
            order.
        first_bytes: the first value whose bytes differ, or None; always None if the layouts of the
            runs differ.
    """

    a: str
    b: str
    values: int
    same: int
    differences: tuple[DigestDifference, ...]
    first_bytes: str | None

    @property
    def equal(self) -> bool:
        """Whether no value differs more than its inputs."""
        return not self.differences

    @property
    def first(self) -> DigestDifference | None:
        """The first value that differs, or None if no value differs."""
        return self.differences[0] if self.differences else None

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        lines = [f"compare digests, a: {self.a}, b: {self.b}"]
        lines.append(f"  {self.values} values, {self.same} of them with equal bytes on all ranks")
        if self.first_bytes is not None:
            lines.append(f"  the first value with different bytes: {self.first_bytes}")
        if self.first is None:
            lines.append("  every difference is explained by rounding or by different inputs")
            return "\n".join(lines)
        head, *rest = str(self.first).split("\n")
        lines += [f"  first: {head}", *(f"  {x}" for x in rest)]
        if len(self.differences) > 1:
            lines.append(f"  {len(self.differences) - 1} later values also begin a new difference")
        return "\n".join(lines)

    __repr__ = __str__


def compare_digests(*paths: Any, raises: bool = False) -> DigestComparison:
    """Compare two recorded runs.

    Raises:
        ShardError: not two paths, no digests, or runs of other calls.
        DivergenceError: a value differs, and `raises` is set.
    """
    if len(paths) != 2 or not all(isinstance(x, str | os.PathLike) for x in paths):
        got = f"the first argument is a path, and {len(paths)} arguments are given"
        needed = "the paths of two folders of digests"
        raise ShardError.of("compare", got, needed=needed, fix=FIX, source=call_site())
    a, b = (read_digests(path) for path in paths)
    names = [[_function(call.name) for call in calls] for calls in (a, b)]
    if len(a) != len(b):
        got = f"{paths[0]} has {len(a)} calls, {paths[1]} has {len(b)}"
        fix = "compare runs with the same number of steps, each in its own folder"
        raise ShardError.of("compare", got, fix=fix, source=call_site())
    if names[0] != names[1]:
        first = next(i for i, (x, y) in enumerate(zip(*names, strict=True)) if x != y)
        got = f"call {first} is {a[first].name} in a, {b[first].name} in b"
        fix = "compare two runs of the same script"
        raise ShardError.of("compare", got, fix=fix, source=call_site())
    rows = [row for i, pair in enumerate(zip(a, b, strict=True)) for row in _pairs(i, *pair)]
    wrong = tuple(row.difference for row in rows if row.difference is not None)
    unequal = [row for row in rows if row.unequal]
    result = DigestComparison(
        os.fspath(paths[0]),
        os.fspath(paths[1]),
        len(rows),
        sum(row.is_same for row in rows),
        wrong,
        unequal[0].text if unequal else None,
    )
    if raises and wrong:
        line = wrong[0].line
        raise DivergenceError.of("compare", *str(result).split("\n")[1:], source=line)
    return result


def _function(name: str) -> str:
    """The name of a function without the transform that placed it or not: a run on one device is
    compared with one on a mesh.
    """
    for verb in ("shard(", "jit("):
        if name.startswith(verb):
            return name.removeprefix(verb).removesuffix(")")
    return name


@attrs.frozen(eq=False)
class _Pair:
    text: str
    is_same: bool
    unequal: tuple[int, ...]
    difference: DigestDifference | None


def _pairs(number: int, a: RecordedCall, b: RecordedCall) -> Iterator[_Pair]:
    """Compare the values of two calls, in order."""
    sizes: dict[str, float] = {}  # the difference of each value so far
    for name, x, y in _aligned(a, b):
        is_one_layout = x.placements == y.placements and a.axes == b.axes
        unequal: tuple[int, ...] = ()
        if is_one_layout:
            both = x.hashes.keys() & y.hashes.keys()
            unequal = tuple(sorted(r for r in both if x.hashes[r] != y.hashes[r]))
        scale = _scale(x, a.values)
        size = 0.0 if is_one_layout and not unequal else _distance(x, y, scale)
        inputs = max((sizes.get(read, 0.0) for read in x.reads), default=0.0)
        is_wrong = size is not None and size > _bound(x, y) + JUMP * inputs
        if size is not None:
            # what comes after is measured by this one
            sizes[name] = size
        line = f" at {os.path.basename(x.line)}" if x.line else ""
        difference = None
        if is_wrong:
            texts = (str(MarksText(x.placements, a.axes)), str(MarksText(y.placements, b.axes)))
            difference = DigestDifference(
                number, a.name, name, x.op, x.line, x.phase, *texts, size, inputs, unequal
            )
        yield _Pair(f"{x.op}{line}", is_one_layout and not unequal, unequal, difference)


def _aligned(
    a: RecordedCall, b: RecordedCall
) -> Iterator[tuple[str, RecordedValue, RecordedValue]]:
    """Pair the values of two calls: by order, where their programs are not the same."""
    one, two = list(a.values.values()), list(b.values.values())
    keys = [[(x.op, x.shape, x.phase) for x in values] for values in (one, two)]
    for block in difflib.SequenceMatcher(None, *keys, autojunk=False).get_matching_blocks():
        for i in range(block.size):
            x = one[block.a + i]
            yield x.value, x, two[block.b + i]


@attrs.frozen
class MarksText:
    """Placements as a user writes them, by axis."""

    marks: tuple[Any, ...]
    axes: MeshAxes

    def __str__(self) -> str:
        rows: Iterable[tuple[str, Any]] = zip(self.axes.names, self.marks, strict=True)
        shown = [
            f"{axis}: {'replicated' if m == 'R' else f'Partial {m}' if m in REDUCTIONS else m}"
            for axis, m in rows
        ]
        return ", ".join(shown) or "one device"


def _scale(x: RecordedValue, values: Mapping[str, RecordedValue]) -> float:
    """The norm of what an op adds up, by which a sum rounds however much of it cancels."""
    if x.op not in SUMS:
        return 0.0
    norms = [values[read].norm for read in x.reads if read in values]
    return max((n for n in norms if n is not None and math.isfinite(n)), default=0.0)


def _distance(x: RecordedValue, y: RecordedValue, scale: float) -> float | None:
    """The difference of two values, in units of their norm; None if it is unknown."""
    sizes = [abs(n) for v in (x, y) for n in (v.norm, v.projection) if n is not None]
    scale = max([scale, *(n for n in sizes if math.isfinite(n))])
    found = []
    for one, two in ((x.norm, y.norm), (x.projection, y.projection)):
        if one is None or two is None:
            continue
        if math.isfinite(one) != math.isfinite(two):
            return math.inf
        if math.isfinite(one):
            found.append(abs(one - two) / scale if scale else abs(one - two))
    return max(found, default=None)


def _bound(x: RecordedValue, y: RecordedValue) -> float:
    """How far two values may differ by rounding, in units of their norm."""
    dtypes = [getattr(torch, name) for name in (x.dtype, y.dtype)]
    floats = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    if not floats:
        return 0.0
    eps = max(epsilons(dtype)[0] for dtype in floats)
    return ROUNDINGS * eps * (1.0 + math.log2(max(x.length, 1)))
