"""Where the code of a module runs: its line, and the path of the submodule, such as
`model.layers.17.self_attn.q_proj`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Any

import torch

from ...errors import is_ours

MODULE = " of module "  # stands before the path in a stack trace
_MODULE = re.compile(rf"{MODULE}(\S+)$", re.MULTILINE)
# Dynamo's expressions for a part of a module or of a list
_GETATTR = re.compile(r"getattr\((.*), '(\w+)'\)")
_INDEX = re.compile(r"(?:\._modules)?\['?(\w+)'?\]")
# a list of modules at the end of an expression, with the numbers: layers.0
_LISTED = re.compile(r"([A-Za-z_]\w*)((?:\.\d+)+)$")
# a method of the module that has the parts
_METHOD = re.compile(r"^(?:.*\.__self__|L\.self)\.")


class Paths:
    """The paths of the submodules of the modules that run in a capture, each listed once."""

    def __init__(self) -> None:
        # for each module, by id: the module, and the paths of its parts by their ids
        self.known: dict[int, tuple[torch.nn.Module, dict[int, str]]] = {}

    def running_line(self, frame: FrameType | None, until: CodeType) -> str | None:
        """The innermost frame of user code inside a module, formatted as in a stack trace, with
        the path of the innermost submodule.

        Args:
            frame: the innermost frame.
            until: the code that calls the module, which is its local `module`.
        """
        line = None
        inner = None
        while frame is not None and frame.f_code is not until:
            code = frame.f_code
            if line is None and not is_ours(code.co_filename):
                line = f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}'
            if inner is None and code.co_varnames[:1] == ("self",):
                owner = frame.f_locals.get("self")
                inner = owner if isinstance(owner, torch.nn.Module) else None
            frame = frame.f_back
        if line is None:
            return None
        if frame is None:  # code of an optimizer, which no module runs
            return f"{line}\n"
        path = self.path_in(frame.f_locals["module"], inner)
        return f"{line}{MODULE}{path}\n" if path else f"{line}\n"

    def path_in(self, root: torch.nn.Module, inner: torch.nn.Module | None) -> str:
        """The path of a submodule, empty for the module itself and for others."""
        if id(root) not in self.known:
            paths = {id(part): name for name, part in root.named_modules()}
            self.known[id(root)] = root, paths
        _, paths = self.known[id(root)]
        return paths.get(id(inner), "")


def module_of(stack: str | None) -> str | None:
    """The path of the submodule in a stack trace of code that a module ran."""
    paths = _MODULE.findall(stack or "")
    return paths[-1] if paths else None


def path_of_stack(stack: Mapping[str, tuple[str, Any]] | None) -> str | None:
    """The path of the innermost submodule in the outermost module that Dynamo read, or None for
    the outermost module itself.

    Args:
        stack: `nn_module_stack` of a node: expressions and types of the modules, the outermost
            first.
    """
    if not stack:
        return None
    expressions = [expression for expression, _ in stack.values()]
    return _relative_path(expressions[0], expressions[-1]) or None


@functools.lru_cache(maxsize=4096)
def _relative_path(outer: str, inner: str) -> str:
    """The path from one expression of Dynamo's to another. An outermost module that is an element
    of a list is called by the name of the list: layers.0.
    """
    root, path = _dotted(outer), _dotted(inner)
    if method := _METHOD.match(root):
        return path[method.end() :]
    listed = _LISTED.search(root)
    first = listed[0].removeprefix("cell_contents.") if listed else ""
    rest = path.removeprefix(root) if path.startswith(root) else ""
    return (first + rest).strip(".")


def _dotted(expression: str) -> str:
    """An expression of Dynamo's, with attributes and indices as a path."""
    while (shorter := _GETATTR.sub(r"\1.\2", expression)) != expression:
        expression = shorter
    return _INDEX.sub(r".\1", expression)
