"""A call of a compiled program as one op of torch's autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import attrs
import torch

from ... import _compat
from ...errors import CaptureError, ShardError, call_site
from .second_half import Backward

Function = Callable[[list[Any]], list[Any]]
SECOND = (
    "use sf.grad or sf.hessian inside the called function, which can differentiate any number "
    "of times; or leave out create_graph"
)
FREED = "loss.backward(retain_graph=True) in all backward calls but the last"
WRITTEN = "write to the tensor after the backward, or write to a clone"


@attrs.frozen(eq=False)
class Differentiable:
    """Run a call as one autograd.Function, from the leaves of its arguments to its results.

    Args:
        execute: the first half: from leaves to local results, and local saved values.
        make: results of local results; None if they are the same.
        backward: the second half.
    """

    execute: Function
    make: Function | None
    backward: Backward

    def __call__(self, leaves: list[Any]) -> list[Any]:
        asked = self.backward.request.followed
        assert asked is not None
        tensors = [*(leaves[i] for i in asked.leaves), *asked.closed_over]
        return list(_Op.apply(self, leaves, *tensors))

    def forward(self, leaves: list[Any]) -> tuple[list[Any], list[torch.Tensor]]:
        """Run the forward, and return the results and the tensors that autograd is to save."""
        outs = self.execute(leaves)
        count = len(self.backward.has_derivative())
        own = outs[:count]
        values = outs[count:]
        results = own if self.make is None else self.make(own)
        return results, self.backward.saved(leaves, results, values)


class _Op(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Differentiable, leaves: list[Any], *_: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call = call
        results, saved = call.forward(leaves)
        ctx.save_for_backward(*saved)
        rows = zip(results, call.backward.has_derivative(), strict=True)
        ctx.mark_non_differentiable(*[x for x, has in rows if not has])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        half = ctx.call.backward
        name = half.request.name
        if torch.is_grad_enabled() or _compat.inside_transform():
            got = "the backward of the call is differentiated, by create_graph or by a transform"
            needed = "outside of the called function, only a first derivative of the call"
            raise ShardError.of(name, got, needed=needed, fix=SECOND, source=call_site())
        saved = _saved(name, ctx)
        with _compat.autocast_off():  # which may be on around loss.backward()
            return None, None, *half.run(saved, cotangents)


def _saved(name: str, ctx: Any) -> list[torch.Tensor]:
    """Return the tensors that autograd has saved, which it frees unless the graph is retained.

    Raises:
        ShardError: they are freed, or have been written to.
    """
    try:
        saved = list(ctx.saved_tensors)
    except RuntimeError as error:
        is_freed = "second time" in str(error)
        got = (
            "the autograd graph of the call is freed, because an earlier backward used it"
            if is_freed
            else "a value that the backward needs was modified in place"
        )
        fix = FREED if is_freed else WRITTEN
        raise ShardError.of(name, got, fix=fix, source=call_site()) from error
    ctx.maybe_clear_saved_tensors()
    return saved


def refusing_backward(
    error: CaptureError, place: Callable[[list[Any]], Any]
) -> Callable[[list[Any]], Any]:
    """Return a function of the results of a call that autograd follows, where torch has no
    derivative of an op: their backward raises the error.

    Args:
        error: says which op.
        place: puts results in their tree.
    """
    token = torch.empty(0, requires_grad=True)  # so that autograd follows the results
    return lambda results: place(list(_Refused.apply(token, error, results)))


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, error: CaptureError, results: list[Any]) -> Any:
        ctx.error = error
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise copy.copy(ctx.error) from None
