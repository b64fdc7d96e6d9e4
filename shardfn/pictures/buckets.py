"""A bucket plan: the bytes of each bucket, in the order in which they are filled."""

from __future__ import annotations

from collections.abc import Sequence

from ..buckets import BucketPlan
from ..byte_sizes import human_bytes
from .bars import Bar, bars, keys
from .collectives import colours_of
from .sheet import Sheet

FAR = 3  # a cap of so many times the largest bucket is not drawn


def buckets(x: BucketPlan) -> Sheet:
    """Lay out the picture of a bucket plan."""
    every = [*x.buckets, *x.unbucketed]
    colours = colours_of(f"{b.kind} over {b.axis}" for b in every)
    largest = max((b.nbytes for b in every), default=0)
    drawn = [
        Bar(
            f"{b.index}: {_some(b.leaves)}",
            b.nbytes,
            f"{human_bytes(b.nbytes)}{' (over its cap)' if b.extended else ''}",
            colours[f"{b.kind} over {b.axis}"],
            f"ready after {b.ready}",
            mark=b.cap if b.cap <= FAR * largest else None,
        )
        for b in x.buckets
    ]
    drawn += [
        Bar(
            f"in no bucket: {_some(b.leaves)}",
            b.nbytes,
            human_bytes(b.nbytes),
            colours[f"{b.kind} over {b.axis}"],
            f"ready after {b.ready}",
        )
        for b in x.unbucketed
    ]
    count = len(x.buckets)
    total = human_bytes(sum(b.nbytes for b in every))
    lines = [
        f"{x.name}: {count} {'bucket' if count == 1 else 'buckets'}, {total} a rank",
        f"mesh {x.mesh}; buckets in the order in which they fill",
    ]
    notes = ["A line across a bar is the cap at which the bucket closes."]
    has_caps = any(bar.mark is not None for bar in drawn)
    texts = (
        ("reduced outside of buckets", x.ignored),
        ("gradient is zero: nothing to send", x.unused),
        ("nothing to send", x.local),
        ("returned unreduced", x.unreduced),
    )
    notes = notes if has_caps else []
    notes += [f"{text}: {_some(leaves)}" for text, leaves in texts if leaves]
    panels = [bars(drawn, most=24), keys([(c, text, None) for text, c in colours.items()])]
    return Sheet(lines, panels if drawn else [], notes)


def _some(leaves: Sequence[str], most: int = 2) -> str:
    """Print the first leaves, and how many more there are."""
    more = f" and {len(leaves) - most} more" if len(leaves) > most else ""
    return ", ".join(leaves[:most]) + more
