"""jacrev, jacfwd and hessian: the derivatives of every result with respect to every argument.

Dynamo reads this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import attrs
import torch

from ... import _tree
from ...argnums import Argnums, positions
from .._flattened import Flattened, check_moving, pulled_back, without_overlaps
from .._transformed import Transformed, name_of
from ._grad import check_derivative


def _reverse(flat: Flattened, numbers: tuple[int, ...], has_aux: bool) -> Callable[..., Any]:
    jacobian = torch.func.jacrev(flat, argnums=numbers, has_aux=has_aux)
    return lambda *primals: pulled_back(jacobian, *primals)


def _forward(fn: Callable[..., Any], numbers: tuple[int, ...], has_aux: bool) -> Callable[..., Any]:
    """The Jacobian of a function whose random numbers are the same in each column."""
    return torch.func.jacfwd(fn, argnums=numbers, has_aux=has_aux, randomness="same")


@attrs.define(eq=False, repr=False, slots=False)
class Jacobian(Transformed):
    """A function under `jacrev`, `jacfwd` or `hessian`."""

    verb: ClassVar[str] = "jacrev"
    by_fields: ClassVar[bool] = True
    held: tuple[Callable[..., Any]]
    argnums: Argnums
    has_aux: bool

    def inline(self, *args: Any, **kwargs: Any) -> Any:
        where = f"{self.verb}({name_of(self.fn)})"
        numbers = positions(where, "argnums", self.argnums, len(args))
        flat = Flattened(self.fn, args, numbers, kwargs, self.has_aux, where=where)
        check_moving(self.verb, flat)
        primals = without_overlaps(flat.primals)
        found = self.derived(flat, tuple(range(len(primals))))(*primals)
        rows, aux = found if self.has_aux else (found, ())
        jacobian = self.rebuilt(flat, iter(rows))
        return (jacobian, flat.aux(aux)) if self.has_aux else jacobian

    def rebuilt(self, flat: Flattened, rows: Iterator[Any]) -> Any:
        """Rebuild the tree of the value with a Jacobian in place of each leaf."""
        value = flat.returned[0][0]
        filled = [self.leaf(flat, x, rows) for x in _tree.quick_leaves(value)]
        return _tree.refill(value, filled)[0]

    def leaf(self, flat: Flattened, x: Any, rows: Iterator[Any]) -> Any:
        """Build the Jacobians of one result leaf; a Python number gets zeros."""
        if x is None:
            return None
        row = next(rows) if isinstance(x, torch.Tensor) else self.zeros(flat.primals)
        return self.nested(flat, row)

    def zeros(self, primals: tuple[torch.Tensor, ...]) -> Any:
        """Make the zero Jacobians of a result that is a Python number."""
        return [torch.zeros_like(x) for x in primals]

    def derived(self, flat: Flattened, numbers: tuple[int, ...]) -> Callable[..., Any]:
        """Differentiate a flat function by torch.func: a Jacobian for each result and argument."""
        return _reverse(flat, numbers, self.has_aux)

    def nested(self, flat: Flattened, row: Any) -> Any:
        """Arrange the Jacobians of one result in the trees of the arguments."""
        trees = flat.derivatives(row)
        return trees[0] if isinstance(self.argnums, int) else trees

    def options(self) -> Any:
        return self.argnums, self.has_aux


@attrs.define(eq=False, repr=False, slots=False)
class Forward(Jacobian):
    """A function under `jacfwd`."""

    verb: ClassVar[str] = "jacfwd"
    by_fields: ClassVar[bool] = True

    def derived(self, flat: Flattened, numbers: tuple[int, ...]) -> Callable[..., Any]:
        return _forward(flat, numbers, self.has_aux)


@attrs.define(eq=False, repr=False, slots=False)
class Hessian(Jacobian):
    """A function under `hessian`."""

    verb: ClassVar[str] = "hessian"
    by_fields: ClassVar[bool] = True

    def derived(self, flat: Flattened, numbers: tuple[int, ...]) -> Callable[..., Any]:
        inner = _reverse(flat, numbers, self.has_aux)
        return _forward(inner, numbers, self.has_aux)

    def zeros(self, primals: tuple[torch.Tensor, ...]) -> Any:
        return [[x.new_zeros((*x.shape, *y.shape)) for y in primals] for x in primals]

    def nested(self, flat: Flattened, row: Any) -> Any:
        return Jacobian.nested(self, flat, [Jacobian.nested(self, flat, column) for column in row])


def jacrev(fn: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> Jacobian:
    """Return a function that computes the Jacobian row by row in reverse mode, for functions with
    more inputs than outputs.

    Args:
        fn: a function that returns a tensor or a tree of tensors, or (value, aux) with `has_aux`.
        argnums: the positions of the arguments to differentiate, each a tree of floating-point
            tensors.
        has_aux: whether fn also returns auxiliary data in addition to the value.

    Returns:
        A function with the same arguments as fn. For each leaf of the value, the function returns a
        tree of Jacobians like the arguments. A Jacobian has the shape of the value followed by the
        shape of the argument. With `has_aux`, the function returns (Jacobian, aux).

    Raises:
        TreeError: argnums is not a position or a tuple of positions, or is the position of no
            argument.
        CaptureError: in a call of the returned function, fn cannot be captured as one graph.

    Source: jax.jacrev.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.jacrev(lambda x: x**2)(torch.tensor([1.0, 2.0]))
        tensor([[2., 0.],
                [0., 4.]])
    """
    check_derivative("jacrev", fn, argnums, has_aux)
    return Jacobian((fn,), argnums, has_aux)


def jacfwd(fn: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> Forward:
    """Return a function that computes the Jacobian column by column in forward mode, for functions
    with more outputs than inputs.

    Args:
        fn: a function that returns a tensor or a tree of tensors, or (value, aux) with `has_aux`.
        argnums: the positions of the arguments to differentiate, each a tree of floating-point
            tensors.
        has_aux: whether fn also returns auxiliary data in addition to the value.

    Returns:
        A function with the same arguments and results as the function that `jacrev` returns.

    Raises:
        TreeError: argnums is not a position or a tuple of positions, or is the position of no
            argument.
        CaptureError: in a call of the returned function, fn cannot be captured as one graph.

    Source: jax.jacfwd.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.jacfwd(lambda x: x.sum() * x)(torch.tensor([1.0, 2.0]))
        tensor([[4., 1.],
                [2., 5.]])
    """
    check_derivative("jacfwd", fn, argnums, has_aux)
    return Forward((fn,), argnums, has_aux)


def hessian(fn: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> Hessian:
    """Return a function that computes the matrix of second derivatives, by forward mode over
    reverse mode.

    Args:
        fn: a function that returns a tensor or a tree of tensors, or (value, aux) with `has_aux`.
        argnums: the positions of the arguments to differentiate, each a tree of floating-point
            tensors.
        has_aux: whether fn also returns auxiliary data in addition to the value.

    Returns:
        A function with the same arguments as fn. For each leaf of the value, the function returns
        the second derivatives as a tree of trees, in which each level is like the arguments.

    Raises:
        TreeError: argnums is not a position or a tuple of positions, or is the position of no
            argument.
        CaptureError: in a call of the returned function, fn cannot be captured as one graph.

    Source: jax.hessian.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.hessian(lambda x: (x**3).sum())(torch.tensor([1.0, 2.0]))
        tensor([[ 6.,  0.],
                [ 0., 12.]])
    """
    check_derivative("hessian", fn, argnums, has_aux)
    return Hessian((fn,), argnums, has_aux)
