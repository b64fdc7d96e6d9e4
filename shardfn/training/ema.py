"""`ema`: an exponential moving average of parameters."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from .. import _compat, _tree, tree_pairs
from ..accepted import accept
from ..types import ShapeDtype
from .optim import checks
from .optim.optimizer import is_captured
from .optim.trees import as_shapes, has_shapes


@attrs.define(slots=False)
class Ema:
    """An exponential moving average of pytrees, as pure functions."""

    decay: float
    debias: bool

    @_compat.read_by_dynamo
    def init(self, params: Any) -> dict[str, Any]:
        """Return the state before the first update.

        Args:
            params: a pytree of floating-point or complex tensors. A pytree of ShapeDtypes gives the
                state as ShapeDtypes.

        Returns:
            The state `{"count": 0-d int64, "average": a tree like params}`, with the parameters, or
            with zeros for `debias`.

        Source: optax.ema.

        Example:
            >>> import torch, shardfn as sf
            >>> sf.ema(0.9).init({"w": torch.ones(2)})["average"]
            {'w': tensor([1., 1.])}
        """
        if not is_captured() and has_shapes(params):
            count = ShapeDtype((), torch.int64)
            return {"count": count, "average": as_shapes(params)}
        leaves = _tree.tensors(params)
        checks.check_averaged(len(leaves))
        first = [
            torch.zeros_like(x) if self.debias and _tree.is_floating(x) else x.clone()
            for x in leaves
        ]
        device = leaves[0].device
        count = torch.zeros((), dtype=torch.int64, device=device)
        return {"count": count, "average": _tree.with_tensors(params, first)}

    @_compat.read_by_dynamo
    def update(self, params: Any, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state with new parameters, with the average average * decay + params * (1 -
        decay). Tensors of integers and bools, such as counts, are those of the new parameters.

        Args:
            params: a pytree of tensors.
            state: the state from `init` or from the previous `update`.

        Returns:
            The new state.

        Raises:
            TreeError: the parameters do not match the average in structure, shape or dtype.

        Source: torch.optim.swa_utils.get_ema_avg_fn; optax.ema.

        Example:
            >>> import torch, shardfn as sf
            >>> ema = sf.ema(0.5)
            >>> state = ema.init({"w": torch.zeros(1)})
            >>> ema.update({"w": torch.ones(1)}, state)["average"]
            {'w': tensor([0.5000])}
        """
        if not _compat.is_tracing():
            accept("Ema.update", state=state)
        average = state["average"]
        paired, wrong = tree_pairs.pair(average, params, ("the average", "the parameters"))
        leaves = _tree.quick_leaves((params,))
        both = [
            [(tuple(x.shape), x.dtype) for x in values if isinstance(x, torch.Tensor)]
            for values in (leaves, paired)
        ]
        checks.check_average(tuple(wrong), *map(tuple, both))
        new: list[torch.Tensor] = []
        for x, old in zip(leaves, paired, strict=True):
            if isinstance(x, torch.Tensor):
                averaged = old + (x - old) * (1 - self.decay) if _tree.is_floating(x) else x.clone()
                new.append(averaged)
        return {"count": state["count"] + 1, "average": _tree.with_tensors(params, new)}

    @_compat.read_by_dynamo
    def average(self, state: dict[str, Any]) -> Any:
        """Return the average of a state, divided by 1 - decay ** count for `debias`.

        Args:
            state: the state from `update`.

        Returns:
            A tree with the structure of the parameters.

        Source: Kingma and Ba, Adam (ICLR 2015), section 3; optax.ema.

        Example:
            >>> import torch, shardfn as sf
            >>> ema = sf.ema(0.5, debias=True)
            >>> params = {"w": torch.ones(1)}
            >>> state = ema.update(params, ema.init(params))
            >>> ema.average(state)
            {'w': tensor([1.])}
        """
        if not _compat.is_tracing():
            accept("Ema.average", state=state)
        if not self.debias:
            return state["average"]
        weight = 1 - self.decay ** state["count"].double()
        leaves = _tree.tensors(state["average"])
        debiased = [x / weight.to(x.dtype) if _tree.is_floating(x) else x for x in leaves]
        return _tree.with_tensors(state["average"], debiased)


@_compat.read_by_dynamo
def ema(decay: float, *, debias: bool = False) -> Ema:
    """Compute an exponential moving average of parameters: `ema = sf.ema(0.999)`, `state =
    ema.init(params)`, `state = ema.update(params, state)`, `ema.average(state)`.

    Args:
        decay: the weight of the previous average, from 0 to 1.
        debias: whether to start from zeros, and to divide by the sum of the weights.

    Returns:
        An object with the methods `init`, `update` and `average`.

    Raises:
        ShardError: decay is not a number from 0 to 1.

    Source: torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn; optax.ema.

    Example:
        >>> import torch, shardfn as sf
        >>> ema = sf.ema(0.9)
        >>> state = ema.init({"w": torch.zeros(1)})
        >>> state = ema.update({"w": torch.ones(1)}, state)
        >>> ema.average(state)
        {'w': tensor([0.1000])}
    """
    checks.check_decay(decay)
    return Ema(decay, debias)
