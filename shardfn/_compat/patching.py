"""One change of torch, for the time of a context."""

from __future__ import annotations

import contextlib
import functools
import pkgutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from . import threads

NEVER = "not known to end"
OBJECT = "torch._dynamo.variables.script_object:TorchScriptObjectVariable"
CUSTOM = "torch._dynamo.variables.script_object:CustomClassObjectVariable"
RENAMED = {  # a place, and its name from torch 2.15 on
    "torch._dynamo.variables:TensorVariable.var_getattr": (
        "torch._dynamo.variables:TensorVariable.tp_getattro_impl"
    ),
    f"{OBJECT}.call_method": f"{CUSTOM}.call_method",
    f"{OBJECT}.call_obj_hasattr": f"{CUSTOM}.call_obj_hasattr",
    f"{OBJECT}.repr_impl": f"{CUSTOM}.tp_repr_impl",
    f"{OBJECT}.var_getattr": f"{CUSTOM}.tp_getattro_impl",
}

INHERITED = {  # a method, and the class whose method it ends in, before torch 2.15
    "torch._dynamo.variables:UserMethodVariable.call_function": (
        "torch._dynamo.variables:UserFunctionVariable"
    )
}


def methods(owner: str, *names: str) -> tuple[str, ...]:
    """The places of methods of a class."""
    return tuple(f"{owner}.{name}" for name in names)


class Patch(NamedTuple):
    """One change.

    A function or method is replaced by `new`, which takes torch's function and then its
    arguments. Only the capturing thread calls it (`threads.overridden`). Any other patch is a
    context manager.
    """

    what: tuple[str, ...]  # "module:attribute", or in words
    why: str
    until: str  # the torch version that ends it
    new: Callable[..., Any] | None = None
    enter: Callable[..., AbstractContextManager[Any]] | None = None
    takes: str | None = None  # its argument of `patched`; None leaves the patch out
    is_mine: Callable[[], bool] = threads.is_capturing
    optional: bool = False  # some supported versions of torch do not have it


def enter(row: Patch, given: tuple[Any, ...], stack: contextlib.ExitStack) -> None:
    """Enter a patch.

    Args:
        row: the patch.
        given: its argument, if it takes one.
        stack: leaves it again.
    """
    if row.enter is not None:
        stack.enter_context(row.enter(*given))
        return
    assert row.new is not None
    new = functools.partial(row.new, *given)
    for place in row.what:
        owner, name = _place(place)
        if not hasattr(owner, name) and place in RENAMED:
            owner, name = _place(RENAMED[place])
        if row.optional and not hasattr(owner, name):
            continue
        if place in INHERITED and issubclass(owner, _class(INHERITED[place])):
            continue
        stack.enter_context(threads.overridden(owner, name, new, row.is_mine))


def _class(text: str) -> type:
    return pkgutil.resolve_name(text)


def _place(text: str) -> tuple[Any, str]:
    """The module or class of a place in the table, or None if it does not exist, and the
    attribute.
    """
    module, _, inside = text.partition(":")
    path, _, name = inside.rpartition(".")
    try:
        return pkgutil.resolve_name(f"{module}:{path}"), name
    except (AttributeError, ImportError):
        return None, name
