"""The origin of an op as text: the module path and the user's source line."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypedDict


class Origin(TypedDict):
    """Where an op comes from: `file:line` of the user's code, and the path of the submodule that
    calls it, such as layers.0.up. Each may be unknown.
    """

    source: str | None
    module: str | None


RANGE = "shardfn: "  # how the names of ranges of a profile begin
WAIT_RANGE = f"{RANGE}wait for "
NOWHERE: Origin = {"source": None, "module": None}


def located(source: str | None, module: str | None, *, full: bool = False) -> str:
    """Format the line of an op, and the path of the module that called it if there is one.

    Args:
        source: `file:line`, or None.
        module: the path of the submodule, or None.
        full: whether the file keeps its folder beside a module, as in errors.

    Example:
        >>> located("a/model.py:41", "layers.0.up"), located("a/model.py:41", None)
        ('layers.0.up (model.py:41)', 'a/model.py:41')
    """
    if not module or not source:
        return module or source or ""
    return f"{module} ({source if full else os.path.basename(source)})"


def located_in_program(source: str | None, module: str | None) -> str:
    """Format the line and the module of an op as programs print them: the file without its folder.

    Args:
        source: `file:line`, or None.
        module: the path of the submodule, or None.

    Example:
        >>> located_in_program("a/model.py:41", None)
        'model.py:41'
    """
    return located(source and os.path.basename(source), module)


def joined_paths(paths: Iterable[str]) -> str:
    """Write the paths of equal modules as one, with the range of numbers that differ.

    Args:
        paths: which differ only in numbers.

    Example:
        >>> joined_paths(["layers.0.up", "layers.1.up"]), joined_paths(["up"])
        ('layers.0-1.up', 'up')
        >>> joined_paths(["layers.0.up", "layers.7.up"])
        'layers.*.up'
    """
    columns = zip(*(path.split(".") for path in dict.fromkeys(paths)), strict=True)
    return ".".join(map(_joined_names, columns))


def _joined_names(names: tuple[str, ...]) -> str:
    """Write the names of one level of some paths as one."""
    different = set(names)
    if len(different) == 1:
        return names[0]
    numbers = sorted(map(int, different))
    first, last = numbers[0], numbers[-1]
    return f"{first}-{last}" if len(numbers) == last - first + 1 else "*"


def shape_of_path(path: str | None) -> tuple[str, ...] | None:
    """Return the names of a module path with `*` for its numbers: equal for the same module of
    different layers.

    Args:
        path: such as `layers.0.up`.

    Example:
        >>> shape_of_path("layers.0.up")
        ('layers', '*', 'up')
    """
    if path is None:
        return None
    return tuple("*" if name.isdigit() else name for name in path.split("."))


def call_range(name: str) -> str:
    """Name the range of a profile around a call of a function.

    Args:
        name: of the function.

    Example:
        >>> call_range("shard(step)")
        'shardfn: call of shard(step)'
    """
    return f"{RANGE}call of {name}"


def line_range(source: str | None, module: str | None) -> str:
    """Name the range of a profile around the ops of a line.

    Args:
        source: `file:line`, or None.
        module: the path of the submodule, or None.

    Example:
        >>> line_range("a/model.py:41", "layers.0.up"), line_range(None, None)
        ('shardfn: layers.0.up (model.py:41)', 'shardfn: no line')
    """
    return f"{RANGE}{located_in_program(source, module) or 'no line'}"


def collective_range(kind: str, axis: str, source: str | None, module: str | None) -> str:
    """Name the range of a profile around the start of a collective.

    Args:
        kind: of the collective.
        axis: of the mesh.
        source: `file:line`, or None.
        module: the path of the submodule, or None.

    Example:
        >>> collective_range("all_reduce", "dp", "a/model.py:41", None)
        'shardfn: all_reduce over dp, model.py:41'
    """
    where = located_in_program(source, module)
    return f"{RANGE}{kind} over {axis}" + (f", {where}" if where else "")
