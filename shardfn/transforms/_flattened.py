"""A function of trees as a function of tensors, since torch.func takes tuples of tensors only.

Dynamo reads this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import _compat, _tree
from ..errors import CaptureError
from ._paired import check_leaves, kinds, zero_like
from ._transformed import name_of, parameter_names


@_compat.constant_in_graph
def _stops_pulls() -> bool:
    return _compat.has_no_grad_mode()


def pulled_back(pull: Callable[..., Any], *args: Any) -> Any:
    """The results of a function that runs backward formulas. They have derivatives of their own,
    whatever the grad mode of the call around them.
    """
    if _stops_pulls():
        with torch.enable_grad():
            return pull(*args)
    return pull(*args)


def picked(args: tuple[Any, ...], numbers: tuple[int, ...]) -> tuple[Any, ...]:
    """Select the arguments at these positions, without a loop in the usual case of one."""
    if len(numbers) == 1:
        return (args[numbers[0]],)
    return tuple([args[n] for n in numbers])


def without_overlaps(primals: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Primals of which no two elements share memory: torch gives a tangent the strides of its
    primal (torch 2.13 to 2.15). Sparse ones are left to be refused.
    """
    return tuple([x.clone() if _overlaps(x) else x for x in primals])


def _overlaps(x: torch.Tensor) -> bool:
    return x.layout is torch.strided and 0 in x.stride()


class Flattened:
    """A function of trees as a function of the tensors in some of its arguments. It keeps its
    last result.

    Args:
        fn: the function.
        args: all its positional arguments.
        numbers: the positions of the arguments whose tensors are passed in. Their constants
            stay.
        kwargs: its keyword arguments.
        has_aux: whether it returns (value, aux). The flat function then returns (tensors of the
            value, tensors of aux).
        moving: a predicate that selects the leaves of those arguments that are passed in.
        where: the name of the function in errors, set if every leaf of the value must have a
            derivative.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        numbers: tuple[int, ...],
        kwargs: Any,
        has_aux: bool,
        moving: Callable[[Any], bool] = _tree.is_floating,
        where: str | None = None,
    ) -> None:
        self.fn, self.args, self.numbers, self.kwargs = fn, args, numbers, kwargs
        self.has_aux, self.moving, self.where = has_aux, moving, where
        # the arguments whose tensors are passed in
        self.chosen = picked(args, numbers)
        self.returned: list[Any] = []

    @property
    def primals(self) -> tuple[torch.Tensor, ...]:
        """The tensors in the differentiated arguments."""
        return tuple(_tree.tensors(self.chosen, self.moving))

    def called(self, tensors: Iterable[torch.Tensor]) -> tuple[Any, Any]:
        """One call of the function with these tensors: the tuples (value,) and (aux,)."""
        filled = list(self.args)
        chosen = _tree.with_tensors(self.chosen, tensors, self.moving)
        if len(chosen) == 1:
            filled[self.numbers[0]] = chosen[0]
        else:
            for n, arg in zip(self.numbers, chosen, strict=True):
                filled[n] = arg
        out = self.fn(*filled, **self.kwargs)
        if not self.has_aux:
            return (out,), ()
        is_pair = isinstance(out, (tuple, list)) and len(out) == 2
        check_aux(name_of(self.fn), is_pair, type(out).__name__)
        return (out[0],), (out[1],)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        value, aux = self.called(tensors)
        if self.where is not None:
            leaves = _tree.quick_leaves(value)
            if not all(map(_tree.is_floating, leaves)):
                paths = _tree.quick_paths(value[0], "result")
                check_leaves(
                    self.where, "a result has no derivative", paths, kinds(leaves), "results"
                )
        self.returned.append((value, aux))
        flat = tuple(_tree.tensors(value))
        return (flat, tuple(_tree.tensors(aux))) if self.has_aux else flat

    def value(self, leaves: Iterable[Any]) -> Any:
        """Rebuild the tree of the function's value around these tensors."""
        return _tree.with_tensors(self.returned[0][0], leaves)[0]

    def tangent(self, leaves: Iterable[Any]) -> Any:
        """The tree of the value's tangent: the given tangents for its tensors, zeros for its
        constants.
        """
        tree = self.returned[0][0]
        feed = iter(leaves)
        filled = [
            next(feed) if isinstance(x, torch.Tensor) else zero_like(x)
            for x in _tree.quick_leaves(tree)
        ]
        return _tree.refill(tree, filled)[0]

    def aux(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Rebuild the tree of aux around these tensors."""
        return _tree.with_tensors(self.returned[0][1], tensors)[0]

    def derivatives(self, leaves: Iterable[torch.Tensor]) -> tuple[Any, ...]:
        """The chosen arguments with derivatives for the tensors that are passed in, and None
        for every constant.
        """
        feed = iter(leaves)
        filled = [next(feed) if self.moving(x) else None for x in _tree.quick_leaves(self.chosen)]
        return _tree.refill(self.chosen, filled)


def check_moving(verb: str, flat: Flattened) -> None:
    """Check that every differentiated leaf has a derivative or is None.

    Args:
        verb: the transform, for errors.
        flat: the function with its arguments.

    Raises:
        TreeError: names the leaves without a derivative.
    """
    if _tree.are_floating(flat.chosen):
        return
    leaves = _tree.quick_leaves(flat.chosen)
    where = f"{verb}({name_of(flat.fn)})"
    names = parameter_names(flat.fn, len(flat.args))
    roots = [names[n] if n < len(names) else f"args[{n}]" for n in flat.numbers]
    rows = zip(flat.chosen, roots, strict=True)
    paths = [path for x, root in rows for path in _tree.quick_paths(x, root)]
    check_leaves(where, "an argument cannot be differentiated", paths, kinds(leaves), "floating")


@_compat.constant_in_graph
def check_aux(name: str, is_pair: bool, got: str) -> None:
    """Check that a function with `has_aux` returns a pair.

    Raises:
        CaptureError: it does not.
    """
    if not is_pair:
        fix = "return (value, aux), or has_aux=False"
        raise CaptureError.of(
            name, f"it returns a {got}", needed="a pair (value, aux): has_aux=True", fix=fix
        )
