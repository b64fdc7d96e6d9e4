"""Two trees that must match, such as tangents and primals: paired by path, and checked leaf by
leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import _compat, _tree, tree_pairs
from ..errors import TreeError
from ..ops.text_formats import parse_shards

NUMBERS = (bool, int, float, complex)


@_compat.of_trees
def kind(x: Any) -> Any:
    """A leaf as a constant: (shape, dtype) of a tensor, else the name of its type. A size that
    is read as a symbol is a text.
    """
    return (
        (_compat.sizes_named(x.shape), x.dtype) if isinstance(x, torch.Tensor) else type(x).__name__
    )


@_compat.of_trees
def compare_sizes(leaves: Sequence[Any], dims: Sequence[int | None]) -> bool:
    """Whether the sizes of these dims are equal. If they are, symbols among them are one text
    from here on, and the captured program is for equal sizes.
    """
    pairs = zip(leaves, dims, strict=True)
    sizes = [
        x.shape[d]
        for x, d in pairs
        if isinstance(x, torch.Tensor) and d is not None and -x.dim() <= d < x.dim()
    ]
    return all(n == sizes[0] for n in sizes)


@_compat.of_trees
def multiples(x: torch.Tensor, n: int) -> tuple[int, ...]:
    """The shape of a tensor, with n for each size that is read as a symbol: for a check whether
    numbers divide it that divide n.
    """
    return tuple([n if _compat.is_symbol(size) else size for size in x.shape])


@_compat.of_trees
def numbers(x: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor, with numbers for symbols: the captured program is for them alone."""
    return tuple(map(int, x.shape))


@_compat.of_trees
def is_divided(x: torch.Tensor, text: str) -> bool:
    """Whether the ranks divide the sizes that are read as symbols.

    Args:
        x: a tensor.
        text: how mesh axes shard it, as text for the prims.
    """
    shape = list(x.shape)
    is_even = True
    for _, n, dim in parse_shards(text) if text else ():
        if dim is not None and _compat.is_symbol(shape[dim]):
            is_even = is_even and bool(shape[dim] % n == 0)
            shape[dim] = shape[dim] // n
    return is_even


@_compat.of_trees
def kinds(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Describe several leaves by `kind`, as a tuple."""
    return tuple([kind(x) for x in leaves])


@_compat.of_trees
def paired(
    where: str,
    tree: Any,
    like: Any,
    names: tuple[str, str],
    paths: tuple[str, str],
    fix: str = "",
    is_zero: Callable[[Any], bool] | None = None,
) -> list[Any]:
    """The leaves of a tree in the order of another tree, of the same structure, shapes and
    dtypes.

    Args:
        where: the name of the function in errors.
        tree: the tree to check.
        like: the tree that it must match.
        names: the names of the two in errors, in the plural.
        paths: the paths of the roots of the two in errors.
        fix: the suggestion; by default a tree_map over the other tree.
        is_zero: whether a part of the tree stands for zeros. Its leaves are None.

    Raises:
        TreeError: another structure, shape or dtype. Lists every mismatch.
    """
    leaves, wrong = tree_pairs.pair(tree, like, names, paths[0], is_zero)
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
        where: the name of the function in errors.
        names: the names of the two in errors.
        wrong: mismatches found while pairing.
        rows: paths in the one tree, paths in the other, types of the leaves of the one and of
            the other.
        has_zeros: whether None may stand for zeros.
        fix: the suggestion.

    Raises:
        TreeError: they do not match.
    """
    lines, (first, second) = list(wrong), names
    for path, other, mine, theirs in zip(*rows, strict=True) if not lines else ():
        if not (_fits(mine, theirs) or (has_zeros and mine == "NoneType")):
            lines.append(f"{path} is {described(mine)}, {other} is {described(theirs)}")
    if lines:
        fix = fix or (
            f"make {first} with tree_map over {second}, such as sf.tree_map(torch.zeros_like, ...)"
        )
        got, needed = (f"{first} do not match {second}", "the same tree, shapes and dtypes")
        raise TreeError.of(
            where, got, *lines, needed=needed, fix=fix, arg_path=rows[0][0] if rows[0] else None
        )


def _fits(got: Any, wanted: Any) -> bool:
    """Return whether two leaves have one shape and dtype; None fits a leaf without a derivative."""
    if isinstance(wanted, str):
        numbers = CONSTANTS["numbers"]
        return got in (wanted, "NoneType") or (wanted in numbers and got in numbers)
    _, dtype = wanted
    without = not (dtype.is_floating_point or dtype.is_complex)
    return got == wanted or (without and got == "NoneType")


def described(leaf: Any) -> str:
    """Print the constant that `kind` returned for a leaf, for an error message."""
    return f"a {leaf}" if isinstance(leaf, str) else f"{leaf[0]} {leaf[1]}"


@_compat.of_trees
def zero_like(x: Any) -> Any:
    """The tangent of a constant: zero for a number, None for anything else."""
    return type(x)(0) if isinstance(x, NUMBERS) else None


def scalar(x: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Turn a Python number into a 0-dim tensor."""
    return torch.full((), x, device=device, dtype=dtype)


@_compat.constant_in_graph
def check_leaves(
    where: str, verb: str, paths: Sequence[str], leaves: Sequence[Any], allowed: str
) -> None:
    """Check that leaves are tensors, numbers or None, as a row of `NEEDED` allows.

    Args:
        where: the name of the function in errors.
        verb: the operation that the other leaves do not support.
        paths: of the leaves.
        leaves: the leaves, as `kind` returns them.
        allowed: a row of `NEEDED`.

    Raises:
        TreeError: names each leaf that is not allowed.
    """
    lines = [
        f"{path} is {described(leaf)}"
        for path, leaf in zip(paths, leaves, strict=True)
        if not _allowed(leaf, allowed)
    ]
    if lines:
        needed, fix = NEEDED[allowed]
        raise TreeError.of(
            where, verb, *lines, needed=needed, fix=fix, arg_path=lines[0].split(" is ")[0]
        )


NEEDED = {
    "floating": (
        "floating tensors, or None",
        "torch.tensor(x) for a number; for other values use argnums or a closure",
    ),
    "results": (
        "floating results, or None",
        (
            "return x.float() of a result x that is to be differentiated; for other results "
            "return (result, aux) with has_aux=True"
        ),
    ),
    "primals": ("tensors (a float must be a tensor)", "torch.tensor(x) for a float"),
    "numbers": (
        "tensors, numbers or None",
        "outside of the function, compute the values that are not tensors",
    ),
}


CONSTANTS = {  # for each row: the types, other than tensors and None, that are allowed
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
