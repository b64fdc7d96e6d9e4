"""The record of a parameter, its gradient and its optimizer state."""

from __future__ import annotations

import attrs
import torch

from .layout import STARTED, Layout, State


@attrs.frozen(eq=False)
class Row:
    """A parameter, its gradient and its state.

    Args:
        path: of the parameter.
        param: its value.
        grad: None for a parameter that the step leaves as it is.
        state: as `init` and `update` return it.
        layout: of the state.
    """

    path: str
    param: torch.Tensor
    grad: torch.Tensor | None
    state: State
    layout: Layout

    @property
    def is_late(self) -> bool:
        """Whether the state says if there was a first step."""
        return self.layout.is_late and self.grad is not None

    @property
    def own(self) -> State:
        """The entries of the state that the optimizer itself keeps."""
        return {name: x for name, x in self.state.items() if name != STARTED}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name."""
        found = {"param": self.param}
        if self.grad is not None:
            found["grad"] = self.grad
        for name, x in self.own.items():
            found[f"state.{name}"] = x
        return found

    def like(self, tensors: dict[str, torch.Tensor]) -> Row:
        """A row of other tensors, by the names of `tensors`."""
        param = tensors["param"]
        grad = tensors.get("grad")
        state = {name: tensors[f"state.{name}"] for name in self.own}
        return attrs.evolve(self, param=param, grad=grad, state=state)

    def fresh(self) -> Row:
        """The row without state: a step from it is a first step."""
        return attrs.evolve(self, state={})
