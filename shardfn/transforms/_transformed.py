"""The base class of transformed functions. They can be called, printed, inspected stage by
stage, and inlined in another transform.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import torch

from .. import _compat, _tree, tree_pairs
from ..capture import constant_key, is_constant
from ..runtime import (
    Compiled,
    Lowered,
    Needs,
    Request,
    Traced,
    attempt,
    cache,
    call,
    compiled_for,
    explain_retrace,
    prepare,
    trace,
)
from ..tracebacks import filter_errors, prepare_error
from ..world import current_world
from .derivatives._outside import differentiated
from .dtensors._outside import calling, entering, leaving, linked_as, placed
from .dtensors._own_layouts import have_own_sizes, own_layouts
from .dtensors._ranks import OnRanks, on_ranks
from .sharding._written import Writes

# flags of code
STARRED, DOUBLE_STARRED = inspect.CO_VARARGS, inspect.CO_VARKEYWORDS

# what a transformed function carries besides its fields
NAMES = {
    "__doc__",
    "__module__",
    "__qualname__",
    "_request",
    "_ranks",
    "_has_own_sizes",
    "_writes",
    "_chosen",
    "is_auto",
    cache.CARRIED,
}

# of these, what calls have found out
FOUND = {"_request", "_ranks", "_has_own_sizes", "_writes", "_chosen", "is_auto"}


class Transformed:
    """A function under a transform. Subclasses are records of the transform's arguments.

    They are not frozen: Dynamo reads their constructors, and cannot read attrs' way around a
    frozen class (torch 2.13).
    """

    verb: ClassVar[str]
    # whether it may be the code of one rank, found out when it is captured
    may_be_of_ranks: ClassVar[bool] = True
    # whether the captured program depends on the record's fields only; not inherited
    by_fields: ClassVar[bool] = False
    held: tuple[
        Callable[..., Any]
    ]  # the function; bare, a transformed one would look like a descriptor to Dynamo (torch 2.11)

    @_compat.read_by_dynamo
    def __attrs_post_init__(self) -> None:
        if not _compat.is_tracing():  # Dynamo does not read names
            self.__dict__.update(_named_as(self.fn))

    @property
    @_compat.read_by_dynamo
    def fn(self) -> Callable[..., Any]:
        """The function that is transformed."""
        return self.held[0]

    def asked(self) -> Request:
        """The request to the stages when this is the outermost call."""
        return Request(self.__name__, self.inline, innermost(self.fn))

    def asking_for(self) -> Request:
        """The request, with what all transforms say of themselves."""
        asked = self.asked()
        may_be = self.may_be_of_ranks
        return attrs.evolve(asked, may_be_of_ranks=may_be, differentiated=differentiated)

    def options(self) -> Any:
        """The transform's arguments except the function. Equal options of one function share
        their captures.
        """
        raise NotImplementedError

    @property
    def request(self) -> Request:
        """The request to the stages, made once."""
        if "_request" not in self.__dict__:
            self.__dict__["_request"] = cache.request(
                type(self), self.fn, self.options(), self.asking_for
            )
        return self.__dict__["_request"]

    def inline(self, *args: Any, **kwargs: Any) -> Any:
        """The call that Dynamo traces when this function is called inside another transform."""
        raise NotImplementedError

    @_compat.read_by_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _compat.is_tracing() or _compat.inside_transform():
            return self.inline(*args, **kwargs)
        try:
            return self.outermost(args, kwargs)
        except BaseException as error:
            prepare_error(error)
            raise

    def outermost(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call that no other transform contains. Code of one rank is found out when it is
        captured, and remembered.
        """
        return self.staged(call, args, kwargs, leaving)

    def staged(
        self,
        stage: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        unwrap: Callable[[Any], Any],
    ) -> Any:
        """A stage of this function in the form that it needs, which attempts find out: as a
        function of global tensors, or as the code of one rank, whose result is unwrapped.
        """
        mesh = self.mesh_of_ranks()
        tried = [None, mesh]
        while True:
            if mesh is None:
                out = self.of_global_tensors(stage, args, kwargs)
            else:
                out = self.of_one_rank(mesh, stage, args, kwargs, unwrap)
            if not isinstance(out, Needs):
                return out
            mesh = self._mesh_for(out, mesh, tried)

    def _mesh_for(self, needs: Needs, mesh: Any, tried: list[Any]) -> Any:
        """The mesh of the next attempt, which does what the last one needs.

        Raises:
            CaptureError: the error of the last attempt, if no other form is left.
        """
        if needs.has_own_sizes and mesh is not None and "_has_own_sizes" not in self.__dict__:
            self.__dict__["_has_own_sizes"] = True
            return mesh
        if not (needs.is_of_ranks and self.may_be_of_ranks) or needs.mesh in tried:
            raise needs.error
        tried.append(needs.mesh)
        if needs.is_for_good:
            self.__dict__["_ranks"] = current_world(), needs.mesh
        return needs.mesh

    def of_global_tensors(
        self, stage: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """An attempt at a stage of this function of global tensors, which may write to buffers of
        modules.
        """
        known, needs = self.__dict__.get("_writes"), None
        if known is None:
            out = attempt(stage, self.request, args, kwargs)
            if not isinstance(out, Needs) or not out.may_write:
                return out
            known, needs = self.__dict__.setdefault("_writes", Writes(self.fn, [])), out
        return known.staged(stage, self.request, args, kwargs, needs)

    def of_one_rank(
        self, mesh: Any, stage: Callable[..., Any], args: Any, kwargs: Any, unwrap: Any
    ) -> Any:
        """An attempt at a stage of the code of one rank of a mesh, with its own tensors."""
        leaves = _tree.quick_leaves((args, kwargs))
        request = self.on_ranks(linked_as(mesh, leaves), leaves)

        def run() -> Any:
            given = entering(request, request.mesh, args, kwargs)
            out = attempt(stage, request, *given)
            return out if isinstance(out, Needs) else unwrap(out)

        is_call = stage is call and request.donate_argnums
        return calling(run, request, args, kwargs) if is_call else run()

    def mesh_of_ranks(self) -> Any:
        """The mesh whose ranks this is code of, or None for a function of global tensors."""
        world, mesh = self.__dict__.get("_ranks", (None, None))
        return mesh if world is current_world() else None

    def on_ranks(self, mesh: Any, leaves: list[Any]) -> Request:
        """The request for code of each rank, made once for each placements of arguments."""
        texts = placed(leaves)
        is_own = "_has_own_sizes" in self.__dict__ or have_own_sizes(leaves)
        layouts = own_layouts(mesh, leaves) if is_own else ()
        options = type(self), self.options(), mesh, texts, is_own, layouts
        make = lambda: on_ranks(self.request, mesh, texts, has_own_sizes=is_own, layouts=layouts)
        return cache.request(OnRanks, self.fn, options, make)

    @filter_errors
    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Stage 1: the global program for arguments like these, which may be `ShapeDtype`s."""
        return self.staged(trace, args, kwargs, lambda traced: traced)

    @filter_errors
    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Stages 1 to 3: one rank's program."""
        return self.trace(*args, **kwargs).lower()

    @filter_errors
    def compile(self, *args: Any, **kwargs: Any) -> Compiled:
        """Stages 1 to 4: ready to run."""
        prepare(self.request, _tree.leaves((args, kwargs)))
        return compiled_for(self.trace(*args, **kwargs))

    @filter_errors
    def explain_retrace(self, *args: Any, **kwargs: Any) -> str:
        """Why a call is staged again: the closest earlier signature, and where it differs.

        Args:
            args: of a call, or nothing for the last call that was staged.
            kwargs: its keyword arguments.

        Returns:
            A line for each difference: the path of an argument with its shape, dtype and
            placements now and before, a constant, a value that the function closes over, a
            setting of torch, the mesh.

        Source: jax.config.jax_explain_cache_misses.

        Example:
            >>> import torch, shardfn as sf
            >>> double = sf.jit(lambda x: x * 2, backend="aten")
            >>> double(torch.ones(2))
            tensor([2., 2.])
            >>> print(double.explain_retrace(torch.ones(3)))
            jit(<lambda>): a new signature; the closest of 1 earlier signature differs in
              x: f32[3], was f32[2]
        """
        if not args and not kwargs:
            return self.request.store.retrace or f"{self}: the function has not been called"
        return self.staged(explain_retrace, args, kwargs, lambda text: text)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fn

    @property
    @_compat.read_by_dynamo
    def __name__(self) -> str:
        return f"{self.verb}({name_of(self.fn)})"

    def __repr__(self) -> str:
        return self.__name__

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        return functools.partial(self, instance) if _compat.is_tracing() else Bound(self, instance)

    def __getstate__(self) -> dict[str, Any]:
        """The state that is copied and pickled: without staged programs."""
        found = self.__dict__.items()
        return {name: x for name, x in found if name not in FOUND}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A transformed function that its own name leads to, as under a decorator, is pickled
        by name, as functions are.
        """
        found: Any = sys.modules.get(self.__module__)
        for part in self.__qualname__.split("."):
            found = getattr(found, part, None)
        return self.__qualname__ if found is self else super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy with a copy of the function. The transform's arguments are values, and shared."""
        made = copy.copy(self)
        if made is not self:
            made.held = (copy.deepcopy(self.fn, memo),)
        return made


class Bound(functools.partial):
    """A transformed function as a method: its first argument is the instance."""

    def __repr__(self) -> str:
        return f"{self.func} of {self.args[0]!r}"

    @filter_errors
    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Stage 1, with the instance as the first argument."""
        return self.func.trace(*self.args, *args, **kwargs)

    @filter_errors
    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Stages 1 to 3."""
        return self.func.lower(*self.args, *args, **kwargs)

    @filter_errors
    def compile(self, *args: Any, **kwargs: Any) -> Compiled:
        """Stages 1 to 4."""
        return self.func.compile(*self.args, *args, **kwargs)


def _named_as(fn: Any) -> dict[str, Any]:
    """The names that a transformed function takes from its function."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    qualname = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    return {
        "__doc__": fn.__doc__,
        "__module__": getattr(fn, "__module__", None) or __name__,
        "__qualname__": qualname,
    }


@_compat.read_by_dynamo
def name_of(fn: Any) -> str:
    """The name of a function in errors and printed programs."""
    if isinstance(fn, functools.partial):
        return name_of(fn.func)
    return getattr(fn, "__name__", None) or type(fn).__name__


@_compat.read_by_dynamo
def innermost(fn: Any) -> Callable[..., Any]:
    """The user's function, whose parameter names errors use."""
    while isinstance(fn, Transformed) and not hasattr(fn, "__signature__"):
        fn = fn.fn
    return fn


def structure_of(fn: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function under transforms, and the key of the transforms. Two functions with the same
    function inside and equal keys have the same captures.

    Transforms with mutable or unknown fields are not looked into.
    """
    keys: list[Any] = []
    while type(fn).__dict__.get("by_fields", False):
        fields = {field.name: getattr(fn, field.name) for field in _fields(fn)}
        others = vars(fn).keys() - fields.keys() - NAMES
        (inner,) = fields.pop("held")
        values = tuple(fields.values())
        if others or not is_constant(values):
            break
        keys.append((type(fn), constant_key(values)))
        fn = inner
    return fn, tuple(keys)


def _fields(fn: Transformed) -> tuple[Any, ...]:
    return attrs.fields(type(fn))


@_compat.read_by_dynamo
def parameter_names(fn: Any, count: int) -> tuple[str, ...]:
    """The names of a function's first parameters, as far as Dynamo can read them."""
    return parameters_of(fn)[0][:count]


@_compat.read_by_dynamo
def parameters_of(fn: Any) -> tree_pairs.Parameters:
    """The names of a function's parameters, as far as Dynamo can read them."""
    inner = innermost(fn)
    skip = 0
    while isinstance(inner, functools.partial):
        skip += len(inner.args)
        inner = innermost(inner.func)
    inner = inner.forward if isinstance(inner, torch.nn.Module) else inner
    code = getattr(inner, "__code__", None)
    if code is None:
        return getattr(inner, "leading", ()), "args", (), "kwargs"
    skip += 1 if hasattr(inner, "__self__") else 0
    count = code.co_argcount
    end = count + code.co_kwonlyargcount
    names = code.co_varnames
    has_star, has_double_star = code.co_flags & STARRED, code.co_flags & DOUBLE_STARRED
    starred = names[end] if has_star else ""
    double_starred = names[end + (1 if has_star else 0)] if has_double_star else ""
    return names[skip:count], starred, names[count:end], double_starred


@_compat.read_by_dynamo
def argument_names(
    parameters: tree_pairs.Parameters, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[str]:
    """The name of each argument of a call in errors, the positional ones first."""
    positional, starred = parameters[0], parameters[1] or "args"
    rest = [f"{starred}[{i}]" for i in range(len(args) - len(positional))]
    return [*positional[: len(args)], *rest, *kwargs]
