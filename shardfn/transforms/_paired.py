"""Two trees that must agree, such as tangents and primals: paired by path, and checked leaf by
leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import _compat, _tree
from ..errors import TreeError, problem

NUMBERS = (bool, int, float, complex)


@_compat.read_by_dynamo
def kind(x: Any) -> Any:
    """A leaf as a constant: (shape, dtype) of a tensor, the name of its type of anything else."""
    return (
        (tuple(x.shape), x.dtype)
        if isinstance(x, torch.Tensor)
        else type(x).__name__
    )


@_compat.read_by_dynamo
def kinds(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """The kinds of several leaves."""
    return tuple([kind(x) for x in leaves])


@_compat.read_by_dynamo
def paired(
    where: str,
    tree: Any,
    like: Any,
    names: tuple[str, str],
    paths: tuple[str, str],
    fix: str = "",
    is_zero: Callable[[Any], bool] | None = None,
) -> list[Any]:
    """The leaves of a tree in the order of another, which it equals in structure, shapes and
    dtypes.

    Args:
        where: how errors call the function.
        tree: what came.
        like: what it must be like.
        names: what errors call the two, in the plural.
        paths: how errors reach the leaves of the two.
        fix: what to try; by default a tree_map over the other one.
        is_zero: whether a part of the tree stands for zeros; its leaves are None.

    Raises:
        TreeError: another structure, shape or dtype; every mismatch is listed.
    """
    leaves, wrong = _tree.pair(tree, like, names, paths[0], is_zero)
    wanted = _tree.quick_leaves((like,))
    rows = (
        tuple(_tree.quick_paths(like, paths[0])),
        tuple(_tree.quick_paths(like, paths[1])),
        kinds(leaves),
        kinds(wanted),
    )
    check_alike(where, names, tuple(wrong), rows, is_zero is not None, fix)
    return leaves


@_compat.constant_in_graph
def check_alike(
    where: str,
    names: tuple[str, str],
    wrong: Sequence[str],
    rows: tuple[Any, ...],
    has_zeros: bool,
    fix: str,
) -> None:
    """Check that two paired trees have the same leaves.

    Args:
        where: how errors call the function.
        names: what errors call the two.
        wrong: mismatches that pairing has seen.
        rows: paths in the one tree, paths in the other, kinds of the leaves of the one and of
            the other.
        has_zeros: whether None may stand for zeros.
        fix: what to try.

    Raises:
        TreeError: they do not.
    """
    lines, (first, second) = list(wrong), names
    for path, other, mine, theirs in zip(*rows, strict=True) if not lines else ():
        if not (_fits(mine, theirs) or (has_zeros and mine == "NoneType")):
            lines.append(
                f"{path} is {described(mine)}, {other} is {described(theirs)}"
            )
    if lines:
        fix = fix or (
            f"make {first} with tree_map over {second}, such as "
            "sf.tree_map(torch.zeros_like, ...)"
        )
        got, needed = (
            f"{first} do not match {second}",
            "one tree, shapes and dtypes",
        )
        text = problem(where, got, *lines, needed=needed, fix=fix)
        raise TreeError(text, arg_path=rows[0][0] if rows[0] else None, fix=fix)


def _fits(got: Any, wanted: Any) -> bool:
    """Whether a leaf may stand beside another: what has no derivative needs none."""
    if isinstance(wanted, str):
        numbers = CONSTANTS["numbers"]
        return got in (wanted, "NoneType") or (wanted in numbers and got in numbers)
    _, dtype = wanted
    without = not (dtype.is_floating_point or dtype.is_complex)
    return got == wanted or (without and got == "NoneType")


def described(leaf: Any) -> str:
    """A kind in words."""
    return f"a {leaf}" if isinstance(leaf, str) else f"{leaf[0]} {leaf[1]}"


def zero_like(x: Any) -> Any:
    """The tangent of a constant: zero of a number, None of anything else."""
    return type(x)(0) if isinstance(x, NUMBERS) else None


def scalar(
    x: Any, device: torch.device | str, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A number as a tensor without dims."""
    return torch.full((), x, device=device, dtype=dtype)


@_compat.constant_in_graph
def check_leaves(
    where: str, verb: str, paths: Sequence[str], leaves: Sequence[Any], allowed: str
) -> None:
    """Check that leaves are of certain kinds.

    Args:
        where: how errors call the function.
        verb: what cannot be done to the others.
        paths: of the leaves.
        leaves: their kinds.
        allowed: a row of `NEEDED`.

    Raises:
        TreeError: naming each leaf that is of another kind.
    """
    lines = [
        f"{path} is {described(leaf)}"
        for path, leaf in zip(paths, leaves, strict=True)
        if not _allowed(leaf, allowed)
    ]
    if lines:
        needed, fix = NEEDED[allowed]
        text = problem(where, verb, *lines, needed=needed, fix=fix)
        raise TreeError(text, arg_path=lines[0].split(" is ")[0], fix=fix)


NEEDED = {
    "floating": (
        "floating tensors, or None",
        "torch.tensor(x) for a number; argnums, or a closure, for what is not differentiated",
    ),
    "results": (
        "floating results, or None",
        (
            "x.float() of a result that is to be differentiated; has_aux=True for (result, "
            "aux) otherwise"
        ),
    ),
    "primals": ("tensors; a float only as a tensor", "torch.tensor(x) for a float"),
    "numbers": (
        "tensors, numbers or None",
        "return what is not a tensor outside of the function",
    ),
}


CONSTANTS = {  # of each row, the kinds that are not tensors and are allowed beside None
    "floating": (),
    "results": ("float", "complex"),
    "primals": ("bool", "int", "str"),
    "numbers": ("bool", "int", "float", "complex"),
}
ANY_DTYPE = ("primals", "numbers")


def _allowed(leaf: Any, row: str) -> bool:
    if isinstance(leaf, str):
        return leaf == "NoneType" or leaf in CONSTANTS[row]
    return row in ANY_DTYPE or leaf[1].is_floating_point or leaf[1].is_complex
