"""The list of ops that a graph in a file may call. They compute tensors from tensors and do
nothing else: none reads a file, runs Python, or writes to memory of others.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable
from typing import Any

import torch

from ... import _compat

SPACES = ("aten", "prims", "_c10d_functional", "shardfn")
NAME = re.compile(r"(\w+)\.(\w+)\.(\w+)")
TENSORS = frozenset({"Tensor", "List[Tensor]", "Optional[Tensor]"})
CHECKS = frozenset({"aten._assert_async.default", "aten._assert_async.msg"})
WRITES = frozenset({"aten.copy_.default"})  # into donated inputs
REFUSED = frozenset(
    {"shardfn.run_loop.default", "shardfn.run_showing_loop.default", "aten.from_file.default"}
)
CHECKED = {  # the op that checks its indices, in the place of one that does not
    "aten._unsafe_index.Tensor": "aten.index.Tensor",
    "aten._unsafe_index_put.default": "aten.index_put.default",
}
GETITEM = "getitem"


def name_of(target: Any) -> str | None:
    """Return the name under which a file calls an op; None if a file may not call it."""
    if target is operator.getitem:
        return GETITEM
    return _name_of_op(target) if isinstance(target, _compat.OpOverload) else None


@functools.cache
def _name_of_op(op: Any) -> str | None:
    """Return the name under which a file calls an op of torch; None if a file may not call it."""
    is_loop = op is torch.ops.shardfn.run_loop.default  # of a compiled program, not of a file
    return str(op) if is_loop or is_allowed(op) else None


def op_of(name: Any) -> Callable[..., Any] | None:
    """Return the op of a name; None if there is none that a file may call."""
    if name == GETITEM:
        return operator.getitem
    name = CHECKED.get(name, name) if isinstance(name, str) else None
    match = NAME.fullmatch(name) if name is not None else None
    if match is None or match[1] not in SPACES:
        return None
    op: Any = torch.ops
    for part in match.groups():
        op = getattr(op, part, None)
    is_op = isinstance(op, _compat.OpOverload) and str(op) == name
    return op if is_op and is_allowed(op) else None


def is_allowed(op: Any) -> bool:
    """Return whether a file may call an op."""
    name, schema = str(op), op._schema
    if name in CHECKS or name in WRITES:
        return True
    if name in REFUSED or op.namespace not in SPACES or schema.is_mutable:
        return False
    if any("file" in argument.name for argument in schema.arguments):
        return False
    kinds = {str(value.type) for value in schema.returns}
    return bool(kinds) and kinds <= TENSORS
