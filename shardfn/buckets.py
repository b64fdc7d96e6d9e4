"""The bucket plan: which gradients travel together, as a value that prints, hashes, is saved and is edited."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import attrs

from ._compat import constant_in_graph
from .errors import ShardError, TreeError, problem

UNITS = {"": 1, "B": 1, **{f"{k}B": 1000**i for i, k in enumerate("KMGT", 1)}, **{f"{k}iB": 1024**i for i, k in enumerate("KMGT", 1)}}
DEFAULT_FIRST = 10**6
CAP_NAMES = ("cap", "first_cap", "max_in_flight")
SIZE_FIX = "a positive int, or text such as '512KB', '25MB' or '1GiB'"
SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def bytes_of(size: int | str) -> int:
    """A number of bytes, written as a number or as text.

    Args:
        size: bytes, or text such as "512KB" (thousands) or "1GiB" (1024s).

    Returns:
        Bytes.

    Raises:
        ValueError: no positive number of bytes.

    Example:
        >>> bytes_of("25MB"), bytes_of("1GiB"), bytes_of(7)
        (25000000, 1073741824, 7)
    """
    if isinstance(size, int) and not isinstance(size, bool):
        n = size
    else:
        found = SIZE.fullmatch(size) if isinstance(size, str) else None
        if found is None or found[2] not in UNITS:
            raise ValueError(f"{size!r} is no number of bytes")
        n = int(Fraction(found[1]) * UNITS[found[2]])
    if n <= 0:
        raise ValueError(f"{size!r} is not positive")
    return n


def checked_caps(name: str, caps: tuple[Any, Any, Any]) -> tuple[int, int, int]:
    """Cap, first cap and bytes in flight, as numbers."""
    sizes: list[int] = []
    for what, size in zip(CAP_NAMES, caps, strict=True):
        try:
            sizes.append(min(DEFAULT_FIRST, sizes[0]) if size is None and what == "first_cap" else bytes_of(size))
        except ValueError as error:
            raise ShardError(problem(f"{name}, {what}", str(error), fix=SIZE_FIX), fix=SIZE_FIX) from None
    if sizes[1] > sizes[0]:
        fix = "the first bucket is to close early: make first_cap at most cap"
        raise ShardError(problem(f"{name}, first_cap", f"first_cap {caps[1]!r} is above cap {caps[0]!r}", fix=fix), fix=fix)
    return sizes[0], sizes[1], sizes[2]


@attrs.frozen
class Bucket:
    """Gradients, or parameters to gather, that travel in one collective.

    `nbytes` counts the whole payload of a rank with full shards: what is reduced, or what is gathered; not what rides along.
    """

    index: int
    kind: str  # all_reduce, reduce_scatter or all_gather
    axis: str
    op: str | None  # sum, max or min; None for a gather
    dtype: str  # as it is sent
    phase: str  # forward or backward
    leaves: tuple[str, ...]
    sizes: tuple[int, ...]  # bytes of each leaf
    cap: int  # bytes at which it closed
    ready: str  # the op that makes the last of it
    first_use: str  # the op that reads it first
    region: int = 0  # which bucketed_grad of the program
    riding: int = 0  # bytes of results that travel along, such as the loss

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    @property
    def extended(self) -> bool:
        """Whether it holds more than its cap, since a leaf is never cut."""
        return self.nbytes > self.cap


# what a plan says of a leaf: bucket, kind, axis, phase, dtype, bytes, cap, region
Row = tuple[int, str, str, str, str, int, int, int]


@attrs.frozen
class BucketPlan:
    """The buckets of a program, in the order in which they are filled; equal on all ranks.

    Args:
        name: of the program.
        mesh: its axes, as text.
        buckets: each one is one collective.
        ignored: leaves that are reduced on their own.
        unused: leaves that the loss does not depend on: their gradient is zero, and nothing is sent.
        local: leaves whose gradient is whole, or in its place, without communication.
        unreduced: leaves whose gradient is returned pending, for a later program to reduce.

    Example:
        >>> BucketPlan("f", "(dp=2)").merge
        <bound method BucketPlan.merge of ...
    """

    name: str
    mesh: str
    buckets: tuple[Bucket, ...] = ()
    ignored: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    unreduced: tuple[str, ...] = ()

    def __str__(self) -> str:
        return table(self)

    @property
    def leaves(self) -> tuple[str, ...]:
        """Every leaf that the plan knows, each once."""
        found = (*(leaf for b in self.buckets for leaf in b.leaves), *self.ignored, *self.unused, *self.local, *self.unreduced)
        return tuple(dict.fromkeys(found))

    def merge(self, *indices: int) -> BucketPlan:
        """The plan with these buckets as one, in place of the first.

        Raises:
            TreeError: a bucket that does not exist, or buckets that one collective cannot serve.
        """
        if not indices:
            raise TreeError(problem("BucketPlan.merge", "no bucket is named", fix="plan.merge(0, 1)"), fix="plan.merge(0, 1)")
        chosen = [self._bucket(i) for i in sorted(set(indices))]
        kinds = {(b.kind, b.axis, b.op, b.dtype, b.phase, b.region) for b in chosen}
        if len(kinds) != 1:
            lines = [f"bucket {b.index}: {b.kind} over {b.axis}, {b.op}, {b.dtype}, {b.phase}" for b in chosen]
            fix = "buckets of one kind, axis, reduction, dtype and phase, and of one bucketed_grad"
            raise TreeError(problem("BucketPlan.merge", "these buckets cannot be one collective", *lines, fix=fix), fix=fix)
        one = attrs.evolve(
            chosen[0],
            leaves=tuple(x for b in chosen for x in b.leaves),
            sizes=tuple(n for b in chosen for n in b.sizes),
            ready=chosen[-1].ready,
            riding=sum(b.riding for b in chosen),
        )
        rest = [one if b is chosen[0] else b for b in self.buckets if b is chosen[0] or b not in chosen]
        return self.renumbered(rest)

    def split(self, index: int, at: int) -> BucketPlan:
        """The plan with one bucket cut in two before its leaf number `at`.

        Raises:
            TreeError: a bucket that does not exist, or a part without leaves.
        """
        whole = self._bucket(index)
        if not 0 < at < len(whole.leaves):
            fix = f"a number of leaves between 1 and {len(whole.leaves) - 1}"
            raise TreeError(problem("BucketPlan.split", f"bucket {index} has {len(whole.leaves)} leaves, cut at {at}", fix=fix), fix=fix)
        front = attrs.evolve(whole, leaves=whole.leaves[:at], sizes=whole.sizes[:at])
        back = attrs.evolve(whole, leaves=whole.leaves[at:], sizes=whole.sizes[at:], riding=0)
        return self.renumbered([*self.buckets[:index], front, back, *self.buckets[index + 1 :]])

    def _bucket(self, index: int) -> Bucket:
        if not 0 <= index < len(self.buckets):
            fix = f"buckets 0 to {len(self.buckets) - 1}"
            raise TreeError(problem("BucketPlan", f"there is no bucket {index}", fix=fix), fix=fix)
        return self.buckets[index]

    def renumbered(self, buckets: Iterable[Bucket]) -> BucketPlan:
        """The plan with other buckets, counted from 0."""
        return attrs.evolve(self, buckets=tuple(attrs.evolve(b, index=i) for i, b in enumerate(buckets)))

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(attrs.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> BucketPlan:
        """The plan that JSON text describes.

        Raises:
            TreeError: the text is no plan.
        """
        try:
            fields = json.loads(text)
            buckets = tuple(Bucket(**{k: _tupled(v) for k, v in b.items()}) for b in fields.pop("buckets"))
            if uneven := next((b for b in buckets if len(b.leaves) != len(b.sizes)), None):
                raise ValueError(f"bucket {uneven.index} has {len(uneven.leaves)} leaves and {len(uneven.sizes)} sizes")
            return cls(buckets=buckets, **{k: _tupled(v) for k, v in fields.items()})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            fix = "a file that BucketPlan.save wrote"
            raise TreeError(problem("BucketPlan.from_json", f"no bucket plan: {error}", fix=fix), fix=fix) from error

    def rows(self, name: str, leaves: Sequence[str], region: int | None = None) -> dict[str, list[Row]]:
        """What the plan says of each leaf: the bucket, kind, axis, phase, dtype, bytes, cap and region of each of its collectives.

        Args:
            name: of the function that is to follow the plan, for errors.
            leaves: the leaves that it differentiates.
            region: which bucketed_grad of the program; any if not given.

        Raises:
            TreeError: a plan for other leaves.
        """
        if len({b.index for b in self.buckets}) < len({(b.index, b.region) for b in self.buckets}):
            fix = "plan.renumbered(buckets)"
            raise TreeError(problem(f"{name}, plan", "buckets of two bucketed_grads have one number", fix=fix), fix=fix)
        mine = [b for b in self.buckets if region is None or b.region == region]
        known = {*(x for b in mine for x in b.leaves), *self.ignored, *self.unused, *self.local, *self.unreduced}
        extra = [x for x in self.leaves if x in known and x not in leaves] if len({b.region for b in mine}) < 2 else []
        missing = [x for x in leaves if x not in known]
        if extra or missing:
            lines = [*(f"the plan has also {x}" for x in extra), *(f"the plan lacks {x}" for x in missing)]
            fix = "a plan of this very function: fn.lower(...).plan"
            raise TreeError(problem(f"{name}, plan", "it is a plan for other leaves", *lines, fix=fix), fix=fix)
        rows: dict[str, list[Row]] = {x: [] for x in leaves}
        for b in mine:
            for leaf, size in zip(b.leaves, b.sizes, strict=True):
                if leaf in rows:
                    rows[leaf].append((b.index, b.kind, b.axis, b.phase, b.dtype, size, b.cap, b.region))
        return rows

    @constant_in_graph
    def as_constant(self) -> str:
        """The plan as text that a function may use while it is traced."""
        return self.to_json()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file."""
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> BucketPlan:
        """The plan in a JSON file."""
        return cls.from_json(Path(path).read_text())


def _tupled(x: Any) -> Any:
    return tuple(x) if isinstance(x, list) else x


def human_bytes(n: float) -> str:
    """A number of bytes for people.

    Example:
        >>> human_bytes(1536)
        '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(n, 1) < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError


def table(plan: BucketPlan) -> str:
    """The plan as text: a line for each bucket, then what travels alone or not at all."""
    lines = [f"buckets of {plan.name} on mesh {plan.mesh}: {len(plan.buckets)}"]
    if plan.buckets:
        lines.append(f"  {'':>3}  {'bytes':>10}  {'collective':<26} {'dtype':<9} {'ready':<30} {'first use':<30} leaves")
    for b in plan.buckets:
        what = f"{b.kind}[{f'{b.op}, ' if b.op else ''}{b.axis}]"
        size = human_bytes(b.nbytes) + ("+" if b.extended else "")
        lines.append(f"  {b.index:>3}  {size:>10}  {what:<26} {b.dtype:<9} {b.ready:<30} {b.first_use:<30} {_some(b.leaves)}{_riding(b)}")
    if any(b.extended for b in plan.buckets):
        lines.append("  + over its cap: a leaf is never cut")
    said = (
        ("reduced on their own", plan.ignored),
        ("gradient is zero, nothing sent", plan.unused),
        ("nothing to send", plan.local),
        ("returned unreduced", plan.unreduced),
    )
    return "\n".join(lines + [f"  {label}: {_some(leaves, 8)}" for label, leaves in said if leaves])


def _riding(bucket: Bucket) -> str:
    return f", and {human_bytes(bucket.riding)} of results" if bucket.riding else ""


def _some(leaves: Sequence[str], most: int = 3) -> str:
    return ", ".join(leaves[:most]) + (f", and {len(leaves) - most} more" if len(leaves) > most else "")


@attrs.frozen
class Wish:
    """What bucketed_grad wants for one gradient; it travels through capture as the text of a prim."""

    leaf: str
    cap: int
    first_cap: int
    ignored: bool = False
    reduce_dtype: str | None = None
    max_in_flight: int = 2**30
    rows: tuple[Row, ...] | None = None  # of a given plan

    @property
    def text(self) -> str:
        return json.dumps(attrs.astuple(self))

    @classmethod
    def of(cls, text: str) -> Wish:
        """The wish that the text of a prim says."""
        *fields, rows = json.loads(text)
        return cls(*fields, rows=None if rows is None else tuple(tuple(row) for row in rows))
