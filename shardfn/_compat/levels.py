"""One level of torch.func at a time: wrap a tensor at the innermost level, or unwrap it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._C import _functorch
from torch._functorch import eager_transforms
from torch.autograd.function import _SingleLevelFunction

from .patches import patched
from .tracing import already_open, open_dual, read_by_dynamo

Pull = Callable[
    ..., Sequence[torch.Tensor | None]
]  # cotangents of results -> cotangents of arguments


HOOKED = "hooks of saved tensors cannot be set in a function that is being differentiated"
# The steps of a gradient, which torch does not export.
steps: Any = eager_transforms


@read_by_dynamo
def grad_and_value(
    fn: Callable[..., Any], primals: tuple[torch.Tensor, ...]
) -> tuple[Any, Any, Any]:
    """Compute gradients, value and aux of a function of a tuple of tensors, as
    torch.func.grad_and_value does, with less Python for Dynamo to read.

    Returns:
        The gradients, the scalar and the tuple.
    """
    with (
        torch.autograd.graph.disable_saved_tensors_hooks(HOOKED),
        steps.grad_increment_nesting() as level,
        torch.enable_grad(),
    ):
        xs = [steps._wrap_for_grad(x, level) for x in primals]
        with steps.enable_inplace_requires_grad(True):
            xs = [steps._set_tensor_requires_grad(x) for x in xs]
        value, aux = fn(tuple(xs))
        wrapped = steps._autograd_grad((value,), xs, create_graph=True)
        gradients = [steps._unwrap_for_grad(g, level) for g in wrapped]
        value = steps._unwrap_for_grad(value, level)
        if aux:
            aux = tuple([steps._unwrap_for_grad(x, level) for x in aux])
    return gradients, value, aux


def enter_gradient() -> int:
    """Push a grad level of torch.func, and return its number."""
    return int(_functorch._grad_increment_nesting())


def leave_gradient() -> None:
    """Pop the innermost grad level of torch.func."""
    _functorch._grad_decrement_nesting()


REQUIRES_GRAD = "You are attempting to call Tensor.requires_grad_()"


def requires_grad_allowed() -> Any:
    """The context in which requires_grad_ works at the innermost level of torch.func."""
    return steps.enable_inplace_requires_grad(True)


def _is_wrapped_at(x: torch.Tensor, level: int) -> bool:
    """Check whether a tensor is wrapped at a grad level."""
    x = _functorch.unwrap_if_dead(x)
    return _functorch.is_gradtrackingtensor(x) and _functorch.maybe_get_level(x) == level


def wrapped_at_gradient(x: torch.Tensor, level: int) -> torch.Tensor:
    """Wrap a tensor at the innermost grad level, and require its gradient there."""
    wrapped = x if _is_wrapped_at(x, level) else steps._wrap_for_grad(x, level)
    if not wrapped.requires_grad:
        with steps.enable_inplace_requires_grad(True):
            wrapped.requires_grad_()
    return wrapped


def below_gradient(x: torch.Tensor, level: int) -> torch.Tensor:
    """Unwrap a tensor that is wrapped at a grad level; return any other as it is."""
    return steps._unwrap_for_grad(x, level) if _is_wrapped_at(x, level) else x


class _CustomBackward(_SingleLevelFunction):
    """An autograd.Function that wraps results of the level below, with a given function as its
    backward at this level.
    """

    @staticmethod
    def forward(
        ctx: Any, level: Level, outs: Sequence[torch.Tensor], pull: Pull, *args: torch.Tensor
    ) -> Any:
        ctx.level, ctx.pull = level, pull
        if level.kind is None:  # saved because torch's own autograd may differentiate again
            ctx.save_for_backward(*args)
        ctx.set_materialize_grads(False)
        wrapped = tuple(level.wrapped(x) for x in outs)
        ctx.mark_non_differentiable(
            *(x for x in wrapped if not (x.is_floating_point() or x.is_complex()))
        )
        return wrapped

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        saved = ctx.saved_tensors if ctx.level.kind is None else None
        return None, None, None, *ctx.pull(cotangents, saved)


class Level:
    """The innermost active torch.func transform. Without one: torch's own autograd, kind None."""

    def __init__(self) -> None:
        from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

        inside = _functorch.peek_interpreter_stack() is not None
        self.interpreter = retrieve_current_functorch_interpreter() if inside else None
        self.kind: str | None = None
        self.number: int | None = None
        if self.interpreter is not None:
            self.kind = self.interpreter.key().name.lower()  # "grad", "jvp", "vmap"
            self.number = self.interpreter.level()

    @contextlib.contextmanager
    def lowered(self) -> Iterator[None]:
        """Enter a context in which this transform is inactive, and the outer ones still
        differentiate.
        """
        from torch.autograd.forward_ad import _set_fwd_grad_enabled

        with torch.enable_grad(), _set_fwd_grad_enabled(True):
            if self.interpreter is None:
                yield
                return
            with self.interpreter.lower():
                yield

    def below(self, x: torch.Tensor) -> torch.Tensor:
        """Unwrap a tensor by one level; detach it under torch's own autograd."""
        if self.kind is None:
            return x.detach()
        x = _functorch.unwrap_if_dead(x)
        return x if self.kind == "vmap" else steps._unwrap_for_grad(x, self.number)

    def peeled(self, x: torch.Tensor) -> torch.Tensor:
        """Remove the wrapper of this level from a tensor. A sample of vmap becomes its batch."""
        x = _functorch.unwrap_if_dead(x)
        is_here = _functorch.maybe_get_level(x) == self.number
        return _functorch.get_unwrapped(x) if is_here else x

    def wrapped(self, x: torch.Tensor) -> torch.Tensor:
        """Wrap a tensor of the level below at this level."""
        return x.view_as(x) if self.kind is None else steps._wrap_for_grad(x, self.number)

    def dual(self, x: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
        """Make a dual tensor at this level from a primal and a tangent of the level below."""
        return torch._VF._make_dual(self.wrapped(x), self.wrapped(tangent), level=0)

    def tangent(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the tangent of a tensor at this level, unwrapped to the level below. None if it
        has none.
        """
        if not self._is_here(x):
            return None
        tangent = torch._VF._unpack_dual(x, level=0)[1]
        return None if tangent is None else self.below(tangent.to(x.dtype))

    def moves(self, x: torch.Tensor) -> bool:
        """Check whether this level differentiates with respect to a tensor."""
        if self.kind == "jvp":
            tangent = self.tangent(x)
            return tangent is not None and not tangent._is_zerotensor()
        return self._is_here(x) and x.requires_grad

    def _is_here(self, x: torch.Tensor) -> bool:
        """Check whether a tensor is wrapped at this level."""
        if self.kind is None:
            return True
        x = _functorch.unwrap_if_dead(x)
        return _functorch.is_gradtrackingtensor(x) and _functorch.maybe_get_level(x) == self.number

    def pulled(
        self, outs: Sequence[torch.Tensor], pull: Pull, args: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Wrap results of the level below at this level, with a function that computes their
        vector-Jacobian product.

        Args:
            outs: the results.
            pull: maps the cotangents, a tuple with None for zero, to those of args. It also
                takes args if torch's own autograd runs it.
            args: the tensors to differentiate with respect to.
        """
        from torch._functorch.utils import enable_single_level_autograd_function

        with enable_single_level_autograd_function():
            return list(_CustomBackward.apply(self, outs, pull, *args))

    def batched(
        self, xs: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], tuple[int | None, ...], int]:
        """Unwrap samples under vmap: return the batched tensors, the batch dim of each, and the
        batch size.
        """
        assert self.interpreter is not None, "under no vmap"
        pairs = [_functorch._unwrap_batched(_functorch.unwrap_if_dead(x), self.number) for x in xs]
        return (
            [x for x, _ in pairs],
            tuple(dim for _, dim in pairs),
            self.interpreter.batch_size(),
        )

    def sample(self, x: torch.Tensor) -> torch.Tensor:
        """Wrap a tensor, batch dim first, as one sample under vmap."""
        return _functorch._add_batch_dim(x, 0, self.number)


def followed(xs: Sequence[Any]) -> list[str]:
    """List the torch.func transforms that differentiate one of these values, the innermost first:
    "jvp" or "grad".
    """
    level, xs = Level(), [x for x in xs if isinstance(x, torch.Tensor)]
    if level.kind is None or not xs:
        return []
    is_one = level.kind in ("jvp", "grad") and any(map(level.moves, xs))
    with level.lowered():
        below = followed([level.peeled(x) for x in xs])
    return [level.kind, *below] if is_one else below


def has_no_grad_mode() -> bool:
    """Check whether grad mode is off and no torch.func.grad is active. torch.func then takes
    backward formulas that have no derivative of their own (torch 2.13).
    """
    kinds = torch._C._functorch.TransformType
    stack = torch._C._functorch.get_interpreter_stack() or ()
    is_inside = any(level.key() == kinds.Grad for level in stack)
    return not torch.is_grad_enabled() and not is_inside


def jvp(
    fn: Callable[..., Any],
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
    has_aux: bool = False,
) -> Any:
    """Call torch.func.jvp on a function that returns tuples, which may be empty. Works where an fx
    graph has opened forward mode too.
    """

    def filled(*xs: Any) -> Any:
        out = fn(*xs)
        values, *aux = out if has_aux else (out,)
        return ((*values, xs[0]), *aux) if has_aux else (*values, xs[0])

    close = open_dual()
    is_counted = close is not already_open
    if is_counted:
        close()
    with contextlib.nullcontext() if is_counted else patched("dual level"):
        values, dots, *aux = torch.func.jvp(filled, primals, tangents, has_aux=has_aux)
    return _tangents_in_dtype(values[:-1], dots[:-1], *aux)


def _tangents_in_dtype(values: Any, tangents: Any, *aux: Any) -> Any:
    """Cast tangents to the dtypes of their primals, since a Python number may raise a tangent's
    dtype (torch 2.13).
    """
    return (values, tuple(t.to(x.dtype) for x, t in zip(values, tangents, strict=True)), *aux)
