"""The step that a command line names: `module:function`, with shapes of its arguments."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import attrs

from ..capture.printing import DTYPES
from ..errors import ShardError
from ..placement import P, names_of
from ..transforms._transformed import Bound, Transformed
from ..types import ShapeDtype

SHAPE = re.compile(r"\s*(\w+)\s*\[([^\]]*)\]\s*")  # f32[8@dp, 16]
DIM = re.compile(r"\s*(\d+)\s*((?:@\s*\w+\s*)*)")
NAMES = {name: dtype for dtype, name in DTYPES.items()}
HOW = (
    'give --arg "f32[8, 16]" for each argument (f32[8@dp, 16] shards dim 0 over dp), or name '
    "a function without arguments that returns (step, arguments)"
)


@attrs.frozen(eq=False)
class Target:
    """A step and its arguments.

    Args:
        fn: the step.
        args: its arguments.
        in_placements: of a step that is not transformed; None: as the arguments are.
    """

    fn: Any
    args: tuple[Any, ...]
    in_placements: Any = None


def function_of(name: str) -> Any:
    """Import a function.

    Args:
        name: "module:function"; the function may be an attribute of one, as "train:Model.step".

    Raises:
        ShardError: the module does not import, or has no such function.
    """
    where = "python -m shardfn report"
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        fix = "python -m shardfn report train:step"
        raise ShardError.of(where, f"the target is {name!r}", needed="module:function", fix=fix)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything
        got = f"{module_name} does not import: {type(error).__name__}: {error}"
        fix = f"run python -c 'import {module_name}' in the folder of the module"
        raise ShardError.of(where, got, fix=fix) from error
    for part in path.split("."):
        if not hasattr(found, part):
            public = [x for x, value in vars(found).items() if callable(value) and x[0] != "_"]
            got = f"{module_name} has no {path}"
            raise ShardError.of(where, got, needed=f"one of {', '.join(public)}", fix=HOW)
        found = getattr(found, part)
    if not callable(found):
        got = f"{name} is a {type(found).__name__}, and not a function"
        raise ShardError.of(where, got, needed="a function", fix="python -m shardfn report m:step")
    return found


def target_of(name: str, shapes: Sequence[str]) -> Target:
    """Return the step that a name stands for, and its arguments. A function without arguments is
    called for them.

    Args:
        name: "module:function".
        shapes: of the arguments, as "f32[8@dp, 16]".

    Raises:
        ShardError: it does not import, arguments are missing, or a shape is none.
    """
    fn = function_of(name)
    if shapes:
        pairs = [shape_of(text) for text in shapes]
        args, specs = (tuple(column) for column in zip(*pairs, strict=True))
        is_placed = any(map(names_of, specs)) or not isinstance(fn, (Transformed, Bound))
        return Target(fn, args, specs if is_placed else None)
    missing = _required(fn)
    if missing:
        got = f"{name} takes {', '.join(missing)}, but no shapes are given"
        raise ShardError.of("python -m shardfn report", got, fix=HOW)
    made = fn()
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]):
        got = f"{name}() returns {type(made).__name__}"
        needed = "a pair (step, arguments): a function, and a tuple of tensors or sf.ShapeDtypes"
        raise ShardError.of("python -m shardfn report", got, needed=needed, fix=HOW)
    step, args = made
    return Target(step, args if isinstance(args, tuple) else (args,))


def _required(fn: Any) -> list[str]:
    """Return the names of the arguments that a function needs; of a transformed one those of the
    function inside, which is never called.
    """
    if isinstance(fn, (Transformed, Bound)):
        inner = fn.func if isinstance(fn, Bound) else fn
        return _names(inner.fn) or ["no arguments"]
    return _names(fn)


def _names(fn: Any) -> list[str]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except ValueError:  # of a builtin
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [x.name for x in parameters if x.default is x.empty and x.kind not in kinds]


def shape_of(text: str) -> tuple[ShapeDtype, P]:
    """Read a shape, as printed programs write it, with its placement.

    Args:
        text: such as "f32[8@dp, 16]".

    Raises:
        ShardError: it is none.

    Example:
        >>> shape_of("bf16[8@dp@tp, 16]")
        (ShapeDtype(shape=(8, 16), dtype=torch.bfloat16), P(('dp', 'tp'), None))
    """
    found = SHAPE.fullmatch(text)
    dims = [DIM.fullmatch(x) for x in found[2].split(",")] if found and found[2].strip() else []
    sizes = [x for x in dims if x is not None]
    if found is None or found[1] not in NAMES or len(sizes) != len(dims):
        raise ShardError.of(
            "python -m shardfn report, --arg",
            f"{text!r} is not a shape",
            needed=f"a dtype ({', '.join(NAMES)}) and sizes, with the axes that shard them",
            fix='--arg "f32[8@dp, 16]"',
        )
    axes = [tuple(part.strip() for part in x[2].split("@") if part.strip()) for x in sizes]
    parts = [names[0] if len(names) == 1 else names or None for names in axes]
    return ShapeDtype(tuple(int(x[1]) for x in sizes), NAMES[found[1]]), P(*parts)
