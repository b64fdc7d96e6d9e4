"""What every transformed function is: callable, printable, inspectable in stages, inlined inside another."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

from .. import _compat
from ..runtime import Compiled, Lowered, Request, Traced, cache, call, trace


class Transformed:
    """A function under a transform; subclasses are records of the transform's arguments.

    They are not frozen: Dynamo reads their constructors, and cannot read attrs' way around a frozen class (torch 2.13).
    """

    verb: ClassVar[str]
    held: tuple[Callable[..., Any]]  # the function; bare, a transformed one would look like a descriptor to Dynamo (torch 2.11)

    @property
    def fn(self) -> Callable[..., Any]:
        """The function that is transformed."""
        return self.held[0]

    def asked(self) -> Request:
        """What is asked of the stages when this is the outermost call."""
        raise NotImplementedError

    def options(self) -> Any:
        """The transform's arguments but the function: equal options of one function share what was captured."""
        raise NotImplementedError

    @property
    def request(self) -> Request:
        """What the stages are asked; made once."""
        if "_request" not in self.__dict__:
            self.__dict__["_request"] = cache.request(type(self), self.fn, self.options(), self.asked)
        return self.__dict__["_request"]

    def inline(self, *args: Any, **kwargs: Any) -> Any:
        """What Dynamo reads when this function is called inside another transform."""
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _compat.is_tracing() or _compat.inside_transform():
            return self.inline(*args, **kwargs)
        return call(self.request, args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Stage 1: the global program for arguments like these; `ShapeDtype`s will do."""
        return trace(self.request, args, kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Stages 1 to 3: one rank's program."""
        return self.trace(*args, **kwargs).lower()

    def compile(self, *args: Any, **kwargs: Any) -> Compiled:
        """Stages 1 to 4: ready to run."""
        return self.lower(*args, **kwargs).compile()

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fn

    @property
    def __name__(self) -> str:
        return f"{self.verb}({name_of(self.fn)})"

    def __repr__(self) -> str:
        return self.__name__

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)


def name_of(fn: Any) -> str:
    """How errors and printed programs call a function."""
    if isinstance(fn, functools.partial):
        return name_of(fn.func)
    return getattr(fn, "__name__", None) or type(fn).__name__


def innermost(fn: Any) -> Callable[..., Any]:
    """The user's own function, whose parameter names errors use."""
    while isinstance(fn, Transformed):
        fn = fn.fn
    return fn


def parameter_names(fn: Any, count: int) -> tuple[str, ...]:
    """The names of a function's first parameters, as far as Dynamo can read them."""
    inner, skip = innermost(fn), 0
    while isinstance(inner, functools.partial):
        skip += len(inner.args)
        inner = innermost(inner.func)
    code = getattr(inner, "__code__", None)
    if code is None:
        return ()
    skip += 1 if hasattr(inner, "__self__") else 0
    return code.co_varnames[skip : min(skip + count, code.co_argcount)]
