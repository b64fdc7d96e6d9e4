"""Warnings about constants that cause a retrace at each call."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

from ..capture import name_of
from ..errors import call_site, problem, warn
from .arguments import Placed
from .options import Request

# A constant of one of these types that has changed this often is assumed to change at each call.
OFTEN = {float: 1, complex: 1, int: 2, types.FunctionType: 2}


def note_changes(request: Request, entries: Sequence[Any], key: list[Any], placed: Placed) -> None:
    """Warn, once for each argument and closed-over value, of a constant that keeps changing.

    Args:
        request: of the function.
        entries: the cached entries, the last used first.
        key: of this call.
        placed: its arguments.
    """
    last = entries[0]
    if last.treedef != placed.treedef:
        return
    if key != last.key:
        _note_arguments(request, entries, key, placed)
    elif last.state == placed.state and last.reads is not None:
        changed = [] if last.reads.same() else last.reads.changed()
        for path, old, new in changed:
            name = name_of(path)
            _note(request, f"closed-over {name}", name, old, new)


def _note_arguments(
    request: Request, entries: Sequence[Any], key: list[Any], placed: Placed
) -> None:
    """Find a cached entry that differs from a call only in numbers and functions."""
    given = {i: x for i, _, x in placed.constants}
    for entry in entries:
        if entry.treedef != placed.treedef or entry.state != placed.state:
            continue
        changed = [i for i, (a, b) in enumerate(zip(key, entry.key, strict=True)) if a != b]
        if all(i in given and _kind(given[i]) and key[i][0] == entry.key[i][0] for i in changed):
            for i in changed:
                if i not in placed.static:
                    path = placed.paths[i]
                    _note(request, f"argument {path}", path, _before(entry.key[i]), given[i])
            return


def _kind(x: Any) -> type | None:
    return type(x) if type(x) in OFTEN else None


def _before(key: Any) -> Any:
    """Return the constant inside a key."""
    kind, value = key
    if kind is float:
        return float.fromhex(value)
    if kind is complex:
        return complex(*map(float.fromhex, value))
    return getattr(value, "held", value)


def _note(request: Request, where: str, path: str, old: Any, new: Any) -> None:
    kind = _kind(new)
    if kind is None or type(old) is not kind:
        return
    if kind is types.FunctionType and old.__code__ is not new.__code__:
        return
    changes = request.store.changes
    count = changes[where] = changes.get(where, 0) + 1
    if count == OFTEN[kind]:
        warn(_text(request, where, path, old, new))


def _text(request: Request, where: str, path: str, old: Any, new: Any) -> str:
    if isinstance(new, types.FunctionType):
        got = (
            "the function is created anew for each call, so shardfn captures and compiles it each "
            "time"
        )
        fix = "define the function once, outside of the loop"
    else:
        numbers = f"a Python number that changes: {old!r}, then {new!r}"
        got = (
            f"{numbers}; shardfn captures and compiles a program for each value, which is a "
            "constant"
        )
        if where.startswith("argument"):
            fix = (
                f"torch.tensor({path}), so that the value is an input and one program takes any "
                "value; or static_argnums of jit or shard, if there are only a few values"
            )
        else:
            fix = (
                f"pass torch.tensor({path}) as an argument, so that the value is an input and one "
                "program takes any value"
            )
    return problem(f"{request.name}, {where}", got, fix=fix, source=call_site())
