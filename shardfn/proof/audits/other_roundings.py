"""How far rounding moves the values of a step that computes in 16 bits: measured, by runs of the
single-device step with other roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ... import _compat
from .observed import Observed

RUNS = 3
SAFETY = 4.0  # a difference of so many measured ones is no rounding
WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def narrow_eps(seen: Sequence[Observed]) -> float | None:
    """Return the eps of the narrowest dtype in which programs compute; None if it is a wide one."""
    dtypes = {dtype for each in seen for dtype in each.narrow}
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=None)


def otherwise(eps: float, seed: int) -> Callable[[Observed], Any]:
    """Return a context in which a process that is watched rounds otherwise, after its start."""
    return lambda seen: _compat.RoundedOtherwise(eps, seed, lambda: bool(seen.start))


class Rounding:
    """How far rounding moves each value of the single-device step.

    Args:
        alone: what is seen of one device.
        runs: the same step with other roundings.
        eps: of the narrowest dtype.

    Source: Monte Carlo arithmetic (Parker, 1997).
    """

    def __init__(self, alone: Observed, runs: Sequence[Observed], eps: float) -> None:
        self.alone, self.eps = alone, eps
        self.runs = [run for run in runs if len(run.steps) == len(alone.steps)]

    def gradient(self, number: int, name: str) -> torch.Tensor | None:
        """Return how far rounding moves each element of a gradient."""
        return self._moved(lambda seen: _named(seen, seen.steps[number].gradients), name)

    def after(self, number: int, name: str) -> torch.Tensor | None:
        """Return how far rounding moves each element of a parameter after a step."""
        return self._moved(lambda seen: _named(seen, seen.steps[number].after), name)

    def buffer(self, name: str) -> torch.Tensor | None:
        """Return how far rounding moves each element of a buffer."""
        return self._moved(lambda seen: seen.buffers(), name)

    def result(self, path: str) -> torch.Tensor | None:
        """Return how far rounding moves each element of a result."""
        return self._moved(lambda seen: seen.tensors(), path)

    def bound(self, moved: torch.Tensor | None, expected: torch.Tensor) -> float:
        """Return the difference of an element that rounding may make."""
        if not expected.numel() or not expected.is_floating_point():
            return 0.0
        largest = float(moved.max()) if moved is not None and moved.numel() else 0.0
        return SAFETY * largest + 2 * self.eps * float(expected.abs().max())

    def _moved(self, values: Callable[[Observed], Mapping[str, Any]], name: str) -> Any:
        before = values(self.alone).get(name)
        others = [values(run).get(name) for run in self.runs]
        if before is None or not before.value.is_floating_point():
            return None
        gaps = [
            (x.value.double() - before.value.double()).abs()
            for x in others
            if x is not None and x.value.shape == before.value.shape
        ]
        return torch.stack(gaps).amax(0) if gaps else None


def _named(seen: Observed, values: Mapping[Any, Any]) -> dict[str, Any]:
    names = seen.names()
    return {names[p]: x for p, x in values.items() if x is not None}
