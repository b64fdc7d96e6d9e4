"""The layouts of the local tensors of DTensors, which a spec does not tell: those of each call are
compared with the program's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from ...errors import PlacementError, call_site
from ..store import Layouts
from .mismatch import said
from .placed import Placed


@attrs.frozen(eq=False)
class LocalLayouts:
    """The layouts that a program needs.

    Args:
        name: of the function, for errors.
        placed: its arguments.
        places: of the DTensors, among the tensors.
        wanted: a fake tensor like each of their local tensors.
        known: those of the last call.
    """

    name: str
    placed: Placed
    places: tuple[int, ...]
    wanted: tuple[torch.Tensor, ...]
    known: Layouts = attrs.field(factory=Layouts, init=False)

    def fitted(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that a program reads of its arguments, a local tensor of other strides
        copied.

        Raises:
            PlacementError: one has another shape or dtype than the program.
        """
        is_every = len(inputs) == len(self.places)
        mine = inputs if is_every else [inputs[k] for k in self.places]
        if self.known.are_same(mine):
            return inputs
        fitted = list(inputs)
        for k, x, like in zip(self.places, mine, self.wanted, strict=True):
            fitted[k] = self._fitted(k, x, like)
        if all(map(_is_same, fitted, inputs)):
            self.known.put(mine)
        return fitted

    def _fitted(self, k: int, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """A local tensor with the program's strides."""
        if (x.shape, x.dtype) != (like.shape, like.dtype):
            raise self._refused(k, x, like)
        if _has_strides(x, like):
            return x
        copy = torch.empty_strided(like.shape, like.stride(), dtype=x.dtype, device=x.device)
        return copy.copy_(x)

    def _refused(self, k: int, x: torch.Tensor, like: torch.Tensor) -> PlacementError:
        path = self.placed.paths[self.placed.tensors[k]]
        return PlacementError.of(
            f"{self.name}, argument {path}",
            f"the local tensor of the DTensor is {said(x)}",
            needed=f"{said(like)}, this rank's shard of the global tensor",
            fix="sf.from_local(x, mesh, placements), which checks it",
            source=call_site(),
            arg_path=path,
        )


def local_layouts(name: str, placed: Placed, inputs: Sequence[torch.Tensor]) -> LocalLayouts | None:
    """The layouts of the DTensors among the arguments. None without one.

    Args:
        name: of the function, for errors.
        placed: its arguments.
        inputs: fake tensors like those that the program reads of its arguments.
    """
    places = tuple(k for k, flag in enumerate(placed.dtensors) if flag)
    if not places:
        return None
    return LocalLayouts(name, placed, places, tuple(inputs[k] for k in places))


def _is_same(x: Any, y: Any) -> bool:
    return x is y


def _has_strides(x: torch.Tensor, like: torch.Tensor) -> bool:
    """Whether the elements lie as in another tensor of this shape."""
    if x.stride() == like.stride() or not x.numel():
        return True
    rows = zip(x.shape, x.stride(), like.stride(), strict=True)
    return all(n == 1 or mine == wanted for n, mine, wanted in rows)
