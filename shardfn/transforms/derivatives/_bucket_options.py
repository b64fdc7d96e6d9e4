"""The options of bucketed_grad for each leaf, checked. Dynamo runs this on constants, so errors
reach the user unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ... import _compat, _tree
from ...buckets import BucketOptions, BucketPlan, check_caps
from ...errors import ShardError, TreeError


@_compat.constant_in_graph
def wishes_text(
    name: str,
    caps: tuple[Any, Any, Any],
    roots: Sequence[str],
    paths: Sequence[str],
    kinds: Sequence[Any],
    by_path: Sequence[bool] | None,
    by_tree: Any,
    reduce_dtype: torch.dtype | None,
    plan: str | None,
) -> str:
    """A line for each leaf, which `BucketOptions.of` parses.

    Args:
        name: the name of the transformed function in errors.
        caps: cap, first_cap or None, max_in_flight, as the user wrote them.
        roots: the name of each differentiated argument.
        paths: of every leaf.
        kinds: the dtype of each tensor, or the name of the type of any other leaf.
        by_path: the answer of the predicate for each path.
        by_tree: alternatively the tree of bools, one for each root if there are several.
        reduce_dtype: the dtype in which gradients are sent.
        plan: JSON of a plan to follow.

    Returns:
        The lines.

    Raises:
        ShardError: a cap that is not a number of bytes, a first_cap above cap, or a
            reduce_dtype that is not floating.
        TreeError: a leaf without a gradient, an ignore that matches no leaf, or a plan for
            other leaves.
    """
    cap, first_cap, in_flight = check_caps(name, caps)
    _refuse_kinds(name, paths, kinds)
    dtype = _dtype_name(name, reduce_dtype)
    ignored = list(by_path) if by_path is not None else _ignored(name, by_tree, roots, paths)
    if (by_path is not None or by_tree is not None) and not any(ignored):
        fix = (
            "give a predicate of paths such as those above, or a tree of bools with at least one "
            "True"
        )
        raise TreeError.of(
            f"{name}, ignore", "it matches no leaf", f"the leaves are {_listed(paths)}", fix=fix
        )
    rows = {} if plan is None else BucketPlan.from_json(plan).rows(name, paths)
    wishes = [
        BucketOptions(
            path,
            cap,
            first_cap,
            skip,
            dtype,
            in_flight,
            tuple(rows[path]) if plan is not None else None,
        )
        for path, skip in zip(paths, ignored, strict=True)
    ]
    return "\n".join(wish.text for wish in wishes)


def _refuse_kinds(name: str, paths: Sequence[str], kinds: Sequence[Any]) -> None:
    wrong = [
        (p, k)
        for p, k in zip(paths, kinds, strict=True)
        if not isinstance(k, torch.dtype) or not (k.is_floating_point or k.is_complex)
    ]
    if wrong:
        lines = [
            f"{path} is {kind if isinstance(kind, torch.dtype) else f'of type {kind}'}"
            for path, kind in wrong
        ]
        where = f"{name}, argument {wrong[0][0]}"
        fix = "set argnums to arguments that hold only floating-point tensors"
        raise TreeError.of(
            where,
            "it cannot be differentiated",
            *lines,
            needed="floating tensors",
            fix=fix,
            arg_path=wrong[0][0],
        )


def _dtype_name(name: str, dtype: torch.dtype | None) -> str | None:
    if dtype is None:
        return None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        fix = "give a floating-point dtype such as torch.float32"
        raise ShardError.of(f"{name}, reduce_dtype", f"{dtype!r} is not a floating dtype", fix=fix)
    return str(dtype).removeprefix("torch.")


def _ignored(name: str, tree: Any, roots: Sequence[str], paths: Sequence[str]) -> list[bool]:
    """The bool that a prefix tree gives to each leaf."""
    if tree is None:
        return [False] * len(paths)
    answers = _answers(tree, roots)
    prefixes = [[a for a in answers if _is_prefix(a, path)] for path in paths]
    _refuse_unfit(name, answers, paths, prefixes)
    return [answers[of_leaf[0]] for of_leaf in prefixes]


def _answers(tree: Any, roots: Sequence[str]) -> dict[str, Any]:
    """The leaves of a prefix tree by path. With several differentiated arguments, there is a
    tree for each.
    """
    is_one_each = len(roots) > 1 and isinstance(tree, (tuple, list)) and len(tree) == len(roots)
    trees = tree if is_one_each else (tree,) * len(roots)
    answers = {}
    for root, part in zip(roots, trees, strict=True):
        for path, x in zip(_tree.paths(part), _tree.leaves(part), strict=True):
            answers[root + path] = x
    return answers


def _is_prefix(prefix: str, path: str) -> bool:
    """Whether a path is that of a leaf, or of a tree that holds it."""
    return path == prefix or (path.startswith(prefix) and path[len(prefix)] in "[.<")


def _refuse_unfit(
    name: str, answers: dict[str, Any], paths: Sequence[str], prefixes: Sequence[Sequence[str]]
) -> None:
    """Refuse a prefix tree unless it gives a bool to every leaf and has no other leaves.

    Raises:
        TreeError: names those leaves.
    """
    used = {prefix for of_leaf in prefixes for prefix in of_leaf}
    strangers = [prefix for prefix in answers if prefix not in used]
    missing = [p for p, of_leaf in zip(paths, prefixes, strict=True) if not of_leaf]
    wrong = [p for p, x in answers.items() if not isinstance(x, bool)]
    lines = [
        *(f"no leaf is at {p}" for p in strangers),
        *(f"the tree has no bool for {p}" for p in missing),
        *(f"{p} is {answers[p]!r}" for p in wrong),
    ]
    if lines:
        fix = (
            "give a prefix tree of bools over the differentiated argument, or a predicate of "
            "the leaf's path"
        )
        raise TreeError.of(f"{name}, ignore", "ignore does not fit the leaves", *lines, fix=fix)


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(paths[:6]) + (f", and {len(paths) - 6} more" if len(paths) > 6 else "")
