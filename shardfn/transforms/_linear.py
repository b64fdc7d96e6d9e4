"""jvp, vjp and linearize: a function's value at a point, and its linear map there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import torch

from .. import _compat, _tree
from ..capture import prims
from ..errors import TreeError, problem
from ..runtime import Request
from ._flattened import Flattened
from ._transformed import Transformed, innermost, name_of


@attrs.define(eq=False, repr=False, slots=False)
class Evaluated(Transformed):
    """A function as it is, staged: what `vjp` and `linearize` return beside the linear map."""

    verb: ClassVar[str] = "value"
    held: tuple[Callable[..., Any]]

    def inline(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def asked(self) -> Request:
        return Request(self.__name__, self.fn, innermost(self.fn))

    def options(self) -> Any:
        return ()


@attrs.define(eq=False, repr=False, slots=False)
class Forward(Evaluated):
    """(primals, tangents) -> (value, tangent of the value)."""

    verb: ClassVar[str] = "jvp"
    has_aux: bool = False

    def inline(self, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
        flat = Flattened(self.fn, primals, tuple(range(len(primals))), {}, self.has_aux)
        matched(name_of(self.fn), "tangents", shapes(tangents), "primals", shapes(primals))
        found: Any = torch.func.jvp(flat, flat.primals, tuple(_tree.quick_leaves(tangents)), has_aux=self.has_aux)
        out = flat.value(found[0]), flat.value(found[1])
        return (*out, flat.aux(found[2])) if self.has_aux else out

    def asked(self) -> Request:
        return Request(self.__name__, self.inline, self.inline)

    def options(self) -> Any:
        return self.has_aux


@attrs.define(eq=False, repr=False, slots=False)
class Reverse(Forward):
    """(primals, cotangent of the value) -> cotangents of the primals, each placed as its primal."""

    verb: ClassVar[str] = "vjp"

    def inline(self, primals: tuple[Any, ...], cotangent: Any) -> Any:
        flat = Flattened(self.fn, primals, tuple(range(len(primals))), {}, self.has_aux)
        _, pull, *_ = torch.func.vjp(flat, *flat.primals, has_aux=self.has_aux)
        return pulled(name_of(self.fn), flat, pull, cotangent)


def pulled(name: str, flat: Flattened, pull: Callable[..., Any], cotangent: Any) -> Any:
    """The cotangents of the primals, in their trees."""
    matched(name, "the cotangent", shapes((cotangent,)), "the value", shapes(flat.returned[0][0]))
    found, primals = list(pull(tuple(_tree.quick_leaves((cotangent,))))), list(flat.primals)
    return _tree.refill(flat.chosen, iter(prims.align(found, primals, [""] * len(primals))))


def shapes(tree: Any) -> tuple[Any, ...]:
    """The shapes of the leaves of a tree; None for what is no tensor."""
    return tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in _tree.quick_leaves(tree))


@_compat.constant_in_graph
def matched(name: str, what: str, got: tuple[Any, ...], like: str, wanted: tuple[Any, ...]) -> None:
    """Check that tangents fit primals, or a cotangent a value.

    Raises:
        TreeError: other leaves, or leaves of other shapes.
    """
    if got != wanted:
        said = lambda found: ", ".join("no tensor" if s is None else str(s) for s in found)  # noqa: E731
        fix = f"a tree like {like}, with tensors of the same shapes"
        raise TreeError(problem(name, f"{what}: {said(got)}", needed=f"as {like}: {said(wanted)}", fix=fix), fix=fix)


def jvp(fn: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...], has_aux: bool = False) -> Any:
    """The value of a function, and how it changes when the arguments change by the tangents.

    Args:
        fn: returns a tensor or a tree of floating tensors; or (value, aux) with `has_aux`.
        primals: its arguments, a tuple of trees of floating tensors.
        tangents: the same trees, of the same shapes and dtypes.
        has_aux: whether fn returns auxiliary data beside the value.

    Returns:
        (value, tangent of the value), or (value, tangent, aux).

    Raises:
        TreeError: tangents that do not fit the primals.

    Source: jax.jvp.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.jvp(lambda x: x**2, (torch.tensor(3.0),), (torch.tensor(1.0),))
        (tensor(9.), tensor(6.))
    """
    return Forward((fn,), has_aux)(tuple(primals), tuple(tangents))


def vjp(fn: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """The value of a function, and a function that pulls a cotangent of it back to the arguments.

    Args:
        fn: returns a tensor or a tree of floating tensors; or (value, aux) with `has_aux`.
        primals: its arguments, trees of floating tensors.
        has_aux: whether fn returns auxiliary data beside the value.

    Returns:
        (value, pull), or (value, pull, aux). `pull(cotangent)` returns a tuple with a tree for each argument, placed as it is.
        Called outside of any transform it computes the value again on the way: nothing of the first call is kept.

    Raises:
        TreeError: from pull, a cotangent that does not fit the value.

    Source: jax.vjp.

    Example:
        >>> import torch, shardfn as sf
        >>> value, pull = sf.vjp(lambda x, y: x * y, torch.tensor(3.0), torch.tensor(4.0))
        >>> value, pull(torch.tensor(1.0))
        (tensor(12.), (tensor(4.), tensor(3.)))
    """
    if _compat.is_tracing() or _compat.inside_transform():
        flat = Flattened(fn, primals, tuple(range(len(primals))), {}, has_aux)
        value, pull, *aux = torch.func.vjp(flat, *flat.primals, has_aux=has_aux)
        back = lambda cotangent: pulled(name_of(fn), flat, pull, cotangent)  # noqa: E731
        return (flat.value(value), back, flat.aux(aux[0])) if has_aux else (flat.value(value), back)
    value = Evaluated((fn,))(*primals)
    pull = lambda cotangent: Reverse((fn,), has_aux)(primals, cotangent)  # noqa: E731
    return (value[0], pull, value[1]) if has_aux else (value, pull)


def linearize(fn: Callable[..., Any], *primals: Any) -> Any:
    """The value of a function, and its linear approximation at a point.

    Args:
        fn: returns a tensor or a tree of floating tensors.
        primals: its arguments, trees of floating tensors.

    Returns:
        (value, push). `push(*tangents)` returns the tangent of the value; it computes the value again on the way.

    Raises:
        TreeError: from push, tangents that do not fit the primals.

    Source: jax.linearize.

    Example:
        >>> import torch, shardfn as sf
        >>> value, push = sf.linearize(torch.sin, torch.tensor(0.0))
        >>> value, push(torch.tensor(2.0))
        (tensor(0.), tensor(2.))
    """
    return Evaluated((fn,))(*primals), lambda *tangents: Forward((fn,), False)(primals, tangents)[1]
