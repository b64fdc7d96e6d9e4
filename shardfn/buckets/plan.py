"""The bucket plan, which lists the gradients that share a collective. A bucket plan can be printed,
hashed, saved and edited.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs

from .._compat import constant_in_graph
from ..accepted import accept
from ..byte_sizes import human_bytes
from ..errors import TreeError
from ..extensions import page_of
from .reading import read
from .records import Bucket, Row, Unbucketed, uneven

SHOWN = 8  # problems in an error


@attrs.frozen
class BucketPlan:
    """The buckets of a program, in the order in which the program fills them. All ranks have the
    same bucket plan.

    Args:
        name: the name of the program.
        mesh: the axes of the mesh, as text.
        buckets: the buckets, each of which is one collective.
        ignored: the paths of the leaves whose gradients are reduced one by one, outside of the
            buckets.
        unused: the leaves on which the loss does not depend. The gradient of an unused leaf is
            zero, and is not sent.
        local: the paths of the leaves whose gradients need no communication.
        unreduced: the leaves whose gradients are returned as Partial, for a later program to
            reduce.
        unbucketed: the collectives of gradients that belong to no bucket, such as those in loops
            and branches.

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
        """The paths of all leaves of the bucket plan, each listed once."""
        sent = (leaf for b in (*self.buckets, *self.unbucketed) for leaf in b.leaves)
        return tuple(dict.fromkeys((*sent, *self._others)))

    @property
    def _others(self) -> tuple[str, ...]:
        """The leaves that are in no bucket."""
        return (*self.ignored, *self.unused, *self.local, *self.unreduced)

    def merge(self, *indices: int) -> BucketPlan:
        """Return the bucket plan with the given buckets merged into one bucket, at the position of
        the first of these buckets.

        Raises:
            TreeError: one of the buckets does not exist, or one collective cannot send all the
                buckets.
        """
        for index in indices:
            accept("BucketPlan.merge", indices=index)
        if not indices:
            raise TreeError.of(
                "BucketPlan.merge", "the list of buckets is empty", fix="plan.merge(0, 1)"
            )
        chosen = [self._bucket(i) for i in sorted(set(indices))]
        kinds = {(b.kind, b.axis, b.op, b.dtype, b.phase, b.region) for b in chosen}
        if len(kinds) != 1:
            lines = [
                f"bucket {b.index}: {b.kind} over {b.axis}, {b.op}, {b.dtype}, {b.phase}"
                for b in chosen
            ]
            fix = (
                "merge only buckets of one call of bucketed_grad that have equal kind, axis, "
                "reduction, dtype and phase (forward or backward)"
            )
            raise TreeError.of(
                "BucketPlan.merge",
                "these buckets cannot be merged into one collective",
                *lines,
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
            one if b is chosen[0] else b for b in self.buckets if b is chosen[0] or b not in chosen
        ]
        return self.renumbered(rest)

    def split(self, index: int, at: int) -> BucketPlan:
        """Return the bucket plan with one bucket split in two, before the leaf at position `at` of
        the bucket.

        Raises:
            TreeError: the bucket does not exist, or one of the two new buckets would have no
                leaves.
        """
        accept("BucketPlan.split", index=index, at=at)
        whole = self._bucket(index)
        if not 0 < at < len(whole.leaves):
            fix = f"split at a number of leaves between 1 and {len(whole.leaves) - 1}"
            raise TreeError.of(
                "BucketPlan.split",
                f"bucket {index} has {len(whole.leaves)} leaves, and cannot be split at {at}",
                fix=fix,
            )
        front = attrs.evolve(whole, leaves=whole.leaves[:at], sizes=whole.sizes[:at])
        back = attrs.evolve(whole, leaves=whole.leaves[at:], sizes=whole.sizes[at:], riding=0)
        return self.renumbered([*self.buckets[:index], front, back, *self.buckets[index + 1 :]])

    def _bucket(self, index: int) -> Bucket:
        if not 0 <= index < len(self.buckets):
            fix = f"buckets 0 to {len(self.buckets) - 1}"
            raise TreeError.of("BucketPlan", f"there is no bucket {index}", fix=fix)
        return self.buckets[index]

    def renumbered(self, buckets: Iterable[Bucket]) -> BucketPlan:
        """Return a copy of the bucket plan that contains the given buckets, numbered from 0."""
        return attrs.evolve(
            self, buckets=tuple(attrs.evolve(b, index=i) for i, b in enumerate(buckets))
        )

    def _repr_html_(self) -> str | None:
        """Draw a picture in a notebook."""
        return page_of(self)

    def to_json(self) -> str:
        """Return the bucket plan as JSON text."""
        return json.dumps(attrs.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> BucketPlan:
        """Parse a bucket plan from JSON text.

        Raises:
            TreeError: the text is not a bucket plan. The TreeError lists the wrong values in the
                text.
        """
        plan, wrong = read(cls, text, required=["buckets"])
        if not wrong and (problem := uneven(plan.buckets)):
            wrong = [problem]
        if wrong:
            got = [f"not a bucket plan: {wrong[0]}", *wrong[1:SHOWN]]
            fix = "a file that BucketPlan.save wrote"
            raise TreeError.of("BucketPlan.from_json", *got, fix=fix)
        return plan

    def rows(
        self, name: str, leaves: Sequence[str], region: int | None = None
    ) -> dict[str, list[Row]]:
        """Return, for each leaf, a list with one `Row` for each bucket that contains the leaf.

        Two buckets with the same `index` are treated as one bucket.

        Args:
            name: the name of the function that uses the plan, for error messages.
            leaves: the paths of the parameters that the function differentiates.
            region: the index of a `bucketed_grad` call in the program. With `region`, the result of
                `rows` contains only the buckets of this `bucketed_grad` call. By default, the
                result of `rows` contains the buckets of all `bucketed_grad` calls.

        Raises:
            TreeError: the leaves of the plan differ from `leaves`, or the buckets of the plan
                contradict each other.
        """
        self._refuse_contradictions(name)
        mine = [b for b in self.buckets if region is None or b.region == region]
        self._refuse_other_leaves(name, leaves, mine)
        numbers = dict.fromkeys(b.index for b in self.buckets)
        order = {index: i for i, index in enumerate(numbers)}
        places = dict.fromkeys(order, 0)  # how many leaves of each bucket were seen
        rows: dict[str, list[Row]] = {leaf: [] for leaf in leaves}
        for b in mine:
            for leaf, size in zip(b.leaves, b.sizes, strict=True):
                row = Row(
                    bucket=order[b.index],
                    kind=b.kind,
                    axis=b.axis,
                    phase=b.phase,
                    dtype=b.dtype,
                    nbytes=size,
                    cap=b.cap,
                    region=b.region,
                    place=places[b.index],
                    op=b.op,
                )
                places[b.index] += 1
                if leaf in rows:
                    rows[leaf].append(row)
        return rows

    def _refuse_other_leaves(
        self, name: str, leaves: Sequence[str], mine: Sequence[Bucket]
    ) -> None:
        """Refuse a plan that lacks leaves of a function, or has others."""
        sent = (leaf for b in (*mine, *self.unbucketed) for leaf in b.leaves)
        known = {*sent, *self._others}
        one_region = len({b.region for b in mine}) < 2
        others = [x for x in self.leaves if x in known and x not in leaves]
        extra = others if one_region else []
        missing = [x for x in leaves if x not in known]
        if extra or missing:
            lines = [
                *(f"the plan has also {x}" for x in extra),
                *(f"the plan lacks {x}" for x in missing),
            ]
            fix = "use the plan of the same function: fn.lower(...).plan"
            raise TreeError.of(
                f"{name}, plan",
                "the bucket plan has other leaves than the function",
                *lines,
                fix=fix,
                arg_path=(extra + missing)[0],
            )

    def _refuse_contradictions(self, name: str) -> None:
        """Refuse buckets that contradict each other."""
        numbers = {b.index for b in self.buckets}
        if len(numbers) < len({(b.index, b.region) for b in self.buckets}):
            fix = "plan.renumbered(buckets)"
            got = "buckets of two calls of bucketed_grad have the same index"
            raise TreeError.of(f"{name}, plan", got, fix=fix)
        if got := uneven(self.buckets):
            fix = "give a size in bytes for each leaf, in the order of the leaves"
            raise TreeError.of(f"{name}, plan", got, fix=fix)
        if empty := [b.index for b in self.buckets if not b.leaves]:
            fix = "plan.renumbered(b for b in plan.buckets if b.leaves)"
            got = f"bucket {empty[0]} has no leaves"
            raise TreeError.of(f"{name}, plan", got, fix=fix)

    @constant_in_graph
    def as_constant(self) -> str:
        """Return the bucket plan as JSON text. A function that is being captured may call
        `as_constant`.
        """
        return self.to_json()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the bucket plan to a JSON file."""
        accept("BucketPlan.save", path=path)
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> BucketPlan:
        """Read a bucket plan from a JSON file.

        Raises:
            TreeError: the file cannot be read, or does not contain a bucket plan.
        """
        accept("BucketPlan.load", path=path)
        try:
            text = Path(path).read_text()
        except (OSError, ValueError) as error:
            got, fix = f"{path} cannot be read: {error}", "a file that BucketPlan.save wrote"
            raise TreeError.of("BucketPlan.load", got, fix=fix) from error
        return cls.from_json(text)


def table(plan: BucketPlan) -> str:
    """Print a plan: a line for each bucket, then the leaves and collectives outside of buckets."""
    lines = [f"buckets of {plan.name} on mesh {plan.mesh}: {len(plan.buckets)}"]
    if plan.buckets or plan.unbucketed:
        lines.append(_columns("", "bytes", "collective", "dtype", "ready", "first use", "leaves"))
    for b in plan.buckets:
        size = human_bytes(b.nbytes) + ("+" if b.extended else "")
        leaves = _some(b.leaves) + _riding(b)
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
        size = human_bytes(u.nbytes)
        leaves = _some(u.leaves)
        lines.append(_columns("-", size, _collective(u), u.dtype, u.ready, "", leaves + _where(u)))
    if any(b.extended for b in plan.buckets):
        lines.append("  + the bucket exceeds its cap, because a leaf is never split")
    if plan.unbucketed:
        lines.append(
            "  - the leaf is in no bucket: it is ignored, or its gradient is reduced before "
            "bucketing"
        )
    said = (
        ("reduced outside of buckets", plan.ignored),
        ("gradient is zero: nothing to send", plan.unused),
        ("nothing to send", plan.local),
        ("returned unreduced", plan.unreduced),
    )
    return "\n".join(lines + [f"  {label}: {_some(leaves, 8)}" for label, leaves in said if leaves])


def _columns(*cells: str) -> str:
    """A row of the table."""
    number, size, what, dtype, ready, first_use, leaves = cells
    return f"  {number:>3}  {size:>10}  {what:<26} {dtype:<9} {ready:<30} {first_use:<30} {leaves}"


def _collective(sent: Bucket | Unbucketed) -> str:
    return f"{sent.kind}[{f'{sent.op}, ' if sent.op else ''}{sent.axis}]"


def _where(sent: Bucket | Unbucketed) -> str:
    """Print the loop or branch that contains a collective."""
    times = f", {sent.times} times" if sent.times > 1 else ""
    return f" (inside {sent.inside}{times})" if sent.inside else ""


def _riding(bucket: Bucket) -> str:
    return f", and {human_bytes(bucket.riding)} of results" if bucket.riding else ""


def _some(leaves: Sequence[str], most: int = 3) -> str:
    return ", ".join(leaves[:most]) + (
        f", and {len(leaves) - most} more" if len(leaves) > most else ""
    )
