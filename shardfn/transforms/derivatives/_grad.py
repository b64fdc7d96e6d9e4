"""grad and value_and_grad: reverse-mode derivatives of scalar functions of trees.

Dynamo reads this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import torch

from ... import _compat, _tree
from ...argnums import Argnums, check_argnums, positions
from ...errors import CaptureError
from ...ops import placement
from .._flattened import Flattened, check_moving, picked
from .._options import check_flag, check_function
from .._transformed import Transformed, name_of


@attrs.define(eq=False, repr=False, slots=False)
class ValueAndGrad(Transformed):
    """`value_and_grad` of a function."""

    verb: ClassVar[str] = "value_and_grad"
    by_fields: ClassVar[bool] = True
    held: tuple[Callable[..., Any]]
    argnums: Argnums
    has_aux: bool

    def inline(self, *args: Any, **kwargs: Any) -> Any:
        return self.returned(*self.placed(self.found(args, kwargs), args, self.wishes(args)))

    def found(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any, list[torch.Tensor]]:
        """(value, aux or None, gradients); the gradients are not placed yet."""
        return differentiate(
            self.verb, self.held[0], self.numbers(len(args)), self.has_aux, args, kwargs
        )

    def placed(
        self, found: tuple[Any, Any, list[torch.Tensor]], args: tuple[Any, ...], wishes: list[str]
    ) -> tuple[Any, Any, Any]:
        """(value, aux, gradients in the tree of their arguments, each placed as its argument
        is).
        """
        value, aux, gradients = found
        chosen = picked(args, self.numbers(len(args)))
        placed = placement.align(gradients, _tree.tensors(chosen), wishes)
        trees = _tree.with_tensors(chosen, placed)
        return value, aux, trees[0] if isinstance(self.argnums, int) else trees

    def wishes(self, args: tuple[Any, ...]) -> list[str]:
        """The bucketing options of each gradient: none."""
        chosen = picked(args, self.numbers(len(args)))
        return [""] * len(_tree.tensors(chosen))

    def returned(self, value: Any, aux: Any, grads: Any) -> Any:
        """The result of the transformed function."""
        return ((value, aux), grads) if self.has_aux else (value, grads)

    def numbers(self, count: int) -> tuple[int, ...]:
        """The positions of the arguments to differentiate, given the number of arguments."""
        n = self.argnums
        if isinstance(n, int) and 0 <= n < count:
            return (n,)  # what Dynamo mostly reads
        where = f"{self.verb}({name_of(self.fn)})"
        return positions(where, "argnums", n, count)

    def options(self) -> Any:
        return self.argnums, self.has_aux


@attrs.define(eq=False, repr=False, slots=False)
class Grad(ValueAndGrad):
    """`grad` of a function."""

    verb: ClassVar[str] = "grad"
    by_fields: ClassVar[bool] = True

    def returned(self, value: Any, aux: Any, grads: Any) -> Any:
        return (grads, aux) if self.has_aux else grads


def check_derivative(verb: str, fn: Any, argnums: Any, has_aux: Any) -> None:
    """Check the arguments of a transform that differentiates.

    Raises:
        TreeError: fn is not a function, or argnums are not ints or name one position twice.
        ShardError: has_aux is not a bool.
    """
    check_function(verb, fn)
    where = f"{verb}({name_of(fn)})"
    check_argnums(where, "argnums", argnums)
    check_flag(where, "has_aux", has_aux)


def differentiate(
    verb: str,
    fn: Callable[..., Any],
    numbers: tuple[int, ...],
    has_aux: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, Any, list[torch.Tensor]]:
    """(value, aux or None, gradients) of a function at arguments."""
    flat = Loss(fn, args, numbers, kwargs, has_aux)
    check_moving(verb, flat)
    gradients, value, aux = _compat.grad_and_value(flat, flat.primals)
    return value, flat.aux(aux) if has_aux else None, gradients


class Loss(Flattened):
    """A scalar function of trees as a function of a tuple of tensors. It returns (scalar,
    tensors of aux).
    """

    def __call__(self, primals: tuple[torch.Tensor, ...]) -> Any:
        values, aux = self.called(primals)
        self.returned.append((values, aux))
        value = values[0]
        if not isinstance(value, torch.Tensor):
            refuse_loss(name_of(self.fn), f"a {type(value).__name__}")
        elif not value.dtype.is_floating_point:
            refuse_loss(name_of(self.fn), f"of {value.dtype}")
        elif value.dim():
            refuse_loss(name_of(self.fn), f"of shape {tuple(value.shape)}")
        return (value, tuple(_tree.tensors(aux))) if self.has_aux else (value, ())


@_compat.constant_in_graph
def refuse_loss(name: str, what: str) -> None:
    """Raise the error for a function that cannot be differentiated.

    Raises:
        CaptureError: always.
    """
    fix = "return loss.sum() or loss.mean() of floating values; has_aux=True for (scalar, aux)"
    raise CaptureError.of(
        f"the gradient of {name}", f"its value is {what}", needed="a floating scalar", fix=fix
    )


def value_and_grad(
    fn: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False
) -> ValueAndGrad:
    """Return a function that computes the value of a scalar function and its gradient.

    Args:
        fn: a function that returns a floating-point scalar, or (scalar, aux) with `has_aux`.
        argnums: the positions of the arguments to differentiate, each a tree of floating-point
            tensors.
        has_aux: whether fn also returns auxiliary data, a tree, in addition to the scalar.

    Returns:
        A function with the same arguments as fn, which returns (value, gradients), or ((value,
        aux), gradients). A gradient has the shape, dtype and placement of the differentiated
        argument.

    Raises:
        TreeError: argnums is not a position or a tuple of positions, or is the position of no
            argument.
        CaptureError: in a call of the returned function, fn does not return a scalar.

    Source: jax.value_and_grad.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.value_and_grad(lambda w: (w * w).sum())(torch.tensor([1.0, 2.0]))
        (tensor(5.), tensor([2., 4.]))
    """
    check_derivative("value_and_grad", fn, argnums, has_aux)
    return ValueAndGrad((fn,), argnums, has_aux)


def grad(fn: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> Grad:
    """Return a function that computes the gradient of a scalar function.

    Args:
        fn: a function that returns a floating-point scalar, or (scalar, aux) with `has_aux`.
        argnums: the positions of the arguments to differentiate, each a tree of floating-point
            tensors.
        has_aux: whether fn also returns auxiliary data, a tree, in addition to the scalar.

    Returns:
        A function with the same arguments as fn, which returns the gradients, or (gradients, aux).
        A gradient has the shape, dtype and placement of the differentiated argument.

    Raises:
        TreeError: argnums is not a position or a tuple of positions, or is the position of no
            argument.
        CaptureError: in a call of the returned function, fn does not return a scalar.

    Source: jax.grad.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.grad(lambda w: (w * w).sum())(torch.tensor([1.0, 2.0]))
        tensor([2., 4.])
    """
    check_derivative("grad", fn, argnums, has_aux)
    return Grad((fn,), argnums, has_aux)
