"""The line where a module stores an attribute, for errors."""

from __future__ import annotations

import ast
import inspect
import textwrap

import torch


def stored_at(module: torch.nn.Module, path: str) -> str | None:
    """The first line outside of constructors where the class of a submodule stores an attribute
    of this path. None where its source does not tell.
    """
    owner, _, name = path.rpartition(".")
    try:
        kind = type(module.get_submodule(owner))
        lines, first = inspect.getsourcelines(kind)
        file = inspect.getsourcefile(kind)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (AttributeError, OSError, TypeError, SyntaxError):
        return None
    lines_of_stores = [
        node.lineno
        for method in ast.walk(tree)
        if isinstance(method, ast.FunctionDef) and method.name != "__init__"
        for node in ast.walk(method)
        if _stores(node, name)
    ]
    return f"{file}:{first + min(lines_of_stores) - 1}" if lines_of_stores else None


def _stores(node: ast.AST, name: str) -> bool:
    """Whether a node is an attribute of this name that is stored."""
    is_stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    return is_stored and node.attr == name
