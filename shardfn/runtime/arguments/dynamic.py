"""The dims of arguments whose sizes may change between calls: those of `dynamic`, and marked
ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ... import _compat, _tree, argnums, tree_pairs
from ...errors import TreeError, call_site
from ...types import ShapeDtype
from ..options import Request

ATTRIBUTE = "_shardfn_dynamic"  # of a marked tensor: its Dims
Dims = dict[int, bool]  # dim -> whether it is an error if its size must be constant
FORM = (
    "a prefix tree over the arguments, or a dict of them by name; a leaf is a dim, a set of "
    "dims, True for all dims, a dict {dim: torch.export.Dim.AUTO or Dim.DYNAMIC}, or None"
)
HINTS = {"AUTO": False, "DYNAMIC": True}


def marked(x: Any) -> Dims:
    """The dims that `mark_dynamic` has marked, ours or torch's."""
    if not isinstance(x, torch.Tensor):
        return {}
    return {**_compat.torch_marks(x), **getattr(x, ATTRIBUTE, {})}


def dims_of(
    request: Request, args: tuple[Any, ...], kwargs: dict[str, Any], paths: Sequence[str]
) -> dict[int, Dims]:
    """By leaf of the arguments, the dims whose sizes may change between calls.

    Raises:
        TreeError: `dynamic` does not fit the arguments. Lists all mismatches.
    """
    leaves = _tree.leaves((args, kwargs))
    specs = _specs(request, args, kwargs, leaves)
    if request.around is not None:  # a rank's own tensors have their marks by now
        specs = [
            None if hasattr(x, ATTRIBUTE) else spec for x, spec in zip(leaves, specs, strict=True)
        ]
    rows = list(zip(specs, leaves, paths, strict=True))
    wrong = [f"{path}: {got}" for spec, x, path in rows for got in _misfits(spec, x)]
    if wrong:
        needed = "dims of tensors"
        path = wrong[0].split(":")[0]
        raise _misfit(request, wrong, needed, arg_path=path)
    found = {i: _with_marks(spec, x) for i, (spec, x, _) in enumerate(rows)}
    return {i: dims for i, dims in found.items() if dims}


def _with_marks(spec: Any, x: Any) -> Dims:
    """The dims of one leaf: those of `dynamic`, and its marked ones."""
    return {**marked(x), **_dims(spec, x)}


def _misfit(request: Request, lines: Sequence[str], needed: str, **fields: Any) -> TreeError:
    where, source = f"{request.name}, dynamic", call_site()
    return TreeError.of(where, *lines, needed=needed, fix=FORM, source=source, **fields)


def _specs(
    request: Request, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]
) -> list[Any]:
    """The leaf of `dynamic` for each leaf of the arguments."""
    if request.dynamic is None:
        return [None] * len(leaves)
    prefix = _by_argument(request, args, kwargs)
    try:
        return tree_pairs.broadcast_prefix(prefix, (args, kwargs), _is_dims)
    except ValueError as error:
        needed = "a prefix of the arguments"
        raise _misfit(request, error.args, needed) from None


def _by_argument(
    request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """`dynamic` as a prefix of (args, kwargs)."""
    prefix = request.dynamic
    if _is_dims(prefix):  # of every tensor
        return _tree.tree_map(lambda x: _for_tensor(prefix, x), (args, kwargs))
    if isinstance(prefix, dict):
        names = _names(request, args, kwargs)
        _refuse_unknown(request, prefix, [*names, *kwargs])
        named = {name: prefix.get(name) for name in kwargs}
        return tuple(prefix.get(name) for name in names), named
    if not isinstance(prefix, (tuple, list)):
        got = f"a {type(prefix).__name__}"
        raise _misfit(request, [got], "dims of the arguments")
    if len(prefix) > len(args):
        got = f"{len(prefix)} entries for {len(args)} positional arguments"
        raise _misfit(request, [got], "one entry for each argument")
    rest = (None,) * (len(args) - len(prefix))
    return (*prefix, *rest), dict.fromkeys(kwargs)


def _for_tensor(spec: Any, x: Any) -> Any:
    """A leaf of `dynamic` that stands for all arguments, for one of their leaves."""
    return spec if isinstance(x, (torch.Tensor, ShapeDtype)) else None


def _names(request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The names of the positional arguments."""
    leaves = (0,) * len(args), dict.fromkeys(kwargs, 0)
    paths = _tree.argument_paths(request.signature_of, *leaves)
    return paths[: len(args)]


def _refuse_unknown(request: Request, prefix: dict[Any, Any], given: Sequence[str]) -> None:
    """Refuse a name that is not an argument's.

    Raises:
        TreeError: names each.
    """
    signature = argnums.signature_of(request.signature_of)
    known = {*given, *(signature.parameters if signature is not None else ())}
    unknown = [repr(name) for name in prefix if name not in known]
    if unknown:
        got = f"there is no argument {', '.join(unknown)}"
        raise _misfit(request, [got], f"names among {', '.join(sorted(known))}")


def _is_dims(x: Any) -> bool:
    """Whether a part of `dynamic` is a leaf."""
    if isinstance(x, dict):
        return any(_compat.dim_hint(hint) is not None for hint in x.values())
    return x is None or isinstance(x, (bool, int, set, frozenset))


def _misfits(spec: Any, x: Any) -> Iterator[str]:
    """Lines for a leaf of `dynamic` that does not fit the argument."""
    if spec is None or spec is True or spec is False or x is None:
        return
    if not isinstance(x, (torch.Tensor, ShapeDtype)):
        yield f"a {type(x).__name__} has no dims"
        return
    rank = len(x.shape)
    for dim in _given(spec):
        if not isinstance(dim, int) or isinstance(dim, bool):
            yield f"{dim!r} is not a dim"
        elif not -rank <= dim < rank:
            yield f"there is no dim {dim} in shape {tuple(x.shape)}"
    if isinstance(spec, dict):
        hints = {dim: _compat.dim_hint(hint) for dim, hint in spec.items()}
        wrong = [dim for dim, hint in hints.items() if hint is None and spec[dim]]
        yield from (f"{spec[dim]!r} is not a hint for dim {dim}" for dim in wrong)


def _given(spec: Any) -> list[Any]:
    """The dims of a leaf of `dynamic`."""
    return [spec] if isinstance(spec, int) else [*spec]


def _dims(spec: Any, x: Any) -> Dims:
    """A leaf of `dynamic` for one argument."""
    if spec is None or spec is False or not isinstance(x, (torch.Tensor, ShapeDtype)):
        return {}
    rank = len(x.shape)
    if spec is True:
        return dict.fromkeys(range(rank), False)
    if isinstance(spec, dict):
        hints = {dim % rank: _compat.dim_hint(h) for dim, h in spec.items()}
        return {dim: HINTS[h] for dim, h in hints.items() if h in HINTS}
    return {dim % rank: False for dim in _given(spec)}
