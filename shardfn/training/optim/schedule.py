"""A scheduler of torch whose values are tensors, so that they change without a retrace."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from ...accepted import accept
from ...errors import CheckpointError, TreeError
from .recipe import Recipe

CYCLED = ("momentum", "betas")  # options that OneCycleLR and CyclicLR change too


class Schedule:
    """The values of a learning rate scheduler of torch, as 0-d float64 tensors.

    Args:
        recipe: the class and options of the optimizer.
        make: a function that returns a scheduler for a torch optimizer.
        args: more positional arguments of `make`.
        options: the keyword arguments of `make`.
    """

    def __init__(
        self,
        recipe: Recipe,
        make: Callable[..., Any],
        args: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        stand_ins = [[torch.zeros(1, 1)] for _ in range(len(recipe.groups) + 1)]
        self.optimizer = recipe.made(stand_ins)
        # torch's schedulers count the steps, and warn where there is none
        step = types.MethodType(_nothing, self.optimizer)
        self.optimizer.__dict__["step"] = step
        self.scheduler = make(self.optimizer, *args, **options)
        if not callable(getattr(self.scheduler, "step", None)):
            raise TreeError.of(
                f"{recipe.name}.schedule, argument make",
                f"it returns a {type(self.scheduler).__name__}, which has no step()",
                needed="a scheduler of torch",
                fix="opt.schedule(torch.optim.lr_scheduler.StepLR, 10)",
                arg_path="make",
            )

    @property
    def lr(self) -> Any:
        """The learning rate: a tensor, or a list with one tensor for each parameter group."""
        return self._value("lr")

    @property
    def options(self) -> dict[str, Any]:
        """All options that the scheduler changes, for `opt.update(params, grads, state,
        **options)`.
        """
        known = self.optimizer.param_groups[0]
        is_cycled = getattr(self.scheduler, "cycle_momentum", False)
        names = [name for name in CYCLED if is_cycled and name in known]
        return {name: self._value(name) for name in ("lr", *names)}

    def step(self, *metrics: Any) -> None:
        """Advance the scheduler by one step.

        Args:
            metrics: the arguments of the scheduler's own `step`, such as the loss that
                ReduceLROnPlateau watches.

        Example:
            >>> import torch, shardfn as sf
            >>> rates = sf.optim(torch.optim.SGD, lr=1.0).schedule(
            ...     torch.optim.lr_scheduler.ExponentialLR, 0.5
            ... )
            >>> rates.step()
            >>> rates.options
            {'lr': tensor(0.5000, dtype=torch.float64)}
        """
        self.optimizer.step()
        self.scheduler.step(*metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scheduler, and the options that the scheduler has set, for
        `sf.save`.

        Example:
            >>> import torch, shardfn as sf
            >>> opt = sf.optim(torch.optim.SGD, lr=1.0)
            >>> rates = opt.schedule(torch.optim.lr_scheduler.ExponentialLR, 0.5)
            >>> rates.step()
            >>> again = opt.schedule(torch.optim.lr_scheduler.ExponentialLR, 0.5)
            >>> again.load_state_dict(rates.state_dict())
            >>> again.lr
            tensor(0.5000, dtype=torch.float64)
        """
        groups = [
            {name: x for name, x in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]
        return {"scheduler": self.scheduler.state_dict(), "options": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state of the scheduler.

        Args:
            state: the state that `state_dict` of an equal scheduler returned.

        Raises:
            CheckpointError: the state has another number of parameter groups.

        Example:
            >>> import torch, shardfn as sf
            >>> opt = sf.optim(torch.optim.SGD, lr=1.0)
            >>> rates = opt.schedule(torch.optim.lr_scheduler.ExponentialLR, 0.5)
            >>> rates.load_state_dict(rates.state_dict())
        """
        accept("Schedule.load_state_dict", state=state)
        groups = self.optimizer.param_groups
        if len(state["options"]) != len(groups):
            got = f"the state has {len(state['options'])} parameter groups, not {len(groups)}"
            raise CheckpointError.of("Schedule.load_state_dict", got)
        self.scheduler.load_state_dict(state["scheduler"])
        for group, options in zip(groups, state["options"], strict=True):
            group.update(options)

    def _value(self, name: str) -> Any:
        values = [_tensors(group[name]) for group in self.optimizer.param_groups]
        return values if len(values) > 1 else values[0]


def _nothing(optimizer: torch.optim.Optimizer) -> None:
    """The step of an optimizer that only holds options."""


def _tensors(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(_tensors, x))
    return torch.tensor(float(x), dtype=torch.float64)
