"""Checks of the options that name arguments by position: argnums, nondiff_argnums, batch_argnums,
static_argnums, donate_argnums.

Dynamo calls `check_argnums` and `positions` without tracing them, so that their errors reach the
user unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from . import _compat
from .errors import TreeError, call_site
from .tree_pairs import Parameters

Argnums = int | tuple[int, ...]


@_compat.read_by_dynamo
def is_number(x: Any) -> bool:
    """Whether x is an int and not a bool."""
    return isinstance(x, int) and not isinstance(x, bool)


@_compat.constant_in_graph
def check_argnums(where: str, option: str, argnums: Any) -> tuple[int, ...]:
    """The positions that an option names, unchanged: an int, or a tuple or list of ints.

    Raises:
        TreeError: something else, or one position twice.
    """
    numbers = tuple(argnums) if isinstance(argnums, (tuple, list)) else (argnums,)
    if not all(is_number(n) for n in numbers):
        fix = f"{option}=0, or {option}=(0, 1)"
        raise TreeError.of(
            f"{where}, {option}",
            f"{option} is {argnums!r}",
            needed="an int or a tuple of ints",
            fix=fix,
        )
    if len(set(numbers)) < len(numbers):
        raise _twice(where, option, argnums)
    return numbers


@_compat.constant_in_graph
def positions(where: str, option: str, argnums: Any, count: int) -> tuple[int, ...]:
    """The arguments that an option names, given the number of arguments. Negative positions
    count from the end.

    Raises:
        TreeError: a position that is not an int, is out of range, or is named twice.
    """
    numbers = check_argnums(where, option, argnums)
    if any(not -count <= n < count for n in numbers):
        fix = f"positions from {-count} to {count - 1}" if count else "arguments passed by position"
        got = f"{option} is {argnums!r}, but the call has {count} positional arguments"
        raise TreeError.of(f"{where}, {option}", got, fix=fix)
    counted = tuple(n + count if n < 0 else n for n in numbers)
    if len(set(counted)) < len(counted):
        raise _twice(where, option, argnums)
    return counted


def _twice(where: str, option: str, argnums: Any) -> TreeError:
    fix = "each argument once"
    got = f"{option} is {argnums!r}, which contains an argument twice"
    return TreeError.of(f"{where}, {option}", got, fix=fix)


def signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a function, or None for a builtin without one."""
    is_module = isinstance(fn, torch.nn.Module) and type(fn).__call__ is torch.nn.Module.__call__
    try:
        return inspect.signature(fn.forward if is_module else fn)
    except (TypeError, ValueError):
        return None


def parameters(signature: inspect.Signature | None) -> list[str] | None:
    """The names of positional parameters, or None if there may be any number of them."""
    if signature is None:
        return None
    every = signature.parameters.values()
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in every):
        return None
    return [p.name for p in every if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def all_parameters(signature: inspect.Signature | None) -> Parameters:
    """The names of the parameters of a function, which a builtin without a signature does not
    tell.
    """
    if signature is None:
        return (), "args", (), "kwargs"
    names: dict[Any, list[str]] = {kind: [] for kind in inspect._ParameterKind}
    for p in signature.parameters.values():
        names[p.kind].append(p.name)
    before, either, starred, by_keyword, double_starred = names.values()
    return (*before, *either), "".join(starred), tuple(by_keyword), "".join(double_starred)


def of_signature(
    where: str, fn: Callable[..., Any], static: Any, donated: Any
) -> dict[str, tuple[int, ...]]:
    """`static_argnums` and `donate_argnums` as tuples, checked against the function's signature.

    Raises:
        TreeError: positions that the function does not have, or one that is both.
    """
    names = parameters(signature_of(fn))
    numbers = {"static_argnums": check_argnums(where, "static_argnums", static)}
    numbers["donate_argnums"] = check_argnums(where, "donate_argnums", donated)
    for option, written in numbers.items():
        if names is not None and any(not -len(names) <= n < len(names) for n in written):
            fix = (
                f"positions from {-len(names)} to {len(names) - 1}"
                if names
                else "a function with arguments"
            )
            got = (
                f"{option} is {written!r}, but the function takes {len(names)} positional arguments"
            )
            raise TreeError.of(f"{where}, {option}", got, fix=fix)
    _refuse_both(where, set(numbers["static_argnums"]) & set(numbers["donate_argnums"]))
    return numbers


def of_call(
    where: str,
    option: str,
    written: Sequence[int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    signature: inspect.Signature | None,
) -> list[int]:
    """The positional arguments of a call that `static_argnums` or `donate_argnums` name;
    negative ones count from the end.

    A parameter that keeps its default is left out.

    Raises:
        TreeError: a position that the call does not have, or a parameter that is passed by keyword.
    """
    if not written:
        return []
    names = parameters(signature)
    left = [n for n in written if names is not None and len(args) <= n < len(names)]
    by_keyword = next((names[n] for n in left if names is not None and names[n] in kwargs), None)
    if by_keyword is not None:
        source = call_site()
        fix = f"{by_keyword} by position"
        got = f"{option} is {tuple(written)!r}, but {by_keyword} is passed by keyword"
        raise TreeError.of(f"{where}, {option}", got, fix=fix, source=source)
    return list(positions(where, option, tuple(n for n in written if n not in left), len(args)))


def refuse_static(
    where: str,
    static: Sequence[int],
    donated: Sequence[int],
    args: tuple[Any, ...],
    holding: Collection[int],
) -> None:
    """Refuse static arguments that are donated, hold tensors, or cannot be told apart by their
    hash.

    Args:
        where: the function.
        static: the positions of static arguments.
        donated: those of donated ones.
        args: the positional arguments.
        holding: which static arguments hold tensors.

    Raises:
        TreeError: naming the argument.
    """
    _refuse_both(where, set(static) & set(donated))
    for n in static:
        if n in holding:
            got = f"static argument {n} holds a tensor"
            needed = "constants"
            fix = "leave this argument out of static_argnums, since tensors are never constants"
        elif not _is_hashable(args[n]):
            got = f"static argument {n} is a {type(args[n]).__name__}, which has no hash"
            needed = "a hashable constant"
            fix = (
                "pass a tuple in place of a list, or a frozen dataclass in place of an "
                "object; or leave the argument out of static_argnums"
            )
        else:
            continue
        source = call_site()
        raise TreeError.of(where, got, needed=needed, fix=fix, source=source)


def _is_hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


def _refuse_both(where: str, both: set[int]) -> None:
    if both:
        fix = (
            "put only tensor arguments in donate_argnums: a static argument is a constant without "
            "memory"
        )
        got = f"argument {min(both)} is static and donated"
        raise TreeError.of(f"{where}, donate_argnums", got, fix=fix)
