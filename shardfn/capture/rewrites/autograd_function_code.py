"""The calls in the code of an autograd.Function, as far as its names lead.

Under a derivative a Function is one call, whose Python runs as it is. One that communicates, or
asks for the number of its rank, is read instead: ranks share one program.
"""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ...errors import is_inside
from ..dtensors import replaced_calls

OWN_METHODS = ("forward", "backward", "setup_context", "jvp", "vmap")
ROOTS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")
ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
COMMUNICATING = ("torch.distributed", "torch._C._distributed")
# of a mesh or a group, which only a run of the code may show
OF_RANKS = {"get_rank", "get_local_rank", "get_coordinate"}
# names of collectives that are not those of a tensor's methods
OF_TENSORS = {*dir(torch.Tensor), *dir(torch)}
COLLECTIVES = {name for name in dir(dist) if name.startswith(("all_", "reduce_"))}
BY_NAME = OF_RANKS | (COLLECTIVES - OF_TENSORS)


def function_to_read(function: Any) -> Callable[..., Any] | None:
    """shardfn's function that Dynamo reads in place of a call of an autograd.Function. None for one
    that is one op.
    """
    ours = replaced_calls.FUNCTIONS[torch.autograd.Function]
    return ours if is_of_ranks(function) else None


def is_of_ranks(function: Any) -> bool:
    """Whether a Function communicates, or asks for the number of its rank.

    Args:
        function: a subclass of torch.autograd.Function.
    """
    return calls_ranks([*_methods(function)])


def calls_ranks(functions: Iterable[Any]) -> bool:
    """Whether the code of a function leads to a collective, or to the number of a rank."""
    queue = [fn for x in functions for fn in _user_functions(x)]
    seen: set[Any] = set()
    while queue:
        fn = queue.pop()
        code = fn.__code__
        if code in seen:
            continue
        seen.add(code)
        for x in _values_called(fn, code):
            if x is True:
                return True
            queue += _user_functions(x)
    return False


def _methods(function: Any) -> Iterator[types.FunctionType]:
    """The Python functions of a class that differ from those of torch's own base."""
    for name in OWN_METHODS:
        fn = inspect.unwrap(getattr(function, name))
        is_own = fn is not getattr(torch.autograd.Function, name)
        if is_own and isinstance(fn, types.FunctionType):
            yield fn


def _user_functions(x: Any) -> list[types.FunctionType]:
    """The user's functions whose code runs when an object is called."""
    if isinstance(x, type) and issubclass(x, torch.autograd.Function):
        return [*_methods(x)]
    if not callable(x):
        return []
    fn = inspect.unwrap(getattr(x, "__func__", x))
    if not isinstance(fn, types.FunctionType):
        return []
    module = fn.__module__ or ""
    is_torchs = module.split(".")[0] == "torch"
    return [] if is_torchs else [fn]


def _values_called(fn: types.FunctionType, code: types.CodeType) -> Iterator[Any]:
    """The objects that names in a function's code lead to; True for one that depends on ranks."""
    known = {**inspect.getclosurevars(fn).globals, **_cells(fn)}
    for part in _nested_codes(code):
        here: Any = None
        for step in dis.get_instructions(part):
            name = step.argval
            if step.opname in ROOTS:
                here = known.get(name, fn.__globals__.get(name))
            elif step.opname in ATTRIBUTES:
                if name in BY_NAME:
                    yield True
                if here is not None:
                    here = getattr(here, name, None)
            else:
                here = None
            if here is not None:
                yield _is_communicating(here) or here


def _cells(fn: types.FunctionType) -> dict[str, Any]:
    """The values that a function closes over, by name."""
    names = fn.__code__.co_freevars
    values: dict[str, Any] = {}
    for name, cell in zip(names, fn.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return values


def _nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function and of the functions that it defines."""
    yield code
    for x in code.co_consts:
        if isinstance(x, types.CodeType):
            yield from _nested_codes(x)


def _is_communicating(x: Any) -> bool:
    """Whether a value is a function of torch.distributed, or a collective of shardfn."""
    module = getattr(x, "__module__", None) or ""
    name = getattr(x, "_qualified_op_name", "")  # of a packet of ops
    if str(name).startswith(("_c10d_functional", "c10d")):
        return True
    if not callable(x) or isinstance(x, type):
        return False
    fn = getattr(x, "__func__", x)
    code = getattr(fn, "__code__", None)
    if code is not None and is_inside(code.co_filename):
        return module.startswith("shardfn.transforms")
    return module.startswith(COMMUNICATING)
