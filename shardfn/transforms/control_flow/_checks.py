"""The checks of scan, cond and while_loop on their functions. Dynamo calls them as they are, on
constants.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import _compat
from ...argnums import is_number
from ...errors import TreeError
from .._paired import CONSTANTS, described


@_compat.constant_in_graph
def rows_of(name: str, paths: tuple[str, ...], leaves: tuple[Any, ...], length: int | None) -> Any:
    """The number of slices that a scan runs over, or the text of a symbol.

    Raises:
        TreeError: leaves without dims, or with first dims of different sizes.
    """
    if length is not None and not (is_number(length) and length >= 0):
        got = f"length is {length!r}"
        fix = "leave out length=, since xs gives the number of steps"
        raise TreeError.of(f"{name}, length", got, needed="an int, 0 or more", fix=fix)
    rows = [(p, leaf) for p, leaf in zip(paths, leaves, strict=True) if leaf != "NoneType"]
    shapes = [(p, None if isinstance(leaf, str) else leaf[0]) for p, leaf in rows]
    wrong = [
        f"{p} has no rows, because it is {'not a tensor' if s is None else 'a scalar'}"
        for p, s in shapes
        if not s
    ]
    counts = {s[0] for _, s in shapes if s} | ({length} if length is not None else set())
    if not wrong and len(counts) > 1:
        wrong = [f"{p} has {s[0]} rows" for p, s in shapes if s]
        wrong += [] if length is None else [f"length is {length}"]
    if not wrong and not counts:
        wrong = ["neither xs nor length is given"]
    if wrong:
        fix = "give xs whose leaves have the same size of dim 0, or length="
        raise TreeError.of(name, *wrong, needed="one number of steps", fix=fix)
    return counts.pop()


@_compat.constant_in_graph
def check_carry(
    name: str, paths: tuple[str, ...], leaves: tuple[Any, ...], needs_one: bool = False
) -> None:
    """Check that a carry is made of tensors and None.

    Raises:
        TreeError: names the other leaves. Also raised for a carry without tensors where one is
            needed.
    """
    pairs = list(zip(paths, leaves, strict=True))
    wrong = [
        f"{path} is a {leaf}, and not a tensor"
        for path, leaf in pairs
        if leaf != "NoneType" and isinstance(leaf, str)
    ]
    if needs_one and all(isinstance(leaf, str) for leaf in leaves) and not wrong:
        wrong = ["the carry of the loop holds no tensor, so the loop would never end"]
    if wrong:
        fix = (
            "use torch.tensor(x) for a value that changes from step to step; the function may "
            "close over constants"
        )
        raise TreeError.of(name, *wrong, needed="a carry of tensors", fix=fix)


@_compat.constant_in_graph
def check_step(name: str, is_pair: bool, got: str) -> None:
    """Check that the function of a scan returns a pair (carry, result).

    Raises:
        TreeError: it returns something else.
    """
    if not is_pair:
        fix = "return carry, result, with None for a result that is not needed"
        raise TreeError.of(
            name, f"the function returns a {got}", needed="a pair (carry, result)", fix=fix
        )


@_compat.constant_in_graph
def check_after(
    name: str,
    wrong: tuple[str, ...],
    paths: tuple[str, ...],
    entered: tuple[Any, ...],
    left: tuple[Any, ...],
) -> None:
    """Check that a carry keeps its tree, shapes and dtypes.

    Raises:
        TreeError: names the leaves that change.
    """
    if wrong:
        fix = "return a carry with the same tree as the carry that the function gets"
        raise TreeError.of(name, *wrong, needed="the same tree", fix=fix)
    rows = zip(paths, entered, left, strict=True)
    changed = [
        f"{path} enters a step as {_described(before)}, but leaves it as {_described(after)}"
        for path, before, after in rows
        if not _stays(before, after)
    ]
    if changed:
        fix = (
            "cast or reshape the carry before returning it, or start with a carry like the "
            "returned one"
        )
        needed = "a carry of the same shapes and dtypes in every step"
        raise TreeError.of(name, *changed, needed=needed, fix=fix)


def _described(leaf: Any) -> str:
    return f"a {leaf}, and not a tensor" if isinstance(leaf, str) else described(leaf)


def _stays(before: Any, after: Any) -> bool:
    """Whether a carry may enter as one leaf and leave as another. A number takes the dtype of a
    scalar.
    """
    if isinstance(after, str) and not isinstance(before, str):
        return before[0] == () and _holds(before[1], after)
    return before == after


def _holds(dtype: torch.dtype, number: str) -> bool:
    """Whether a number of that type fits a dtype, in the sense of torch's type promotion."""
    if number == "bool":
        return dtype == torch.bool
    if number == "int":
        return dtype != torch.bool
    if number == "float":
        return dtype.is_floating_point or dtype.is_complex
    return number == "complex" and dtype.is_complex


@_compat.constant_in_graph
def check_choice(where: str, leaf: Any) -> None:
    """Check that a value is a single truth value.

    Raises:
        TreeError: it has several elements, or is not a tensor or a number.
    """
    if isinstance(leaf, str) and leaf in ("bool", "int", "float"):
        return
    if isinstance(leaf, str) or any(n != 1 for n in leaf[0]):
        fix = "use torch.where(pred, a, b), which chooses element by element, or sf.vmap"
        raise TreeError.of(
            where, described(leaf), needed="a bool, or a tensor with one element", fix=fix
        )


@_compat.constant_in_graph
def check_branch_trees(name: str, wrong: tuple[str, ...]) -> None:
    """Check that two branches return the same tree.

    Raises:
        TreeError: with every difference.
    """
    if wrong:
        fix = "return the same tree from both branches"
        raise TreeError.of(name, *wrong, needed="branches with the same results", fix=fix)


@_compat.constant_in_graph
def branch_dtypes(
    name: str,
    paths: tuple[str, ...],
    first: tuple[Any, ...],
    second: tuple[Any, ...],
    constants: tuple[Any, ...],
    others: tuple[Any, ...],
) -> tuple[torch.dtype | None, ...]:
    """The dtype that numbers take in each result of two branches, or None for a result without
    numbers.

    Args:
        name: the name of the branch in errors.
        paths: of the results.
        first: what true_fn returns: kinds.
        second: what false_fn returns.
        constants: the results of true_fn that are not tensors, None in the places of tensors.
        others: those of false_fn.

    Raises:
        TreeError: results of different shapes, dtypes or types, or unequal constants that are
            not numbers.
    """
    rows = list(zip(paths, first, second, constants, others, strict=True))
    wrong = [
        f"{path}: true_fn returns {_shown(yes, a)}, false_fn {_shown(no, b)}"
        for path, yes, no, a, b in rows
        if not _joins(yes, no, a, b)
    ]
    if wrong:
        fix = "cast or expand the result of one branch; use torch.tensor(x) for a number"
        raise TreeError.of(name, *wrong, needed="branches with the same results", fix=fix)
    return tuple(_dtype(yes, no) for _, yes, no, _, _ in rows)


def _joins(yes: Any, no: Any, a: Any, b: Any) -> bool:
    if isinstance(yes, str) and isinstance(no, str):
        return yes == no and (yes in CONSTANTS["numbers"] or a == b)
    if isinstance(yes, str):
        return _joins_tensor(yes, no)
    if isinstance(no, str):
        return _joins_tensor(no, yes)
    return yes == no


def _joins_tensor(number: str, tensor: Any) -> bool:
    """Whether a number of one branch can be the tensor of the other."""
    shape = tensor[0]
    dtype = tensor[1]
    return shape == () and number in CONSTANTS["numbers"] and _holds(dtype, number)


def _shown(leaf: Any, constant: Any) -> str:
    return f"{constant!r}" if isinstance(leaf, str) else described(leaf)


def _dtype(yes: Any, no: Any) -> torch.dtype | None:
    tensors = [leaf[1] for leaf in (yes, no) if not isinstance(leaf, str)]
    if len(tensors) == 2 or yes == "NoneType":
        return None
    if tensors:
        return tensors[0]
    default = torch.get_default_dtype()
    dtypes = {
        "bool": torch.bool,
        "int": torch.int64,
        "float": default,
        "complex": default.to_complex(),
    }
    return dtypes.get(yes)
