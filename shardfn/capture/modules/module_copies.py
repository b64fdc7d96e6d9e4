"""Copies of a module that share only its values. A pure call runs on such a copy, and may
change it.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict
from typing import Any

import torch

from ... import _compat

CONTAINERS = (list, tuple, set, frozenset, dict, OrderedDict)


def copied_module(x: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of modules and containers, with some objects replaced. Everything else is
    shared.

    Args:
        x: a module, or a value that one holds.
        memo: the replacement of each object, by id. Copies are added to it, so that shared
            objects stay shared.
    """
    if id(x) in memo:
        return memo[id(x)]
    if isinstance(x, torch.nn.Module):
        return _module(x, memo)
    kind = type(x)
    if kind is types.MethodType:  # a bound method as a hook or a forward
        return types.MethodType(x.__func__, copied_module(x.__self__, memo))
    if kind is functools.partial:
        return functools.partial(
            copied_module(x.func, memo),
            *copied_module(x.args, memo),
            **copied_module(x.keywords, memo),
        )
    if kind is weakref.ReferenceType and id(x()) in memo:
        return weakref.ref(memo[id(x())])
    return _container(x, memo) if kind in CONTAINERS else x


def _module(module: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
    if "_orig_mod" in _compat.modules_of(module):  # the result of torch.compile for a module
        module_copy = memo[id(module)] = copied_module(
            _compat.modules_of(module)["_orig_mod"], memo
        )
        return module_copy
    module_copy = memo[id(module)] = object.__new__(type(module))
    state = {name: copied_module(x, memo) for name, x in module.__dict__.items()}
    module_copy.__dict__.update(
        state, _compiled_call_impl=None
    )  # the result of module.compile() belongs to the original
    return module_copy


def _container(x: Any, memo: dict[int, Any]) -> Any:
    if isinstance(x, dict):
        container_copy = memo[id(x)] = type(x)()
        container_copy.update(
            (copied_module(key, memo), copied_module(value, memo)) for key, value in x.items()
        )
    elif isinstance(x, list):
        container_copy = memo[id(x)] = []
        container_copy.extend(copied_module(child, memo) for child in x)
    else:
        container_copy = type(x)(copied_module(child, memo) for child in x)
    return container_copy


def snapshot(module: torch.nn.Module) -> dict[str, Any]:
    """What identifies each attribute of a module and its submodules, by path."""
    attributes: dict[str, Any] = {}
    for prefix, part in module.named_modules():
        for name, x in part.__dict__.items():
            path = f"{prefix}.{name}" if prefix else name
            if name == "_buffers":
                attributes[path] = tuple(x)
            elif name in ("_parameters", "_modules"):
                attributes |= {path.replace(name, key): id(child) for key, child in x.items()}
            else:
                attributes[path] = _identity(x)
    return attributes


def _identity(x: Any) -> Any:
    if isinstance(x, dict):
        return tuple(
            (key if isinstance(key, (str, int)) else id(key), _identity(child))
            for key, child in x.items()
        )
    if type(x) in CONTAINERS:
        return tuple(map(_identity, x))
    return id(x()) if type(x) is weakref.ReferenceType else id(x)


def user_functions(module: torch.nn.Module) -> list[Any]:
    """The user's functions that a module runs: forwards and hooks."""
    functions: list[Any] = []
    for part in module.modules():
        hooks = (
            _compat.forward_pre_hooks_of(part),
            _compat.forward_hooks_of(part),
            _compat.backward_pre_hooks_of(part),
            _compat.backward_hooks_of(part),
        )
        functions += [
            part.__dict__.get("forward") or type(part).forward,
            *(hook for table in hooks for hook in table.values()),
        ]
    return functions


def changed_attributes(
    before: dict[str, Any], after: dict[str, Any], module: torch.nn.Module
) -> list[str]:
    """The attributes that a call changed, except weights that torch's hooks recompute each time
    (old weight_norm, pruning).
    """
    computed = set()
    for prefix, part in module.named_modules():
        for name in computed_by_hooks(part):
            computed.add(f"{prefix}.{name}" if prefix else name)
    return sorted(
        path
        for path in before.keys() | after.keys()
        if before.get(path) != after.get(path) and path not in computed
    )


def computed_by_hooks(module: torch.nn.Module) -> dict[str, Any]:
    """The attributes that hooks of torch compute before each call (old weight_norm, pruning), with
    their hooks.
    """
    hooks: dict[str, Any] = {}
    for hook in _compat.forward_pre_hooks_of(module).values():
        names = getattr(hook, "name", None), getattr(hook, "_tensor_name", None)
        hooks.update({name: hook for name in names if name})
    return hooks
