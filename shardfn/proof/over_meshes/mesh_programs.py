"""The program that runs a test on one mesh, with the arguments of one example: a few lines that can
be pasted into a file.
"""

from __future__ import annotations

import ast
import inspect
import math
import os
import re
import site
import sys
import sysconfig
import textwrap
import types
import unittest
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...placement import P, is_spec
from .mesh_spaces import Argument, Example

LINES = 10  # of a program
NAMES = re.compile(r"\b(P|Shard|Replicate|Partial|Stage|Zigzag|zigzag)\(")
PARTIAL = re.compile(r"Partial\((\w+)\)")
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)


def value_text(argument: Argument, example: Example) -> str:
    """Python that makes the global value of an argument."""
    shape, dtype = example.shape(argument), argument.dtype
    if dtype == torch.bool:
        return f"torch.randint(0, 2, {shape}).bool()"
    if not (dtype.is_floating_point or dtype.is_complex):
        below = max(argument.below.size(dict(example.sizes)), 1)
        return f"torch.randint(0, {below}, {shape}, dtype={dtype})"
    if dtype.itemsize == 1:
        return f"torch.randn({shape}).to({dtype})"
    return f"torch.randn({shape}, dtype={dtype})"


def argument_text(argument: Argument, example: Example, spec: Any) -> str:
    """Python that makes the DTensor of an argument on `mesh`."""
    value, placed = value_text(argument, example), spec_text(spec)
    if not isinstance(spec, list) or not any(p.is_partial() for p in spec):
        return f"sf.distribute({value}, mesh, {placed})"
    summed = [k for k, p in enumerate(spec) if p.is_partial()]
    n = math.prod(example.axes.sizes[k] for k in summed)
    terms = spec_text(spec, partial="Replicate()")
    term = f"{value} / {n}" if n > 1 else value
    local = f"sf.distribute({term}, mesh, {terms}).to_local()"
    return f"sf.from_local({local}, mesh, {placed}, shape={example.shape(argument)})"


def spec_text(spec: Any, *, partial: str = "") -> str:
    """A placement as Python, with `sf.` before its names."""
    text = PARTIAL.sub(partial or r'Partial("\1")', repr(spec))
    return NAMES.sub(r"sf.\1(", text)


def tree_texts(shapes: Mapping[str, Any], texts: Mapping[str, str]) -> dict[str, str]:
    """Python that makes each argument, given that of its leaves by their paths."""
    return {name: _tree_text(tree, name, texts) for name, tree in shapes.items()}


def _tree_text(tree: Any, path: str, texts: Mapping[str, str]) -> str:
    if isinstance(tree, Mapping):
        rows = [f"{key!r}: {_tree_text(x, f'{path}[{key!r}]', texts)}" for key, x in tree.items()]
        return "{" + ", ".join(rows) + "}"
    if isinstance(tree, list):
        rows = [_tree_text(x, f"{path}[{i}]", texts) for i, x in enumerate(tree)]
        return "[" + ", ".join(rows) + "]"
    return texts[path]


def drawn_texts(example: Example, shapes: Mapping[str, Any]) -> dict[str, str]:
    """Python that makes each argument of an example."""
    texts = {a.path: argument_text(a, example, spec) for a, _, spec in example.placed()}
    return tree_texts(shapes, texts)


def program(
    test: Callable[..., Any],
    example: Example,
    shapes: Mapping[str, Any],
    *,
    mesh_name: str | None,
    seed: int,
    given: Mapping[str, Any],
    is_real: bool,
) -> str:
    """A program of at most ten lines that runs a test with an example.

    Args:
        test: as it was before it was decorated.
        example: its mesh and its arguments.
        shapes: of the arguments that are drawn, by their names.
        mesh_name: the parameter that takes the mesh; None if there is none.
        seed: of torch's random numbers.
        given: the other arguments by name: fixtures and parameters.
        is_real: whether the ranks are processes of a job.
    """
    texts = drawn_texts(example, shapes)
    axes = example.axes
    names = ", ".join(map(repr, axes.names)) + "," * (len(axes.names) == 1)
    ranks = math.prod(axes.sizes)
    rest, missing = _given_texts(given)
    passed = [*([mesh_name] if mesh_name else []), *texts]
    arguments = ", ".join([*(f"{n}={n}" for n in passed), *(f"{n}={x}" for n, x in rest.items())])
    mesh = f"{mesh_name or 'mesh'} = sf.make_mesh({axes.sizes}, ({names}))"
    # the texts of arguments say mesh
    mesh = mesh if mesh_name in (None, "mesh") else f"mesh = {mesh}"
    lines = [mesh, *(f"{name} = {text}" for name, text in texts.items())]
    for limit in (3, 0):  # lines of the test's own body that there is room for, or an import of it
        head, call = _defined(test, limit)
        calls = f"{call}({arguments}){missing}"
        top = [*head, f"torch.manual_seed({seed})"]
        top += [] if is_real else [f"with sf.fake_world({ranks}):"]
        room = LINES - len(top) - 1
        if room >= 2 or limit == 0:
            break
    body = [*_packed(lines, max(room, 1)), calls]
    indent = "" if is_real else "    "
    return "\n".join([*top, *(f"{indent}{line}" for line in body)])


def _packed(lines: Sequence[str], room: int) -> list[str]:
    """Statements on at most so many lines: the first ones alone, the others together."""
    if len(lines) <= room:
        return [*lines]
    return [*lines[: room - 1], "; ".join(lines[room - 1 :])]


def _given_texts(given: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """Python for the arguments that are not drawn, and a comment on those that have none."""
    texts = {name: literal(x) for name, x in given.items()}
    lost = [f"{name}, a {type(given[name]).__name__}" for name, x in texts.items() if x is None]
    comment = f"  # make here: {'; '.join(lost)}" if lost else ""
    return {name: "..." if x is None else x for name, x in texts.items()}, comment


def literal(x: Any) -> str | None:
    """A value as Python. None if it has no short text."""
    if isinstance(x, float) and not math.isfinite(x):
        return f'float("{x}")'
    if type(x) in PLAIN or isinstance(x, torch.dtype):
        return repr(x)
    if isinstance(x, P) or (x is not None and is_spec(x)):
        return spec_text(x)
    if type(x) is tuple or type(x) is list:
        rows = [literal(each) for each in x]
        text = ", ".join(map(str, rows)) + "," * (type(x) is tuple and len(rows) == 1)
        if None in rows:
            return None
        return f"[{text}]" if type(x) is list else f"({text})"
    if type(x) is dict:
        items = [(literal(key), literal(value)) for key, value in x.items()]
        is_plain = all(None not in pair for pair in items)
        return "{" + ", ".join(f"{k}: {v}" for k, v in items) + "}" if is_plain else None
    return None


def _defined(test: Callable[..., Any], room: int) -> tuple[list[str], str]:
    """Lines that define or import a test, and what to call then."""
    function = inspect.unwrap(test)
    written = _written(function, room) if test is function and room else None
    if written is not None:
        return written, function.__name__
    return _imported(function)


def _written(function: types.FunctionType, room: int) -> list[str] | None:
    """The source of a function with the imports that it needs, if its body has room on a few
    lines and names nothing else.
    """
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if not isinstance(node, ast.FunctionDef) or node.name != function.__name__:
        return None  # a lambda, or a file that is another one now
    if "self" in inspect.signature(function).parameters:
        return None
    node.decorator_list, node.returns = [], None
    for each in ast.walk(node.args):
        if isinstance(each, ast.arg):
            each.annotation = None
    if ast.get_docstring(node):
        node.body = node.body[1:] or [ast.Pass()]
    lines = ast.unparse(node).splitlines()
    needed = _needed(function, node)
    if needed is None or len(lines) > room + 1:
        return None
    return [f"import {', '.join(['torch', 'shardfn as sf', *needed[0]])}", *needed[1], *lines]


def _needed(
    function: types.FunctionType, node: ast.FunctionDef
) -> tuple[list[str], list[str]] | None:
    """The modules that a function names, as `import` has them, and a line that binds the other
    names. None if one of them cannot be bound so.
    """
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    try:
        names = {**function.__globals__, **{name: cell.cell_contents for name, cell in cells}}
    except ValueError:  # a cell that is still empty
        return None
    own = set(function.__code__.co_varnames)
    used = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)} - own
    modules: list[str] = []
    others: list[str] = []
    for name in sorted(used & names.keys()):
        value = names[name]
        if isinstance(value, types.ModuleType):
            full = value.__name__
            same = (name, full) in {("torch", "torch"), ("sf", "shardfn")}
            modules += [] if same else [f"{full} as {name}" if name != full else full]
        elif (place := _place(value, name)) is not None:
            others.append(f"from {place} import {name}")
        elif (text := literal(value)) is not None:
            others.append(f"{name} = {text}")
        else:
            return None
    return modules, ["; ".join(others)] if others else []


def _place(value: Any, name: str) -> str | None:
    """A module of a library from which a name can be imported."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    root = (module.__name__ if module else "").partition(".")[0]
    public = sys.modules.get(root)
    for place in (public, module):
        file = getattr(place, "__file__", None) or ""
        if place is not None and getattr(place, name, None) is value and _is_library(file, root):
            return place.__name__
    return None


def _is_library(file: str, root: str) -> bool:
    return root == __name__.partition(".")[0] or _is_installed(file)


def _is_installed(path: str) -> bool:
    """Whether a path belongs to Python or to a package that is installed."""
    places = [*sysconfig.get_paths().values(), *site.getsitepackages(), sys.base_prefix]
    return not path or any(path.startswith(place) for place in places)


def _imported(function: types.FunctionType) -> tuple[list[str], str]:
    """Lines that import a function from its file, and what to call then."""
    file = os.path.abspath(function.__code__.co_filename)
    owner, _, name = function.__qualname__.rpartition(".")
    first = owner.partition(".")[0] or name
    stem = os.path.splitext(os.path.basename(file))[0]
    head = ["import sys, torch, shardfn as sf"]
    is_module = file.endswith(".py") and os.path.exists(file) and stem.isidentifier()
    if "<locals>" in function.__qualname__ or not is_module:
        written = _written(function, sys.maxsize - 1)
        if written is not None:
            return written, name
        place = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
        return [*head, f"{name} = ...  # the function at {place}"], name
    folder, module = _root(os.path.dirname(file), stem)
    rest = [path for path in map(os.path.abspath, sys.path) if not _is_installed(path)]
    paths = list(dict.fromkeys([folder, *rest]))
    lines = [*head, f"sys.path[:0] = {paths}", f"from {module} import {first}"]
    return lines, _called(function, owner, name)


def _root(folder: str, module: str) -> tuple[str, str]:
    """The folder from which a module is imported, and its full name: above its packages."""
    while os.path.exists(os.path.join(folder, "__init__.py")):
        folder, part = os.path.split(folder)
        module = f"{part}.{module}"
    return folder, module


def _called(function: types.FunctionType, owner: str, name: str) -> str:
    if not owner:
        return name
    home = sys.modules.get(function.__module__)
    cls: Any = home
    for part in owner.split("."):
        cls = getattr(cls, part, None)
    is_case = isinstance(cls, type) and issubclass(cls, unittest.TestCase)
    return f"{owner}({name!r}).{name}" if is_case else f"{owner}().{name}"
