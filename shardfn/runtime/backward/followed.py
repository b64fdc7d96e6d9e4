"""The input tensors of a call that require gradients in torch's autograd."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from ...buckets import BucketOptions, check_caps

CAPS = "25MB", None, "1GiB"  # of bucketed_grad


@attrs.frozen(eq=False)
class Followed:
    """The tensors of one call that require grad: argument leaves and closed-over tensors.

    Args:
        leaves: their positions among the leaves of (args, kwargs).
        closed_over: those that the function closes over.
        paths: of both, for printed programs and bucket plans.
        are_real: whether each is floating, and not complex.
        on_stages: whether tensors of the call are on stages, so that a pipeline may run them.
    """

    leaves: tuple[int, ...]
    closed_over: tuple[torch.Tensor, ...]
    paths: tuple[str, ...]
    are_real: tuple[bool, ...]
    on_stages: bool = False

    @property
    def wishes(self) -> list[str]:
        """The bucketing options of each gradient, with the caps of `bucketed_grad`."""
        cap, first_cap, in_flight = check_caps("backward", CAPS)
        rows = zip(self.paths, self.are_real, strict=True)
        return [
            BucketOptions(path, cap, first_cap, max_in_flight=in_flight).text if real else ""
            for path, real in rows
        ]

    @property
    def key(self) -> tuple[Any, ...]:
        """A hashable value that is equal for calls that share captures."""
        return self.leaves, tuple(map(id, self.closed_over)), self.paths, self.on_stages
