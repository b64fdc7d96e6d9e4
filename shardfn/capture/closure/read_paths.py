"""Places that a function reads: the steps to each from the function or a module, and its value."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

Path = tuple[Any, ...]
LIBRARIES = ("torch", "shardfn", "optree", "attr", "attrs", "numpy")
STANDARD = os.path.dirname(os.__file__)
MISSING = (
    KeyError,
    IndexError,
    AttributeError,
    ValueError,
    TypeError,
)  # errors that a missing place raises
WORLD = (
    "torch.distributed",
    "shardfn.world",
    "shardfn.mesh",
)  # modules whose functions depend on the world


def value_at(path: Path) -> Any:
    """The object at a path of reads. If it does not exist, a list, which is not a constant."""
    kind, to = path[0]
    x = root_object(kind, to, None)
    try:
        for step in path[1:]:
            x = step_to(x, *step)
    except MISSING:
        return []
    return x


def name_of(path: Path) -> str:
    """The user's name of a place: `scale[0]`, `cfg.k`, `f.__defaults__[0]`."""
    text, before = "", None
    for kind, to in path:
        if kind == "attr" and to not in ("__self__", "held", "fn", "func", "__dict__"):
            text += f".{to}" if text else str(to)
        elif kind == "cell":
            text = str(to)
        elif kind == "training":
            text = f"submodules of {to} that train"
        elif kind in ("item", "value") and before != "mro":
            text += f"[{to!r}]" if text else (str(to) if isinstance(to, str) else "")
        before = kind
    if text.strip("."):
        return text.strip(".")
    kind, to = path[0]
    is_scope = kind == "scope" and isinstance(to.held, dict)
    return f"globals of {to.held.get('__name__')}" if is_scope else "a closed-over object"


def root_object(kind: str, to: Any, fn: Any) -> Any:
    if kind == "fn":
        return fn
    return sys.modules.get(to) if kind == "module" else to.held


def is_library(x: Any) -> bool:
    """Whether an object is library code, whose reads are constants by contract."""
    if isinstance(x, types.ModuleType):
        return _is_library_name(x.__name__)
    if isinstance(x, (type, types.FunctionType, types.BuiltinFunctionType)):
        return _is_library_name(getattr(x, "__module__", None) or "builtins")
    return False


def is_inside_library(x: Any) -> bool:
    """Whether a path that begins at this module leads into a library. Modules of torch.nn may read
    settings.
    """
    return (
        isinstance(x, types.ModuleType) and is_library(x) and not x.__name__.startswith("torch.nn.")
    )


def _is_library_name(name: str) -> bool:
    top = name.partition(".")[0]
    if top not in sys.stdlib_module_names:
        return top in LIBRARIES
    file = getattr(
        sys.modules.get(top), "__file__", None
    )  # a script of the user's may be called code.py
    return file is None or file.startswith(STANDARD)


def depends_on_world(x: Any) -> bool:
    """Whether an object is a function, a class or a module whose results depend on the world or
    the mesh.
    """
    if isinstance(x, types.ModuleType):
        return False
    if not isinstance(x, (type, types.FunctionType, types.BuiltinFunctionType)):
        return False
    return (getattr(x, "__module__", None) or "").startswith(WORLD)


def step_to(x: Any, kind: str, to: Any) -> Any:
    """The object that one step of a path leads to: an attribute, an item, a closure cell."""
    if kind == "attr":
        found = own_names(x).get(to, MISSING)
        is_own = found is not MISSING and not isinstance(found, staticmethod)
        return found if is_own else getattr(x, to)
    if kind in ("item", "value"):
        if kind == "value":
            to = list(dict.keys(x))[to]
        return dict.__getitem__(x, to) if isinstance(x, dict) else x[to]
    return OTHER_STEPS[kind](x, to)


OTHER_STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "cell": lambda x, to: x.cell_contents,
    "closure": lambda x, to: x.__closure__,
    "key": lambda x, to: list(dict.keys(x))[to],
    "type": lambda x, to: type(x),
    "typedict": lambda x, to: x.__dict__,
    "mro": lambda x, to: x.__mro__,
    "array": lambda x, to: x,
    "member": lambda x, to: list(x)[to],
    "call": lambda x, to: x(),
    "training": lambda x, to: x.training,
}


def own_names(x: Any) -> Any:
    """The instance `__dict__` of an object."""
    names = getattr(x, "__dict__", None)
    return names if isinstance(names, (dict, types.MappingProxyType)) else {}


def is_fixed(x: Any, kind: str, to: Any, value: Any) -> bool:
    """Whether a step from an object always leads to the same object."""
    if kind in ("closure", "type", "typedict", "mro", "array"):
        return True
    if kind == "training":
        return False
    if kind in ("item", "value"):
        return type(x) is tuple
    if kind == "attr" and isinstance(x, types.MethodType):
        return to in ("__self__", "__func__")
    if kind == "attr" and "_hooks" in to and isinstance(x, torch.nn.Module):
        return True  # torch puts hooks into the dict, and never replaces the dict
    ours = (type(x).__module__ or "").startswith("shardfn.")
    unstable = kind == "attr" and to not in own_names(x) and getattr(x, to) is not value  # a method
    return (ours and not isinstance(x, types.ModuleType)) or unstable


def stored_place(x: Any, kind: str, to: Any) -> tuple[Any, str, Any]:
    """Where an attribute is stored: as an item of the attribute dict, if there is one."""
    names = own_names(x) if kind == "attr" else {}
    is_own = to in names and not isinstance(names[to], staticmethod)
    return (names, "item", to) if is_own else (x, kind, to)
