"""Leaked traced values, stored by functions that Dynamo does not trace. Every later use is an
error that names their origin.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import types
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch

from ... import _compat, _tree
from ...errors import CaptureError

_WATCHED: contextvars.ContextVar[WatchedFunctions | None] = contextvars.ContextVar(
    "watched", default=None
)


class WatchedFunctions:
    """The functions that may store values during a capture, and the state before it."""

    def __init__(self) -> None:
        self.functions: dict[int, tuple[str, Any]] = {}
        self.before: list[tuple[Any, Any]] = []  # a list, a dict or a cell, and its content
        self.modes: dict[int, _compat.Read] = {}  # of the modules that run
        self.pure: list[tuple[str, list[tuple[Any, Any]]]] = []  # functions that may not store

    def add(self, owner: str, fn: Any, is_pure: bool = False) -> None:
        if id(fn) in self.functions:
            return
        self.functions[id(fn)] = owner, fn
        before: list[tuple[Any, Any]] = [(cell, cell.cell_contents) for cell in _cells(fn)]
        seen: dict[int, Any] = {}
        for place in _objects_of(fn):
            _add_containers(place, seen)
        before += [(container, _copied(container)) for container in seen.values()]
        self.before += before
        if is_pure:
            self.pure.append((owner, before))

    def refuse_changes(self) -> None:
        """Refuse functions that change what lives outside of them, which later calls would not."""
        for owner, before in self.pure:
            if not all(_is_as_before(place, old) for place, old in before):
                raise CaptureError.of(
                    owner,
                    "the function changes an object outside of itself",
                    needed="a function without side effects",
                )

    def rewind(self) -> None:
        """Restore the state before: Dynamo's run of a function must have no effects."""
        for place, old in reversed(self.before):
            if _is_as_before(place, old):
                continue
            if isinstance(place, types.CellType):
                place.cell_contents = old
            else:
                _restore(place, old)

    def sweep(self) -> None:
        """Replace stored traced values by `LeakedTensor`s."""
        for owner, fn in self.functions.values():
            for cell in _cells(fn):
                cell.cell_contents = _with_leaked_tensors(cell.cell_contents, owner)
            containers: dict[int, Any] = {}
            for place in _objects_of(fn):
                _add_containers(place, containers)
            for container in containers.values():
                kind = _plain_class(container)
                content = _copied(container)
                rows = content if kind is not list else dict(enumerate(content))
                for key, x in rows.items():
                    changed = _with_leaked_tensors(x, owner)
                    if changed is not x:
                        kind.__setitem__(container, key, changed)


LARGE = 10_000
KNOWN = (
    "__get__",
    "size",
    "dim",
    "stride",
    "numel",
    "is_floating_point",
    "is_complex",
)  # attributes of a tensor that do not need its values


class LeakedTensor(torch.Tensor):
    """The tensor in place of a traced value that a function has stored: every use is an error."""

    @staticmethod
    def __new__(cls, traced: torch.Tensor, owner: str) -> LeakedTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls, traced.shape, dtype=traced.dtype, device=traced.device
        )

    def __init__(self, traced: torch.Tensor, owner: str) -> None:
        self.owner = owner

    def __repr__(self, **_: Any) -> str:
        return f"LeakedTensor(from {self.owner})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in KNOWN:
            return super().__torch_function__(func, types, args, kwargs or {})
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        owners = [
            x.owner for x in _tree.leaves((args, kwargs or {})) if isinstance(x, LeakedTensor)
        ]
        raise leaked(owners[0])


def leaked(where: str) -> CaptureError:
    """The error for a traced value that is used after its trace."""
    return CaptureError.of(
        where,
        "the tensor was stored during a capture, and has no value after the capture",
        needed="a tensor with a value",
        fix="return the value from the function that computes it",
    )


def watch(owner: str, fn: Any, *, is_pure: bool = False) -> None:
    """Check at the end of the capture for values that this function has stored. One that must be
    pure may not store any.
    """
    watched = _WATCHED.get()
    if watched is not None:
        watched.add(owner, fn, is_pure)


def note_modes(modes: Any) -> None:
    """Make the modes of a module that runs, train or eval, a read of the captured function."""
    watched = _WATCHED.get()
    if watched is not None:
        watched.modes[id(modes)] = modes.read


def note_methods(function: type) -> None:
    """Make the forward and the derivatives of an autograd.Function reads of the captured
    function.
    """
    watched = _WATCHED.get()
    if watched is not None:
        scope = "scope", _compat.Itself(function)
        for name in ("forward", "backward", "jvp"):
            read = _compat.Read((scope, ("attr", name)), "METHOD", None)
            watched.modes[hash((id(function), name))] = read


@contextlib.contextmanager
def swept() -> Iterator[WatchedFunctions]:
    """The context of a capture, at the end of which stored traced values become `LeakedTensor`s. At
    its end, traced values stored by watched functions become `LeakedTensor`s. If the capture fails,
    they are removed.
    """
    watched = WatchedFunctions()
    token = _WATCHED.set(watched)
    try:
        yield watched
        watched.refuse_changes()
        watched.sweep()
    except BaseException:
        watched.rewind()
        raise
    finally:
        _WATCHED.reset(token)


def _plain_class(container: Any) -> Any:
    """The builtin class, list or dict, whose methods read what a container has. A subclass may
    compute something else, as Hugging Face's table of activations does: it makes a module of each.
    """
    kinds = (list, OrderedDict, dict)
    return next(kind for kind in kinds if isinstance(container, kind))


def _copied(container: Any) -> Any:
    """A plain list or dict with the contents of a container."""
    kind = _plain_class(container)
    return kind.copy(container) if kind is list else dict(kind.items(container))


def _restore(container: Any, old: Any) -> None:
    """Put the old contents back into a list or dict."""
    kind = _plain_class(container)
    kind.clear(container)
    if kind is list:
        kind.extend(container, old)
        return
    for key, x in old.items():
        kind.__setitem__(container, key, x)


def _is_as_before(place: Any, old: Any) -> bool:
    """Whether a cell, list or dict still has its old contents."""
    is_cell = isinstance(place, types.CellType)
    return place.cell_contents is old if is_cell else _same(place, old)


def _same(a: Any, b: Any) -> bool:
    """Whether a list or dict has the identical objects of a plain one."""
    now = _copied(a)
    if len(now) != len(b):
        return False
    if isinstance(b, list):
        return all(x is y for x, y in zip(now, b, strict=True))
    return all(key in b and b[key] is x for key, x in now.items())


def _objects_of(fn: Any) -> list[Any]:
    """The objects in which a function may store: in its closure, the globals that it names, its
    bound object.
    """
    if isinstance(fn, functools.partial):
        return [*fn.args, *fn.keywords.values(), *_objects_of(fn.func)]
    if isinstance(fn, types.MethodType):
        return [fn.__self__, *_objects_of(fn.__func__)]
    if not isinstance(fn, types.FunctionType):
        return [fn]
    cells = [cell.cell_contents for cell in _cells(fn)]
    return [
        *cells,
        *(fn.__globals__[name] for name in fn.__code__.co_names if name in fn.__globals__),
    ]


def _cells(fn: Any) -> list[Any]:
    """The non-empty cells of a function."""
    return [cell for cell in getattr(fn, "__closure__", None) or () if _is_cell_filled(cell)]


def _is_cell_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _container_of(place: Any) -> Any:
    """The list or dict in which an object stores, or None."""
    if isinstance(
        place, (type, types.ModuleType, types.FunctionType, torch.nn.Module, torch.Tensor)
    ):
        return None
    container = place if isinstance(place, (list, dict)) else getattr(place, "__dict__", None)
    return container if isinstance(container, (list, dict)) else None


def _add_containers(place: Any, containers: dict[int, Any], depth: int = 3) -> None:
    """Collect the list or dict in which an object stores, and those inside it. Skips large ones,
    which are data.
    """
    container = _container_of(place)
    if container is None or id(container) in containers or len(container) > LARGE:
        return
    containers[id(container)] = container
    inside = _copied(container) if depth else ()
    for x in inside.values() if isinstance(inside, dict) else inside:
        if isinstance(x, (list, dict)):
            _add_containers(x, containers, depth - 1)


def _with_leaked_tensors(x: Any, owner: str) -> Any:
    if isinstance(x, torch.Tensor):
        return LeakedTensor(x, owner) if _compat.is_fake(x) else x
    if type(x) is tuple:
        inside = tuple(_with_leaked_tensors(child, owner) for child in x)
        return x if all(a is b for a, b in zip(x, inside, strict=True)) else inside
    return x
