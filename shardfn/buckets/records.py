"""The records of a bucket plan: buckets, collectives outside of buckets, and the rows of each
leaf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import attrs

from ..ops.text_formats import parse_record, print_record


@attrs.frozen
class Bucket:
    """A set of gradients or parameters that one collective reduces or gathers.

    `nbytes` counts the bytes that the rank with the largest shards reduces or gathers, without the
    small reductions that share the collective. A program that is given a plan uses the buckets of
    the plan, and the leaves of each bucket, in the order of the plan. The fields `ready`,
    `first_use`, `riding`, `inside` and `times` describe one program, so each program that uses the
    plan computes them again.

    Args:
        index: the position of the bucket in the plan, from 0.
        kind: all_reduce, reduce_scatter or all_gather.
        axis: the mesh axis.
        op: the reduction (sum, max or min), or None for an all-gather.
        dtype: the dtype of the data that is sent.
        phase: whether the forward or the backward sends the bucket.
        leaves: the paths of the parameters in the bucket.
        sizes: the size of each leaf, in bytes.
        cap: the size in bytes at which the bucket is closed, so that later gradients go to the next
            bucket.
        ready: the op that computes the last gradient of the bucket.
        first_use: the first op that reads the result of the bucket.
        region: the index of the `bucketed_grad` call in the program, from 0.
        riding: the bytes of small reductions that share the collective, such as the all-reduce of
            the loss.
        inside: the loop or branch that contains the bucket, with its source line, or an empty text.
        times: how often one call of the program sends the bucket.

    Example:
        >>> import torch, shardfn as sf
        >>> loss_fn = lambda w, x: (x @ w["up"] @ w["down"]).square().mean()
        >>> w = {"up": torch.ones(3, 5), "down": torch.ones(5, 2)}
        >>> with sf.fake_world(2):
        ...     mesh = sf.make_mesh((2,), ("dp",))
        ...     step = sf.shard(sf.bucketed_grad(loss_fn), mesh, (sf.P(), sf.P("dp")))
        ...     (bucket,) = step.lower(w, torch.ones(4, 3)).plan.buckets
        >>> bucket.leaves, bucket.nbytes
        (("w['down']", "w['up']"), 100)
    """

    index: int
    kind: str
    axis: str
    op: str | None
    dtype: str
    phase: str
    leaves: tuple[str, ...]
    sizes: tuple[int, ...]
    cap: int
    ready: str
    first_use: str
    region: int = 0
    riding: int = 0
    inside: str = ""
    times: int = 1

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    @property
    def extended(self) -> bool:
        """Whether the bucket is larger than its cap, because a single leaf is never split."""
        return self.nbytes > self.cap


@attrs.frozen
class Unbucketed:
    """A collective that computes a gradient but is in no bucket: a collective of an ignored leaf,
    or one inside a loop or a branch.
    """

    kind: str  # all_reduce, reduce_scatter, all_to_all, all_gather, halo or ppermute
    axis: str
    op: str | None  # sum, max or min of a reduction
    dtype: str  # as it is sent
    leaves: tuple[str, ...]
    nbytes: int
    ready: str  # the op that makes the value that is sent
    inside: str = ""  # the loop or branch that sends it, with its line
    times: int = 1  # how often one call of the program sends it


class Row(NamedTuple):
    """The entry of a bucket plan for one leaf in one bucket."""

    bucket: int
    kind: str
    axis: str
    phase: str
    dtype: str
    nbytes: int
    cap: int
    region: int
    place: int  # in the bucket
    op: str | None

    @property
    def what(self) -> tuple[str, str, str]:
        """A key that identifies one of a leaf's collectives."""
        return self.kind, self.axis, self.phase


@attrs.frozen
class BucketOptions:
    """The bucketing options of one gradient, which the capture stores as the text of a primitive
    op.
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
        return print_record(attrs.astuple(self))

    @classmethod
    def of(cls, text: str) -> BucketOptions:
        """Parse options from the text of a prim."""
        *fields, rows = parse_record(text)
        return cls(*fields, rows=None if rows is None else tuple(Row(*row) for row in rows))


def uneven(buckets: Sequence[Bucket]) -> str | None:
    """Describe the first bucket whose sizes do not match its leaves."""
    wrong = next((b for b in buckets if len(b.leaves) != len(b.sizes)), None)
    if wrong is None:
        return None
    return f"bucket {wrong.index} has {len(wrong.leaves)} leaves and {len(wrong.sizes)} sizes"
