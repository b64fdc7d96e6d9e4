"""grad and value_and_grad: reverse-mode derivatives of scalar functions of trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import torch

from .. import _compat, _tree
from ..argnums import Argnums, check_argnums, positions
from ..capture import prims
from ..errors import CaptureError, problem
from ..runtime import Request
from ._options import check_flag, check_function
from ._transformed import Transformed, innermost, name_of


@attrs.define(eq=False, repr=False, slots=False)
class ValueAndGrad(Transformed):
    """`value_and_grad` of a function."""

    verb: ClassVar[str] = "value_and_grad"
    held: tuple[Callable[..., Any]]
    argnums: Argnums
    has_aux: bool

    def inline(self, *args: Any, **kwargs: Any) -> Any:
        return self.returned(*self.placed(self.found(args, kwargs), args, self.wishes(args)))

    def found(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, list[torch.Tensor]]:
        """(value, aux or None, gradients); the gradients are not placed yet."""
        return differentiate(self.fn, self.numbers(len(args)), self.has_aux, args, kwargs)

    def placed(self, found: tuple[Any, Any, list[torch.Tensor]], args: tuple[Any, ...], wishes: list[str]) -> tuple[Any, Any, Any]:
        """(value, aux, gradients in the tree of their arguments, each placed as its argument is)."""
        value, aux, gradients = found
        chosen = tuple(args[n] for n in self.numbers(len(args)))
        trees = _tree.refill(chosen, iter(prims.align(gradients, _tree.quick_leaves(chosen), wishes)))
        return value, aux, trees[0] if isinstance(self.argnums, int) else trees

    def wishes(self, args: tuple[Any, ...]) -> list[str]:
        """How the reduction of each gradient may travel: as it likes."""
        return [""] * len(_tree.quick_leaves(tuple(args[n] for n in self.numbers(len(args)))))

    def returned(self, value: Any, aux: Any, grads: Any) -> Any:
        """The result, of what was found."""
        return ((value, aux), grads) if self.has_aux else (value, grads)

    def numbers(self, count: int) -> tuple[int, ...]:
        """The positions of the arguments to differentiate, of so many."""
        return positions(f"{self.verb}({name_of(self.fn)})", "argnums", self.argnums, count)

    def asked(self) -> Request:
        return Request(self.__name__, self.inline, innermost(self.fn))

    def options(self) -> Any:
        return self.argnums, self.has_aux


@attrs.define(eq=False, repr=False, slots=False)
class Grad(ValueAndGrad):
    """`grad` of a function."""

    verb: ClassVar[str] = "grad"

    def returned(self, value: Any, aux: Any, grads: Any) -> Any:
        return (grads, aux) if self.has_aux else grads


def check_derivative(verb: str, fn: Any, argnums: Any, has_aux: Any) -> None:
    """Check what a transform that differentiates is given.

    Raises:
        TreeError: no function; argnums that are no ints, or name one twice.
        ShardError: a has_aux that is no bool.
    """
    check_function(verb, fn)
    where = f"{verb}({name_of(fn)})"
    check_argnums(where, "argnums", argnums)
    check_flag(where, "has_aux", has_aux)


def differentiate(
    fn: Callable[..., Any], numbers: tuple[int, ...], has_aux: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any, list[torch.Tensor]]:
    """(value, aux or None, gradients) of a function at arguments."""
    chosen = tuple(args[n] for n in numbers)
    constants: list[Any] = []  # of aux, which torch.func cannot carry

    def flat(primals: tuple[torch.Tensor, ...]) -> Any:
        filled = list(args)
        for n, arg in zip(numbers, _tree.refill(chosen, iter(primals)), strict=True):
            filled[n] = arg
        out = fn(*filled, **kwargs)
        if not has_aux:
            return _loss(out, fn), ()
        if not isinstance(out, (tuple, list)) or len(out) != 2:
            refuse_loss(name_of(fn), "no pair (scalar, aux), and has_aux=True")
        value, aux = _loss(out[0], fn), (out[1],)
        constants.append(aux)
        return value, tuple(x for x in _tree.quick_leaves(aux) if isinstance(x, torch.Tensor))

    gradients, (value, tensors) = torch.func.grad_and_value(flat, has_aux=True)(tuple(_tree.quick_leaves(chosen)))
    return value, _rebuilt(constants[0], tensors) if has_aux else None, list(gradients)


def _loss(value: Any, fn: Callable[..., Any]) -> Any:
    if not isinstance(value, torch.Tensor):
        refuse_loss(name_of(fn), f"a {type(value).__name__}")
    elif not value.dtype.is_floating_point:
        refuse_loss(name_of(fn), f"of {value.dtype}")
    return value


@_compat.constant_in_graph
def refuse_loss(name: str, what: str) -> None:
    """Say that a function cannot be differentiated.

    Raises:
        CaptureError: always.
    """
    fix = "return loss.sum() or loss.mean() of floating values; has_aux=True for (scalar, aux)"
    text = problem(f"the gradient of {name}", f"its value is {what}", needed="a floating scalar", fix=fix)
    raise CaptureError(text, fix=fix)


def _rebuilt(aux: tuple[Any], tensors: tuple[torch.Tensor, ...]) -> Any:
    """aux with these tensors in place of the ones that were traced."""
    feed = iter(tensors)
    leaves = [next(feed) if isinstance(x, torch.Tensor) else x for x in _tree.quick_leaves(aux)]
    return _tree.refill(aux, iter(leaves))[0]


def value_and_grad(fn: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> ValueAndGrad:
    """A function that returns the value of a scalar function and its gradient.

    Args:
        fn: returns a floating scalar, or (scalar, aux) with `has_aux`.
        argnums: which positional arguments to differentiate; each may be a tree of floating tensors.
        has_aux: whether fn returns auxiliary data, a tree, beside the scalar.

    Returns:
        A function of the same arguments that returns (value, gradients), or ((value, aux), gradients). A gradient has the
        shape, dtype and placement of its argument.

    Raises:
        TreeError: argnums that are no positions; when called, positions that the call does not have.
        CaptureError: when called, if fn does not return a scalar.

    Source: jax.value_and_grad.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.value_and_grad(lambda w: (w * w).sum())(torch.tensor([1.0, 2.0]))
        (tensor(5.), tensor([2., 4.]))
    """
    check_derivative("value_and_grad", fn, argnums, has_aux)
    return ValueAndGrad((fn,), argnums, has_aux)


def grad(fn: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> Grad:
    """A function that returns the gradient of a scalar function.

    Args:
        fn: returns a floating scalar, or (scalar, aux) with `has_aux`.
        argnums: which positional arguments to differentiate; each may be a tree of floating tensors.
        has_aux: whether fn returns auxiliary data, a tree, beside the scalar.

    Returns:
        A function of the same arguments that returns the gradients, or (gradients, aux). A gradient has the shape, dtype
        and placement of its argument.

    Raises:
        TreeError: argnums that are no positions; when called, positions that the call does not have.
        CaptureError: when called, if fn does not return a scalar.

    Source: jax.grad.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.grad(lambda w: (w * w).sum())(torch.tensor([1.0, 2.0]))
        tensor([2., 4.])
    """
    check_derivative("grad", fn, argnums, has_aux)
    return Grad((fn,), argnums, has_aux)
