"""The levels of torch.func one at a time: a value at the innermost level, and below it."""

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
    """torch.func.grad_and_value of a function of a tuple of tensors, which returns a scalar and
    a tuple of tensors: the same calls, with less Python for Dynamo to read.

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
        found = steps._autograd_grad((value,), xs, create_graph=True)
        gradients = [steps._unwrap_for_grad(g, level) for g in found]
        value = steps._unwrap_for_grad(value, level)
        if aux:
            aux = tuple([steps._unwrap_for_grad(x, level) for x in aux])
    return gradients, value, aux


def enter_gradient() -> int:
    """Open a level of a gradient, and return its number."""
    return int(_functorch._grad_increment_nesting())


def leave_gradient() -> None:
    """Close the innermost level, one of a gradient."""
    _functorch._grad_decrement_nesting()


def _is_at(x: torch.Tensor, level: int) -> bool:
    x = _functorch.unwrap_if_dead(x)
    return _functorch.is_gradtrackingtensor(x) and _functorch.maybe_get_level(x) == level


def followed_at(x: torch.Tensor, level: int) -> torch.Tensor:
    """A tensor that a level of a gradient, the innermost one, follows."""
    here = x if _is_at(x, level) else steps._wrap_for_grad(x, level)
    if not here.requires_grad:
        with steps.enable_inplace_requires_grad(True):
            here.requires_grad_()
    return here


def below_gradient(x: torch.Tensor, level: int) -> torch.Tensor:
    """A tensor without a level of a gradient."""
    return steps._unwrap_for_grad(x, level) if _is_at(x, level) else x


class _Pulled(_SingleLevelFunction):
    """An autograd.Function of results of the level below, whose derivative at this level is a
    given function.
    """

    @staticmethod
    def forward(
        ctx: Any, level: Level, outs: Sequence[torch.Tensor], pull: Pull, *args: torch.Tensor
    ) -> Any:
        ctx.level, ctx.pull = level, pull
        if level.kind is None:  # saved because torch's own autograd may differentiate again
            ctx.save_for_backward(*args)
        ctx.set_materialize_grads(False)
        here = tuple(level.wrapped(x) for x in outs)
        ctx.mark_non_differentiable(
            *(x for x in here if not (x.is_floating_point() or x.is_complex()))
        )
        return here

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        again = ctx.saved_tensors if ctx.level.kind is None else None
        return None, None, None, *ctx.pull(cotangents, again)


class Level:
    """The innermost active transform. Without one, torch's own autograd, of kind None."""

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
        """A context without this transform. The others still differentiate."""
        from torch.autograd.forward_ad import _set_fwd_grad_enabled

        with torch.enable_grad(), _set_fwd_grad_enabled(True):
            if self.interpreter is None:
                yield
                return
            with self.interpreter.lower():
                yield

    def below(self, x: torch.Tensor) -> torch.Tensor:
        """The value of a tensor one level down."""
        if self.kind is None:
            return x.detach()
        x = _functorch.unwrap_if_dead(x)
        return x if self.kind == "vmap" else steps._unwrap_for_grad(x, self.number)

    def peeled(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor without its wrapper of this level. Samples get their batch dim."""
        x = _functorch.unwrap_if_dead(x)
        is_here = _functorch.maybe_get_level(x) == self.number
        return _functorch.get_unwrapped(x) if is_here else x

    def wrapped(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor of the level below, wrapped at this level."""
        return x.view_as(x) if self.kind is None else steps._wrap_for_grad(x, self.number)

    def dual(self, x: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
        """A tensor with its tangent at this level, both of the level below."""
        return torch._VF._make_dual(self.wrapped(x), self.wrapped(tangent), level=0)

    def tangent(self, x: torch.Tensor) -> torch.Tensor | None:
        """The tangent of a tensor at this level, as a value of the level below."""
        if not self._is_here(x):
            return None
        tangent = torch._VF._unpack_dual(x, level=0)[1]
        return None if tangent is None else self.below(tangent.to(x.dtype))

    def moves(self, x: torch.Tensor) -> bool:
        """Whether this level differentiates with respect to a tensor."""
        if self.kind == "jvp":
            tangent = self.tangent(x)
            return tangent is not None and not tangent._is_zerotensor()
        return self._is_here(x) and x.requires_grad

    def _is_here(self, x: torch.Tensor) -> bool:
        if self.kind is None:
            return True
        x = _functorch.unwrap_if_dead(x)
        return _functorch.is_gradtrackingtensor(x) and _functorch.maybe_get_level(x) == self.number

    def pulled(
        self, outs: Sequence[torch.Tensor], pull: Pull, args: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Results of the level below, wrapped at this level with a function for their
        derivative.

        Args:
            outs: the results.
            pull: maps the cotangents, a tuple with None for zero, to those of args. It also
                takes args if torch's own autograd runs it.
            args: the tensors to differentiate with respect to.
        """
        from torch._functorch.utils import enable_single_level_autograd_function

        with enable_single_level_autograd_function():
            return list(_Pulled.apply(self, outs, pull, *args))

    def batched(
        self, xs: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], tuple[int | None, ...], int]:
        """Under vmap: the batched tensors, the batch dim of each, and the batch size."""
        assert self.interpreter is not None, "under no vmap"
        pairs = [_functorch._unwrap_batched(_functorch.unwrap_if_dead(x), self.number) for x in xs]
        return (
            [x for x, _ in pairs],
            tuple(dim for _, dim in pairs),
            self.interpreter.batch_size(),
        )

    def sample(self, x: torch.Tensor) -> torch.Tensor:
        """Under vmap: a tensor with the batch dim first, wrapped as one sample."""
        return _functorch._add_batch_dim(x, 0, self.number)


def followed(xs: Sequence[Any]) -> list[str]:
    """The modes in which the levels of torch.func follow one of these values, the innermost
    first: "jvp" or "grad".
    """
    level, xs = Level(), [x for x in xs if isinstance(x, torch.Tensor)]
    if level.kind is None or not xs:
        return []
    is_one = level.kind in ("jvp", "grad") and any(map(level.moves, xs))
    with level.lowered():
        below = followed([level.peeled(x) for x in xs])
    return [level.kind, *below] if is_one else below


def stops_pulls() -> bool:
    """Whether grad mode is off, and no derivative around this call asked for that. torch.func
    then takes backward formulas that have no derivative of their own (torch 2.13).
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
    """torch.func.jvp of a function that returns tuples. Also works where a graph has opened
    forward mode.
    """
    close = open_dual()
    is_counted = close is not already_open
    if is_counted:
        close()
    with contextlib.nullcontext() if is_counted else patched("dual level"):
        return _of_one_dtype(*torch.func.jvp(fn, primals, tangents, has_aux=has_aux))


def _of_one_dtype(values: Any, tangents: Any, *aux: Any) -> Any:
    """Tangents cast to the dtypes of their values, since a number may raise a tangent's dtype
    (torch 2.13).
    """
    return (values, tuple(t.to(x.dtype) for x, t in zip(values, tangents, strict=True)), *aux)
