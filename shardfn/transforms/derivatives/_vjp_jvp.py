"""jvp, vjp and linearize: a function's value at a point, and its linear map there.

Dynamo reads this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import torch

from ... import _compat, _tree
from ...accepted import accept
from ...errors import TreeError
from ...ops import placement
from ...random import earlier_draws, state
from ...runtime import Request
from ...tracebacks import filter_errors
from .._flattened import Flattened, check_aux, pulled_back, without_overlaps
from .._paired import check_leaves, kinds, paired
from .._transformed import Transformed, innermost, name_of


@attrs.define(eq=False, repr=False, slots=False)
class Evaluated(Transformed):
    """A function, staged as it is: the value that `vjp` and `linearize` return beside the
    linear map.
    """

    verb: ClassVar[str] = "vjp"
    held: tuple[Callable[..., Any]]

    def inline(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def asked(self) -> Request:
        return Request(self.__name__, self.fn, innermost(self.fn))

    def options(self) -> Any:
        return ()


@attrs.define(eq=False, repr=False, slots=False)
class Linearized(Evaluated):
    """The function, at the point where `linearize` takes its derivative."""

    verb: ClassVar[str] = "linearize"


@attrs.define(eq=False, repr=False, slots=False)
class Forward(Evaluated):
    """(primals, tangents) -> (value, tangent of the value)."""

    verb: ClassVar[str] = "jvp"
    has_aux: bool = False

    def inline(self, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
        flat = self.flattened(primals)
        names = ("the tangents", "the primals")
        paths = ("tangents", "primals")
        given = paired(f"jvp({name_of(self.fn)})", tangents, primals, names, paths)
        pairs = zip(given, _tree.quick_leaves(primals), strict=True)
        dots = tuple([t for t, x in pairs if _tree.is_floating(x)])
        primals = without_overlaps(flat.primals)
        found: Any = torch.func.jvp(flat, primals, dots, has_aux=self.has_aux)
        out = flat.value(found[0]), flat.tangent(found[1])
        return (*out, flat.aux(found[2])) if self.has_aux else out

    def flattened(self, primals: tuple[Any, ...]) -> Flattened:
        """The function of the floating tensors among its arguments."""
        return flattened(self.verb, self.fn, primals, self.has_aux)

    def asked(self) -> Request:
        return Request(self.__name__, self.inline, self.inline)

    def options(self) -> Any:
        return self.has_aux


@attrs.define(eq=False, repr=False, slots=False)
class Reverse(Forward):
    """(primals, cotangent of the value) -> cotangents of the primals, each placed as its primal."""

    verb: ClassVar[str] = "vjp"

    def inline(self, primals: tuple[Any, ...], cotangent: Any) -> Any:
        flat = self.flattened(primals)
        _, pull, *_ = torch.func.vjp(flat, *flat.primals, has_aux=self.has_aux)
        return pulled(name_of(self.fn), flat, pull, cotangent)


def flattened(
    verb: str, fn: Callable[..., Any], primals: tuple[Any, ...], has_aux: bool
) -> Flattened:
    """A function of the floating tensors among its arguments.

    Raises:
        TreeError: an argument is a Python float, whose derivative would be lost.
    """
    paths = _tree.quick_paths(primals, "primals")
    where = f"{verb}({name_of(fn)})"
    got = kinds(_tree.quick_leaves(primals))
    check_leaves(where, "an argument has no derivative", paths, got, "primals")
    return Flattened(fn, primals, tuple(range(len(primals))), {}, has_aux)


def pulled(name: str, flat: Flattened, pull: Callable[..., Any], cotangent: Any) -> Any:
    """The cotangents of the primals, in their trees. None for a leaf without a derivative."""
    value = flat.returned[0][0][0]
    names = ("the cotangents", "the results")
    paths = ("cotangent", "result")
    given = paired(f"vjp({name})", cotangent, value, names, paths)
    pairs = zip(given, _tree.quick_leaves((value,)), strict=True)
    cotangents = [_materialized(g, x) for g, x in pairs if isinstance(x, torch.Tensor)]
    found = list(pulled_back(pull, tuple(cotangents)))
    primals = list(flat.primals)
    return flat.derivatives(placement.align(found, primals, [""] * len(primals)))


def _materialized(cotangent: Any, x: torch.Tensor) -> torch.Tensor:
    """Replace a missing cotangent (None) by zeros, as torch.func needs it."""
    return torch.zeros_like(x) if cotangent is None else cotangent


@_compat.constant_in_graph
def check_tuples(name: str, primals: str, tangents: str) -> None:
    """Check that primals and tangents are tuples of arguments.

    Raises:
        TreeError: they are not.
    """
    if primals not in ("tuple", "list") or tangents not in ("tuple", "list"):
        fix = "jvp(fn, (x,), (dx,))"
        got = f"primals are a {primals}, tangents a {tangents}"
        raise TreeError.of(f"jvp({name})", got, needed="tuples of arguments", fix=fix)


@filter_errors
def jvp(
    fn: Callable[..., Any],
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
    has_aux: bool = False,
) -> Any:
    """Compute the value of a function and its directional derivative along given tangents.

    Args:
        fn: a function that returns a tensor or a tree of floating-point tensors, or (value, aux)
            with `has_aux`.
        primals: the arguments of fn, a tuple of trees of floating-point tensors.
        tangents: trees with the same structure, shapes and dtypes as the primals.
        has_aux: whether fn also returns auxiliary data in addition to the value.

    Returns:
        A tuple (value, tangent of the value), or (value, tangent, aux).

    Raises:
        TreeError: the tangents do not match the primals.

    Source: jax.jvp.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.jvp(lambda x: x**2, (torch.tensor(3.0),), (torch.tensor(1.0),))
        (tensor(9.), tensor(6.))
    """
    check_tuples(name_of(fn), type(primals).__name__, type(tangents).__name__)
    return Forward((fn,), has_aux)(tuple(primals), tuple(tangents))


@filter_errors
def vjp(fn: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """Return the value of a function and its pullback, which maps a cotangent of the value to
    cotangents of the arguments.

    Args:
        fn: a function that returns a tensor or a tree of floating-point tensors, or (value, aux)
            with `has_aux`.
        primals: the arguments of fn, trees of floating-point tensors.
        has_aux: whether fn also returns auxiliary data in addition to the value.

    Returns:
        A tuple (value, pull), or (value, pull, aux). `pull(cotangent)` returns a tuple with a tree
        for each argument. Each leaf of the trees that `pull` returns has the placement of its
        argument. Outside of any transform, each call of `pull` recomputes the value of fn with the
        same random numbers, because no residuals are saved.

    Raises:
        TreeError: the cotangent that is passed to `pull` does not match the value.

    Source: jax.vjp.

    Example:
        >>> import torch, shardfn as sf
        >>> value, pull = sf.vjp(lambda x, y: x * y, torch.tensor(3.0), torch.tensor(4.0))
        >>> value, pull(torch.tensor(1.0))
        (tensor(12.), (tensor(4.), tensor(3.)))
    """
    if _compat.is_tracing() or _compat.inside_transform():
        flat = flattened("vjp", fn, primals, has_aux)
        value, pull, *aux = torch.func.vjp(flat, *flat.primals, has_aux=has_aux)
        back = lambda cotangent: pulled(name_of(fn), flat, pull, cotangent)
        return (flat.value(value), back, flat.aux(aux[0])) if has_aux else (flat.value(value), back)
    accept("vjp", fn=fn, has_aux=has_aux)
    again = _drawing_again()
    value = Evaluated((fn,))(*primals)
    if has_aux:
        is_pair = isinstance(value, (tuple, list)) and len(value) == 2
        check_aux(name_of(fn), is_pair, type(value).__name__)
    pull = again(lambda cotangent: Reverse((fn,), has_aux)(primals, cotangent))
    return (value[0], pull, value[1]) if has_aux else (value, pull)


@filter_errors
def linearize(fn: Callable[..., Any], *primals: Any) -> Any:
    """Compute the value of a function, and its linear approximation at a point.

    Args:
        fn: a function that returns a tensor or a tree of floating-point tensors.
        primals: the arguments of fn, trees of floating-point tensors.

    Returns:
        A tuple (value, push). `push(*tangents)` returns the tangent of the value. Each call of
        `push` also recomputes the value of fn: outside of a captured function with the same random
        numbers, and inside with other ones, as in torch.func.

    Raises:
        TreeError: the tangents that are passed to `push` do not match the primals.

    Source: jax.linearize.

    Example:
        >>> import torch, shardfn as sf
        >>> value, push = sf.linearize(torch.sin, torch.tensor(0.0))
        >>> value, push(torch.tensor(2.0))
        (tensor(0.), tensor(2.))
    """
    push = lambda *tangents: Forward((fn,), False)(primals, tangents)[1]
    if _compat.is_tracing():
        return Linearized((fn,))(*primals), push
    accept("linearize", fn=fn)
    again = _drawing_again()
    return Linearized((fn,))(*primals), again(push)


def _drawing_again() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what lets functions draw the random numbers that the next call draws."""
    states, tag, first = state.get(), state.tag, state.take(0)

    def wrapped(fn: Callable[..., Any]) -> Callable[..., Any]:
        def drawing_again(*args: Any) -> Any:
            if _compat.is_tracing():
                earlier_draws.draw_from(first)
                out = fn(*args)
                earlier_draws.draw_as_before(first)
                return out
            with state.again(states, tag):
                return fn(*args)

        return drawing_again

    return wrapped
