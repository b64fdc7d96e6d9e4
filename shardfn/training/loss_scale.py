"""`loss_scale`: a dynamic scale of the loss, for gradients in float16.

Dynamo reads this.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from .. import _compat, _tree, tree_pairs
from ..accepted import accept
from ..capture import annotations
from .optim import checks

State = dict[str, torch.Tensor]


@attrs.define(slots=False)
class LossScale:
    """A dynamic scale of the loss, as pure functions."""

    initial: float
    growth: float
    backoff: float
    interval: int

    @_compat.read_by_dynamo
    def init(self, device: Any = None) -> State:
        """Return the state before the first step.

        Args:
            device: the device of the state; by default, torch's default device.

        Returns:
            The state `{"scale": 0-d float32, "good_steps": 0-d int32}`.

        Source: torch.amp.GradScaler.

        Example:
            >>> import torch, shardfn as sf
            >>> sf.loss_scale().init()["scale"]
            tensor(65536.)
        """
        if not _compat.is_tracing():
            accept("LossScale.init", device=device)
        scale = torch.full((), self.initial, dtype=torch.float32, device=device)
        steps = torch.zeros((), dtype=torch.int32, device=device)
        return {"scale": scale, "good_steps": steps}

    @_compat.read_by_dynamo
    def scale(self, loss: torch.Tensor, state: State) -> torch.Tensor:
        """Multiply the loss by the scale, in the function that is differentiated.

        Args:
            loss: a floating-point tensor.
            state: the state from `init` or from the previous step.

        Returns:
            The scaled loss, which is float32 if the loss is float16.

        Source: torch.amp.GradScaler.scale.

        Example:
            >>> import torch, shardfn as sf
            >>> scaler = sf.loss_scale(8.0)
            >>> scaler.scale(torch.tensor(0.5), scaler.init())
            tensor(4.)
        """
        if not _compat.is_tracing():
            accept("LossScale.scale", loss=loss, state=state)
        wide = loss.float() if loss.dtype == torch.float16 else loss
        with annotations.annotate_loss_scale():
            return wide * state["scale"].to(wide.dtype)

    @_compat.read_by_dynamo
    def unscale(self, grads: Any, state: State) -> tuple[Any, torch.Tensor]:
        """Divide gradients by the scale, and check that all of them are finite.

        Args:
            grads: the gradients of the scaled loss: a pytree of floating-point tensors, not in
                float16.
            state: the state with which the loss was scaled.

        Returns:
            A tuple of the gradients divided by the scale, and a 0-d bool that is True if all
            gradients are finite. The bool is the same on all ranks.

        Raises:
            TreeError: a gradient is float16, in which small gradients become 0, or of integers.

        Source: torch.amp.GradScaler.unscale_.

        Example:
            >>> import torch, shardfn as sf
            >>> scaler = sf.loss_scale(8.0)
            >>> scaler.unscale({"w": torch.tensor([4.0, 8.0])}, scaler.init())
            ({'w': tensor([0.5000, 1.0000])}, tensor(True))
        """
        if not _compat.is_tracing():
            accept("LossScale.unscale", state=state)
        leaves = _tree.tensors(grads)
        every = _tree.quick_leaves((grads,))
        kinds = [getattr(x, "dtype", None) for x in every]
        paths = _tree.quick_paths(grads, "grads")
        checks.check_unscaled(tuple(paths), tuple([str(kind) for kind in kinds]))
        inverse = state["scale"].double().reciprocal()
        unscaled = [x * inverse.to(x.dtype) for x in leaves]
        counts = [(~torch.isfinite(x)).sum() for x in unscaled]
        wrong = torch.stack(counts).sum() if counts else torch.zeros(())
        return _tree.with_tensors(grads, unscaled), wrong == 0

    @_compat.read_by_dynamo
    def select(self, finite: torch.Tensor, new: Any, old: Any) -> Any:
        """Return the new values of a step if all gradients were finite, or the old values.

        Args:
            finite: the 0-d bool from `unscale`.
            new: a pytree of tensors, such as parameters and optimizer state.
            old: a pytree with the structure of `new`.

        Returns:
            A tree with the structure of `new`.

        Raises:
            TreeError: the structures of the trees differ, or values that are no tensors.

        Source: jmp.select_tree; torch.amp.GradScaler.step, which skips.

        Example:
            >>> import torch, shardfn as sf
            >>> scaler = sf.loss_scale()
            >>> scaler.select(torch.tensor(False), torch.ones(2), torch.zeros(2))
            tensor([0., 0.])
        """
        if not _compat.is_tracing():
            accept("LossScale.select", finite=finite)
        paired, wrong = tree_pairs.pair(old, new, ("the old values", "the new values"))
        shapes = [tuple(x.shape) for x in _tree.tensors(new)]
        of_old = [tuple(x.shape) for x in paired if isinstance(x, torch.Tensor)]
        leaves = _tree.quick_leaves((new,))
        constants = [
            (x, y)
            for x, y in zip(leaves, paired, strict=True)
            if not any(isinstance(v, torch.Tensor) for v in (x, y)) and x != y
        ]
        checks.check_selected(tuple(wrong), tuple(shapes), tuple(of_old), tuple(constants))
        pairs = zip(_tree.tensors(new), _tree.tensors(paired), strict=True)
        chosen = [torch.where(finite, x, y) for x, y in pairs]
        return _tree.with_tensors(new, chosen)

    @_compat.read_by_dynamo
    def update(self, state: State, finite: torch.Tensor) -> State:
        """Return the state after a step, with a smaller scale if gradients were not finite, and a
        larger scale after `interval` steps with finite gradients.

        Args:
            state: the state of the step.
            finite: the 0-d bool from `unscale`.

        Returns:
            The new state.

        Source: torch.amp.GradScaler.update.

        Example:
            >>> import torch, shardfn as sf
            >>> scaler = sf.loss_scale(8.0)
            >>> scaler.update(scaler.init(), torch.tensor(False))["scale"]
            tensor(4.)
        """
        if not _compat.is_tracing():
            accept("LossScale.update", state=state, finite=finite)
        scale, steps = state["scale"], state["good_steps"] + 1
        grown = scale * self.growth
        grows = (steps == self.interval) & torch.isfinite(grown)
        larger = torch.where(grows, grown, scale)
        left = torch.where(steps == self.interval, 0, steps)
        none = torch.zeros_like(left)
        return {
            "scale": torch.where(finite, larger, scale * self.backoff),
            "good_steps": torch.where(finite, left, none),
        }


@_compat.read_by_dynamo
def loss_scale(
    initial: float = 2.0**16, *, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000
) -> LossScale:
    """Scale the loss, so that small gradients in float16 do not become 0.

    Write `scaler = sf.loss_scale()` and `state = scaler.init()` once, and return
    `scaler.scale(loss, state)` from the function that is differentiated. After each backward, write
    `grads, finite = scaler.unscale(grads, state)`, `scaler.select(finite, new, old)` and `state =
    scaler.update(state, finite)`.

    Args:
        initial: the initial scale of the loss.
        growth: the factor for the scale after `interval` steps with finite gradients, 1 or more.
        backoff: the factor for the scale after a step with non-finite gradients, from 0 to 1.
        interval: the number of consecutive finite steps after which the scale grows.

    Returns:
        An object with the methods `init`, `scale`, `unscale`, `select` and `update`. With
        `growth=1.0` and `backoff=1.0`, the scale never changes.

    Raises:
        ShardError: one of initial, growth, backoff and interval is out of range.

    Source: torch.amp.GradScaler, with its defaults; jmp.DynamicLossScale.

    Example:
        >>> import torch, shardfn as sf
        >>> scaler = sf.loss_scale(1024.0)
        >>> f = sf.mixed_precision(lambda w: (w * w).sum(), compute=torch.float16)
        >>> g = sf.grad(lambda w, state: scaler.scale(f(w), state))
        >>> state = scaler.init()
        >>> scaler.unscale(g(torch.tensor([1e-6]), state), state)
        (tensor([2.0266e-06]), tensor(True))
    """
    if not _compat.is_tracing():
        accept("loss_scale", initial=initial, growth=growth, backoff=backoff, interval=interval)
    return LossScale(initial, growth, backoff, interval)
