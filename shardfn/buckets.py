"""The bucket plan: which gradients travel together, as a value that prints, hashes, is saved
and is edited.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from ._compat import constant_in_graph
from .byte_sizes import bytes_of, checked_caps, human_bytes
from .errors import TreeError, problem

__all__ = [
    "Bucket",
    "BucketPlan",
    "Row",
    "Unbucketed",
    "Wish",
    "bytes_of",
    "checked_caps",
    "human_bytes",
    "table",
]


@attrs.frozen
class Bucket:
    """Gradients to reduce, or parameters to gather, that are sent as one collective.

    `nbytes` counts the payload of a rank with full shards: the bytes that are reduced or
    gathered, without the fused small reductions. A program that follows a plan takes from it
    the buckets, their order, and the leaves of each with their order. `cap` is repeated as it
    is. `ready`, `first_use`, `riding`, `inside` and `times` describe the program and are
    computed again.
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
    inside: str = ""  # the loop or branch that sends it, with its line
    times: int = 1  # how often one call of the program sends it

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    @property
    def extended(self) -> bool:
        """Whether it holds more than its cap, since a leaf is never cut."""
        return self.nbytes > self.cap


@attrs.frozen
class Unbucketed:
    """A collective on the way to gradients that is in no bucket: of an ignored leaf, or inside
    of a loop or a branch.
    """

    kind: (
        str  # all_reduce, reduce_scatter, all_to_all, all_gather, halo or ppermute
    )
    axis: str
    op: str | None  # sum, max or min of a reduction
    dtype: str  # as it is sent
    leaves: tuple[str, ...]
    nbytes: int
    ready: str  # the op that makes what is sent
    inside: str = ""  # the loop or branch that sends it, with its line
    times: int = 1  # how often one call of the program sends it


# what a plan says of a leaf: bucket, kind, axis, phase, dtype, bytes, cap, region, place in the
# bucket, op
Row = tuple[int, str, str, str, str, int, int, int, int, str | None]


@attrs.frozen
class BucketPlan:
    """The buckets of a program, in the order in which they are filled; equal on all ranks.

    Args:
        name: of the program.
        mesh: its axes, as text.
        buckets: each one is one collective.
        ignored: leaves that are reduced on their own.
        unused: leaves that the loss does not depend on: their gradient is zero, and nothing is
            sent.
        local: leaves whose gradient needs no communication.
        unreduced: leaves whose gradient is returned as Partial, for a later program to reduce.
        unbucketed: every other collective on the way to a gradient.

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
    unbucketed: tuple[Unbucketed, ...] = ()

    def __str__(self) -> str:
        return table(self)

    @property
    def leaves(self) -> tuple[str, ...]:
        """Every leaf that the plan knows, each once."""
        sent = (
            leaf for b in (*self.buckets, *self.unbucketed) for leaf in b.leaves
        )
        return tuple(dict.fromkeys((*sent, *self._others)))

    @property
    def _others(self) -> tuple[str, ...]:
        """The leaves for which nothing is sent in a bucket."""
        return (*self.ignored, *self.unused, *self.local, *self.unreduced)

    def merge(self, *indices: int) -> BucketPlan:
        """The plan with these buckets as one, in place of the first.

        Raises:
            TreeError: a bucket that does not exist, or buckets that one collective cannot serve.
        """
        if not indices:
            raise TreeError(
                problem(
                    "BucketPlan.merge", "no bucket is named", fix="plan.merge(0, 1)"
                ),
                fix="plan.merge(0, 1)",
            )
        chosen = [self._bucket(i) for i in sorted(set(indices))]
        kinds = {(b.kind, b.axis, b.op, b.dtype, b.phase, b.region) for b in chosen}
        if len(kinds) != 1:
            lines = [
                f"bucket {b.index}: {b.kind} over {b.axis}, {b.op}, {b.dtype}, {b.phase}"
                for b in chosen
            ]
            fix = "buckets of one kind, axis, reduction, dtype and phase, and of one bucketed_grad"
            raise TreeError(
                problem(
                    "BucketPlan.merge",
                    "these buckets cannot be one collective",
                    *lines,
                    fix=fix,
                ),
                fix=fix,
            )
        one = attrs.evolve(
            chosen[0],
            leaves=tuple(x for b in chosen for x in b.leaves),
            sizes=tuple(n for b in chosen for n in b.sizes),
            ready=chosen[-1].ready,
            riding=sum(b.riding for b in chosen),
        )
        rest = [
            one if b is chosen[0] else b
            for b in self.buckets
            if b is chosen[0] or b not in chosen
        ]
        return self.renumbered(rest)

    def split(self, index: int, at: int) -> BucketPlan:
        """The plan with one bucket split in two before its leaf number `at`.

        Raises:
            TreeError: a bucket that does not exist, or a part without leaves.
        """
        whole = self._bucket(index)
        if not 0 < at < len(whole.leaves):
            fix = f"a number of leaves between 1 and {len(whole.leaves) - 1}"
            raise TreeError(
                problem(
                    "BucketPlan.split",
                    f"bucket {index} has {len(whole.leaves)} leaves, cut at {at}",
                    fix=fix,
                ),
                fix=fix,
            )
        front = attrs.evolve(
            whole, leaves=whole.leaves[:at], sizes=whole.sizes[:at]
        )
        back = attrs.evolve(
            whole, leaves=whole.leaves[at:], sizes=whole.sizes[at:], riding=0
        )
        return self.renumbered(
            [*self.buckets[:index], front, back, *self.buckets[index + 1 :]]
        )

    def _bucket(self, index: int) -> Bucket:
        if not 0 <= index < len(self.buckets):
            fix = f"buckets 0 to {len(self.buckets) - 1}"
            raise TreeError(
                problem("BucketPlan", f"there is no bucket {index}", fix=fix),
                fix=fix,
            )
        return self.buckets[index]

    def renumbered(self, buckets: Iterable[Bucket]) -> BucketPlan:
        """The plan with other buckets, counted from 0."""
        return attrs.evolve(
            self,
            buckets=tuple(attrs.evolve(b, index=i) for i, b in enumerate(buckets)),
        )

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
            buckets = tuple(_record(Bucket, b) for b in fields.pop("buckets"))
            unbucketed = tuple(
                _record(Unbucketed, u) for u in fields.pop("unbucketed", ())
            )
            if uneven := _uneven(buckets):
                raise ValueError(uneven)
            others = {k: _tupled(v) for k, v in fields.items()}
            return cls(buckets=buckets, unbucketed=unbucketed, **others)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            fix = "a file that BucketPlan.save wrote"
            raise TreeError(
                problem(
                    "BucketPlan.from_json", f"no bucket plan: {error}", fix=fix
                ),
                fix=fix,
            ) from error

    def rows(
        self, name: str, leaves: Sequence[str], region: int | None = None
    ) -> dict[str, list[Row]]:
        """What the plan says of each leaf, a row for each of its collectives.

        Buckets are counted as they stand in the plan; those of one `index` are one bucket.

        Args:
            name: of the function that is to follow the plan, for errors.
            leaves: the leaves that it differentiates.
            region: which bucketed_grad of the program; any if not given.

        Raises:
            TreeError: a plan for other leaves, or one that contradicts itself.
        """
        self._refuse_contradictions(name)
        mine = [b for b in self.buckets if region is None or b.region == region]
        sent = (leaf for b in (*mine, *self.unbucketed) for leaf in b.leaves)
        known = {*sent, *self._others}
        one = len({b.region for b in mine}) < 2
        extra = (
            [x for x in self.leaves if x in known and x not in leaves]
            if one
            else []
        )
        missing = [x for x in leaves if x not in known]
        if extra or missing:
            also = [f"the plan has also {x}" for x in extra]
            lines = [*also, *(f"the plan lacks {x}" for x in missing)]
            fix = "a plan of this very function: fn.lower(...).plan"
            text = problem(
                f"{name}, plan", "it is a plan for other leaves", *lines, fix=fix
            )
            raise TreeError(text, arg_path=(extra + missing)[0], fix=fix)
        order = {
            index: i
            for i, index in enumerate(dict.fromkeys(b.index for b in self.buckets))
        }
        rows: dict[str, list[Row]] = {x: [] for x in leaves}
        places = dict.fromkeys(order, 0)
        for b in mine:
            for leaf, size in zip(b.leaves, b.sizes, strict=True):
                if leaf in rows:
                    sending = (
                        b.kind,
                        b.axis,
                        b.phase,
                        b.dtype,
                        size,
                        b.cap,
                        b.region,
                    )
                    rows[leaf].append(
                        (order[b.index], *sending, places[b.index], b.op)
                    )
                places[b.index] += 1
        return rows

    def _refuse_contradictions(self, name: str) -> None:
        """Refuse buckets that no program can have."""
        numbers = {b.index for b in self.buckets}
        if len(numbers) < len({(b.index, b.region) for b in self.buckets}):
            fix = "plan.renumbered(buckets)"
            got = "buckets of two bucketed_grads have one number"
            raise TreeError(problem(f"{name}, plan", got, fix=fix), fix=fix)
        if uneven := _uneven(self.buckets):
            fix = "a size in bytes for each leaf, in the order of the leaves"
            raise TreeError(problem(f"{name}, plan", uneven, fix=fix), fix=fix)
        if empty := [b.index for b in self.buckets if not b.leaves]:
            fix = "plan.renumbered(b for b in plan.buckets if b.leaves)"
            got = f"bucket {empty[0]} has no leaves"
            raise TreeError(problem(f"{name}, plan", got, fix=fix), fix=fix)

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


def _record(kind: type, fields: dict[str, Any]) -> Any:
    """A record of a plan from JSON."""
    return kind(**{k: _tupled(v) for k, v in fields.items()})


def _uneven(buckets: Sequence[Bucket]) -> str | None:
    """What is wrong with the first bucket that has not one size for each leaf."""
    wrong = next((b for b in buckets if len(b.leaves) != len(b.sizes)), None)
    if wrong is None:
        return None
    return f"bucket {wrong.index} has {len(wrong.leaves)} leaves and {len(wrong.sizes)} sizes"


def table(plan: BucketPlan) -> str:
    """The plan as text: a line for each bucket, then what travels alone or not at all."""
    lines = [f"buckets of {plan.name} on mesh {plan.mesh}: {len(plan.buckets)}"]
    if plan.buckets or plan.unbucketed:
        lines.append(
            _columns(
                "", "bytes", "collective", "dtype", "ready", "first use", "leaves"
            )
        )
    for b in plan.buckets:
        size, leaves = (
            human_bytes(b.nbytes) + ("+" if b.extended else ""),
            _some(b.leaves) + _riding(b),
        )
        lines.append(
            _columns(
                str(b.index),
                size,
                _collective(b),
                b.dtype,
                b.ready,
                b.first_use,
                leaves + _where(b),
            )
        )
    for u in plan.unbucketed:
        size, leaves = human_bytes(u.nbytes), _some(u.leaves)
        lines.append(
            _columns(
                "-", size, _collective(u), u.dtype, u.ready, "", leaves + _where(u)
            )
        )
    if any(b.extended for b in plan.buckets):
        lines.append("  + over its cap: a leaf is never cut")
    if plan.unbucketed:
        lines.append(
            "  - in no bucket: an ignored leaf, or sent on the way to the gradient"
        )
    said = (
        ("reduced on their own", plan.ignored),
        ("gradient is zero, nothing sent", plan.unused),
        ("nothing to send", plan.local),
        ("returned unreduced", plan.unreduced),
    )
    return "\n".join(
        lines
        + [f"  {label}: {_some(leaves, 8)}" for label, leaves in said if leaves]
    )


def _columns(*cells: str) -> str:
    """A row of the table."""
    number, size, what, dtype, ready, first_use, leaves = cells
    return f"  {number:>3}  {size:>10}  {what:<26} {dtype:<9} {ready:<30} {first_use:<30} {leaves}"


def _collective(sent: Bucket | Unbucketed) -> str:
    return f"{sent.kind}[{f'{sent.op}, ' if sent.op else ''}{sent.axis}]"


def _where(sent: Bucket | Unbucketed) -> str:
    """Where a collective stands that is inside of a loop or a branch."""
    times = f", {sent.times} times" if sent.times > 1 else ""
    return f" (inside {sent.inside}{times})" if sent.inside else ""


def _riding(bucket: Bucket) -> str:
    return f", and {human_bytes(bucket.riding)} of results" if bucket.riding else ""


def _some(leaves: Sequence[str], most: int = 3) -> str:
    return ", ".join(leaves[:most]) + (
        f", and {len(leaves) - most} more" if len(leaves) > most else ""
    )


@attrs.frozen
class Wish:
    """What bucketed_grad wants for one gradient; it travels through capture as the text of a
    prim.
    """

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
        return cls(
            *fields,
            rows=None if rows is None else tuple(tuple(row) for row in rows),
        )
