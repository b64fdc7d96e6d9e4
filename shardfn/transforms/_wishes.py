"""What bucketed_grad wants for each leaf, checked; Dynamo runs this as it is, so that errors come out as they are."""

from __future__ import annotations


from collections.abc import Sequence
from typing import Any

import torch

from .. import _compat, _tree
from ..buckets import BucketPlan, Wish, bytes_of
from ..errors import ShardError, TreeError, problem

DEFAULT_FIRST = 10**6
CAP_NAMES = ("cap", "first_cap", "max_in_flight")
SIZE_FIX = "a positive int, or text such as '512KB', '25MB' or '1GiB'"


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
    """A line for each leaf, to be read by `Wish.of`.

    Args:
        name: how errors call the transformed function.
        caps: cap, first_cap or None, max_in_flight, as the user wrote them.
        roots: the name of each differentiated argument.
        paths: of every leaf.
        kinds: its dtype, or the name of its type where it is no tensor.
        by_path: what the predicate said of each path.
        by_tree: or the tree of bools, one for each root if there are several.
        reduce_dtype: of what is sent.
        plan: JSON of a plan to follow.

    Returns:
        The lines.

    Raises:
        ShardError: sizes that are none, a first_cap above cap, a reduce_dtype that is not floating.
        TreeError: a leaf that has no gradient; an ignore that fits no leaf; a plan for other leaves.
    """
    cap, first_cap, in_flight = checked_caps(name, caps)
    _refuse_kinds(name, paths, kinds)
    dtype = _dtype_name(name, reduce_dtype)
    ignored = list(by_path) if by_path is not None else _ignored(name, by_tree, roots, paths)
    if (by_path is not None or by_tree is not None) and not any(ignored):
        fix = "a predicate of paths such as those, or a tree of bools with a True in it"
        raise TreeError(problem(f"{name}, ignore", "it matches no leaf", f"the leaves are {_listed(paths)}", fix=fix), fix=fix)
    rows = {} if plan is None else _rows(name, BucketPlan.from_json(plan), paths)
    wishes = [
        Wish(path, cap, first_cap, skip, dtype, in_flight, tuple(rows[path]) if plan is not None else None)
        for path, skip in zip(paths, ignored, strict=True)
    ]
    return "\n".join(wish.text for wish in wishes)


def checked_caps(name: str, caps: tuple[Any, Any, Any]) -> tuple[int, int, int]:
    """Cap, first cap and bytes in flight, as numbers."""
    sizes: list[int] = []
    for what, size in zip(CAP_NAMES, caps, strict=True):
        try:
            sizes.append(min(DEFAULT_FIRST, sizes[0]) if size is None else bytes_of(size))
        except ValueError as error:
            raise ShardError(problem(f"{name}, {what}", str(error), fix=SIZE_FIX), fix=SIZE_FIX) from None
    if sizes[1] > sizes[0]:
        fix = "the first bucket is to close early: make first_cap at most cap"
        raise ShardError(problem(f"{name}, first_cap", f"first_cap {caps[1]!r} is above cap {caps[0]!r}", fix=fix), fix=fix)
    return sizes[0], sizes[1], sizes[2]


def _refuse_kinds(name: str, paths: Sequence[str], kinds: Sequence[Any]) -> None:
    wrong = [(p, k) for p, k in zip(paths, kinds, strict=True) if not isinstance(k, torch.dtype) or not k.is_floating_point]
    if wrong:
        lines = [f"{path} is {kind if isinstance(kind, torch.dtype) else f'of type {kind}'}" for path, kind in wrong]
        where, fix = f"{name}, argument {wrong[0][0]}", "argnums of arguments that hold floating tensors only"
        text = problem(where, "it cannot be differentiated", *lines, needed="floating tensors", fix=fix)
        raise TreeError(text, arg_path=wrong[0][0], fix=fix)


def _dtype_name(name: str, dtype: torch.dtype | None) -> str | None:
    if dtype is None:
        return None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        fix = "a floating dtype such as torch.float32"
        raise ShardError(problem(f"{name}, reduce_dtype", f"{dtype!r} is no floating dtype", fix=fix), fix=fix)
    return str(dtype).removeprefix("torch.")


def _ignored(name: str, tree: Any, roots: Sequence[str], paths: Sequence[str]) -> list[bool]:
    """What a prefix tree of bools says of each leaf."""
    if tree is None:
        return [False] * len(paths)
    trees = tree if len(roots) > 1 and isinstance(tree, (tuple, list)) and len(tree) == len(roots) else (tree,) * len(roots)
    said = {root + p: x for root, t in zip(roots, trees, strict=True) for p, x in zip(_tree.paths(t), _tree.leaves(t), strict=True)}
    found = [[prefix for prefix in said if p == prefix or (p.startswith(prefix) and p[len(prefix)] in "[.<")] for p in paths]
    strangers = [prefix for prefix in said if not any(prefix in f for f in found)]
    missing = [p for p, f in zip(paths, found, strict=True) if not f]
    wrong = [f"{p} is {said[p]!r}" for p in said if not isinstance(said[p], bool)]
    lines = [*(f"no leaf is at {p}" for p in strangers), *(f"nothing is said of {p}" for p in missing), *wrong]
    if lines:
        fix = "a prefix tree of bools, as the differentiated argument is built, or a predicate of the leaf's path"
        raise TreeError(problem(f"{name}, ignore", "it does not fit the leaves", *lines, fix=fix), fix=fix)
    return [said[f[0]] for f in found]


def _rows(name: str, plan: BucketPlan, paths: Sequence[str]) -> dict[str, list[Any]]:
    """What a plan says of each leaf: the bucket, kind, axis, phase, dtype and bytes of each of its collectives."""
    extra, missing = [p for p in plan.leaves if p not in paths], [p for p in paths if p not in plan.leaves]
    if extra or missing:
        lines = [*(f"the plan has also {p}" for p in extra), *(f"the plan lacks {p}" for p in missing)]
        fix = "a plan of this very function: fn.lower(...).plan"
        raise TreeError(problem(f"{name}, plan", "it is a plan for other leaves", *lines, fix=fix), fix=fix)
    rows: dict[str, list[Any]] = {p: [] for p in paths}
    for b in plan.buckets:
        for leaf, size in zip(b.leaves, b.sizes, strict=True):
            rows[leaf].append((b.index, b.kind, b.axis, b.phase, b.dtype, size))
    return rows


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(paths[:6]) + (f", and {len(paths) - 6} more" if len(paths) > 6 else "")
