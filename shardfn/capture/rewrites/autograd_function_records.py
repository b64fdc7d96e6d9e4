"""The records of an autograd.Function's forward: its results, and the tensors that it saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch.autograd.function import FunctionCtx

from ... import _tree

# names that torch's own methods of a context set
SET_BY_TORCH = (
    "dirty_tensors",
    "materialize_grads",
    "needs_input_grad",
    "non_differentiable",
    "saved_for_forward",
    "saved_tensors",
    "to_save",
)


class Context(FunctionCtx):
    """The context that a Function's forward, backward and jvp take."""

    to_save: tuple[Any, ...] = ()
    saved_for_forward: tuple[Any, ...] = ()
    saved_tensors: tuple[Any, ...] = ()
    non_differentiable: tuple[Any, ...] = ()
    dirty_tensors: tuple[Any, ...] = ()
    materialize_grads: bool = True
    needs_input_grad: tuple[bool, ...] = ()

    @property
    def attributes(self) -> dict[str, Any]:
        """The user's attributes."""
        names = vars(self).items()
        return {name: x for name, x in names if name not in SET_BY_TORCH}


@attrs.frozen
class TensorPlace:
    """The place of a tensor in a call: its index among the inputs or among the results."""

    is_input: bool
    at: int

    def value(self, inputs: Sequence[Any], results: Sequence[Any]) -> Any:
        """The tensor at this place."""
        tensors = inputs if self.is_input else results
        return tensors[self.at]


@attrs.frozen(eq=False)
class ForwardRecord:
    """What one run of the forward of an autograd.Function returned and saved, with places for
    tensors. A Place stands for each tensor.

    Args:
        outs: the results, with the constants among them.
        is_tuple: whether the forward returned a tuple.
        count: the number of results that are tensors.
        silent: those of them without a derivative.
        extras: saved tensors that are neither inputs nor results.
        saved: (tensors saved for the backward, those for the jvp, the context's attributes).
        materializes: whether the backward takes zeros for a missing gradient.
    """

    outs: tuple[Any, ...]
    is_tuple: bool
    count: int
    silent: frozenset[int]
    extras: tuple[torch.Tensor, ...]
    saved: tuple[Any, Any, Any]
    materializes: bool

    @classmethod
    def of(cls, context: Context, tensors: Sequence[torch.Tensor], out: Any) -> ForwardRecord:
        """The record of a run, from its context and its result.

        Args:
            context: that it was given.
            tensors: that it was given.
            out: its result.
        """
        is_tuple = isinstance(out, tuple)
        results = out if is_tuple else (out,)
        ends = list(filter(is_tensor, results))
        places: dict[int, TensorPlace] = {}
        for i, x in enumerate(ends):
            places[id(x)] = TensorPlace(False, i)
        marked = {id(x) for x in context.non_differentiable}
        silent = [i for i, x in enumerate(ends) if id(x) in marked]
        outs = tuple(places.get(id(x), x) for x in results)
        for i, x in enumerate(tensors):
            places[id(x)] = TensorPlace(True, i)
        saved = context.to_save, context.saved_for_forward, context.attributes
        extras = _other_saved_tensors(saved, places)
        for i, x in enumerate(extras, len(ends)):
            places[id(x)] = TensorPlace(False, i)
        return cls(
            outs=outs,
            is_tuple=is_tuple,
            count=len(ends),
            silent=frozenset(silent),
            extras=extras,
            saved=_tree.tree_map(lambda x: places.get(id(x), x), saved),
            materializes=context.materialize_grads,
        )

    @property
    def places(self) -> list[TensorPlace]:
        """The place of each saved tensor."""
        leaves = _tree.leaves(self.saved)
        places = [x for x in leaves if isinstance(x, TensorPlace)]
        return list(dict.fromkeys(places))

    def is_extra(self, place: TensorPlace) -> bool:
        """Whether a tensor is neither an input nor a result."""
        return not place.is_input and place.at >= self.count

    def filled(self, values: dict[TensorPlace, torch.Tensor]) -> tuple[Any, Any, Any]:
        """The saved values, with tensors in their places."""

        def fill(x: Any) -> Any:
            return values[x] if isinstance(x, TensorPlace) else x

        return _tree.tree_map(fill, self.saved)

    def result(self, results: Sequence[torch.Tensor]) -> Any:
        """The result as the forward returned it."""
        ends = list(results)
        for i in self.silent:
            ends[i] = ends[i].detach()
        outs: list[Any] = []
        for x in self.outs:
            outs.append(ends[x.at] if isinstance(x, TensorPlace) else x)
        return tuple(outs) if self.is_tuple else outs[0]


def _other_saved_tensors(saved: Any, places: dict[int, TensorPlace]) -> tuple[torch.Tensor, ...]:
    """The saved tensors that are neither inputs nor results."""
    extras: dict[int, torch.Tensor] = {}
    for x in _tree.leaves(saved):
        if is_tensor(x) and id(x) not in places:
            extras[id(x)] = x
    return tuple(extras.values())


def is_tensor(x: Any) -> bool:
    """Whether a value is a tensor."""
    return isinstance(x, torch.Tensor)


def may_have_gradient(x: torch.Tensor) -> bool:
    """Whether a tensor may have a gradient."""
    return x.is_floating_point() or x.is_complex()
