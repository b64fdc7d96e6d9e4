"""Full backward hooks of modules, as identity functions whose derivative calls the hooks. Works
under every torch.func transform.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import _compat
from ...errors import CaptureError
from ..refusals import leaked_values
from ..rewrites.autograd_function_code import calls_ranks

Hook = Callable[..., Any]  # (module, gradients...) -> None, or other gradients


class HookedCall:
    """One call of a module with backward hooks. Replaces torch's BackwardHook.

    Args:
        module: the first argument of the hooks.
        after: full backward hooks: (module, gradients of the inputs, gradients of the results).
        before: backward pre-hooks: (module, gradients of the results).
    """

    def __init__(
        self, module: torch.nn.Module, after: Sequence[Hook], before: Sequence[Hook]
    ) -> None:
        self.module, self.after, self.before = module, list(after), list(before)
        self.floating: dict[
            str, list[int]
        ] = {}  # "in" and "out": which of the values are floating tensors
        self.count: dict[str, int] = {}  # the number of values
        self.tracked: dict[
            Any, bool
        ] = {}  # by level of torch.func: whether an input has a gradient
        self.arriving: dict[Any, tuple[Any, ...]] = {}  # by level: the gradients of the results
        self.below: HookedCall | None = None

    def setup_input_hook(self, args: Any) -> Any:
        return self.through("in", args)

    def setup_output_hook(self, result: Any) -> Any:
        if isinstance(result, tuple):
            return self.through("out", result)
        return self.through("out", (result,))[0]

    def through(self, side: str, values: Any) -> Any:
        """Pass the floating tensors among values through the identity with hooks."""
        at = [
            i
            for i, x in enumerate(values)
            if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())
        ]
        self.floating[side], self.count[side] = at, len(values)
        passed = {}
        if at:
            outs = _Through.apply(self, side, *(values[i] for i in at))
            passed = dict(zip(at, outs, strict=True))
        filled = [passed.get(i, x) for i, x in enumerate(values)]
        return tuple(filled) if type(values) is tuple else type(values)(*filled)

    def packed(self, side: str, gradients: Sequence[Any]) -> tuple[Any, ...]:
        """The gradients in the form that hooks take: None for a value that is not a floating
        tensor.
        """
        by_position = dict(zip(self.floating[side], gradients, strict=True))
        return tuple(by_position.get(i) for i in range(self.count[side]))

    def unpacked(self, side: str, gradients: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(gradients[i] for i in self.floating[side])

    def after_hooks(
        self, hooks: Sequence[Hook], gradients: tuple[Any, ...], *more: Any
    ) -> tuple[Any, ...]:
        """The gradients after each of these hooks was called on them."""
        for hook in hooks:
            replaced = hook(self.module, gradients, *more)
            replaced = (replaced,) if isinstance(replaced, torch.Tensor) else replaced
            if replaced is not None and len(replaced) != len(gradients):
                raise RuntimeError(
                    f"a backward hook returned {len(replaced)} gradients; the module has "
                    f"{len(gradients)}"
                )
            gradients = gradients if replaced is None else tuple(replaced)
        return gradients

    def of_inputs(
        self, level: Any, cotangents: Sequence[Any], needs: Sequence[bool]
    ) -> Sequence[Any]:
        """The gradients of the floating inputs after the full backward hooks."""
        arriving = self.arriving.pop(level, None)
        if arriving is None:
            # they did not pass through the module's result, as in a backward of a backward
            return cotangents
        needed = [g if need else None for g, need in zip(cotangents, needs, strict=True)]
        return self.unpacked(
            "in", self.after_hooks(self.after, self.packed("in", needed), arriving)
        )

    def of_results(self, level: Any, cotangents: Sequence[Any]) -> Sequence[Any]:
        """The gradients of the floating results after the backward pre-hooks."""
        arriving = self.after_hooks(self.before, self.packed("out", cotangents))
        if self.tracked.get(level, False):
            self.arriving[level] = arriving
        elif not any(self.tracked.values()):
            self.after_hooks(self.after, (None,) * self.count["in"], arriving)
        return self.unpacked("out", arriving)

    def batched(self) -> HookedCall:
        """The same call under one more level of vmap: each hook takes one sample."""
        if self.below is None:
            self.below = HookedCall(
                self.module,
                [_hook_of_batch(h) for h in self.after],
                [_hook_of_batch(h) for h in self.before],
            )
        self.below.floating, self.below.count = self.floating, self.count
        return self.below


def hooked_module(
    module: torch.nn.Module, after: Sequence[Hook], before: Sequence[Hook]
) -> Callable[..., Any]:
    """A module with backward hooks that the code closes over, as functions for its inputs and
    results.

    Returns:
        A function of a side ("in" or "out"), of the number of values there, and of the numbers of
        those that are floating tensors. It returns a function of these tensors.

    Raises:
        CaptureError: a hook communicates, or asks for its rank.
    """
    call = HookedCall(module, after, before)
    name = type(module).__name__
    for hook in (*after, *before):
        leaked_values.watch(f"a backward hook of {name}", hook)
        if calls_ranks([hook]):
            raise CaptureError.of(
                f"a backward hook of {name}",
                "the hook communicates or reads its rank",
                needed="a function of gradients alone",
                fix="call the collective on the gradients that sf.grad returns, or on a result: "
                "y = sf.psum(y, axis)",
            )

    def through(side: str, count: int, at: list[int]) -> Callable[..., Any]:
        def passed(*xs: torch.Tensor) -> Any:
            call.floating[side], call.count[side] = at, count
            return _Through.apply(call, side, *xs)

        return passed

    return through


def _hook_of_batch(hook: Hook) -> Hook:
    """A hook on one sample's gradients as a hook on the gradients of a batch."""

    def run(module: torch.nn.Module, *groups: tuple[Any, ...]) -> tuple[Any, ...]:
        flat = [x for group in groups for x in group if x is not None]
        there: list[bool] = []

        def one(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            feed = iter(xs)
            given = [tuple(None if x is None else next(feed) for x in group) for group in groups]
            found = hook(module, *given)
            found = (
                given[0]
                if found is None
                else (found,)
                if isinstance(found, torch.Tensor)
                else found
            )
            there[:] = [x is not None for x in found]
            return tuple(x for x in found if x is not None)

        feed = iter(torch.func.vmap(one)(*flat))
        return tuple(next(feed) if yes else None for yes in there)

    return run


class _Through(torch.autograd.Function):
    """The identity on the floating tensors on one side of a module, with hooks on their gradients.

    The gradients of the inputs ("in") are the last that the module's backward computes, those of
    the results ("out") the first that it takes.
    """

    @staticmethod
    def forward(call: HookedCall, side: str, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.clone() for x in xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, ctx.side, *xs = inputs
        ctx.level = _compat.level()
        if ctx.side == "in":
            ctx.call.tracked[ctx.level] = any(ctx.needs_input_grad)
        ctx.save_for_forward(*xs)
        # hooks get None for an input without a gradient, as in torch
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        call = ctx.call
        if ctx.side == "in":
            return None, None, *call.of_inputs(ctx.level, cotangents, ctx.needs_input_grad[2:])
        return None, None, *call.of_results(ctx.level, cotangents)

    @staticmethod
    def jvp(ctx: Any, _: Any, __: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.zeros_like(x) if t is None else t.clone()
            for x, t in zip(ctx.saved_tensors, tangents, strict=True)
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: HookedCall, side: str, *xs: torch.Tensor) -> Any:
        moved = [
            x.expand(info.batch_size, *x.shape) if d is None else x.movedim(d, 0)
            for x, d in zip(xs, in_dims[2:], strict=True)
        ]
        return _Through.apply(call.batched(), side, *moved), (0,) * len(moved)
