"""autograd.Functions whose forward takes the context, in the form that torch.func takes.

Such a forward saves whatever it computes. Here it runs on a context that records, and the
tensors that it saves are further results.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import attrs
import torch
from torch.autograd.function import FunctionCtx

from ... import _compat, _tree
from ...errors import CaptureError
from .. import annotations as sources
from ..refusals import leaks

Function = type[torch.autograd.Function]
# names that torch's own methods of a context set
SET_BY_TORCH = (
    "dirty_tensors",
    "materialize_grads",
    "needs_input_grad",
    "non_differentiable",
    "saved_for_forward",
    "saved_tensors",
    "to_save",
)
INTERMEDIATE = (
    "its derivative is differentiated, and uses a value of its forward that is neither an "
    "argument nor a result",
    "a backward that computes it from its arguments; or return it as a result too",
)
MARKED_ONCE = (
    "its backward is marked once_differentiable, and is differentiated",
    "a backward without the mark",
)
ONCE = torch.autograd.function.once_differentiable(len).__code__


class Context(FunctionCtx):
    """The context that a Function's forward, backward and jvp take."""

    to_save: tuple[Any, ...] = ()
    saved_for_forward: tuple[Any, ...] = ()
    saved_tensors: tuple[Any, ...] = ()
    non_differentiable: tuple[Any, ...] = ()
    dirty_tensors: tuple[Any, ...] = ()
    materialize_grads: bool = True
    needs_input_grad: tuple[bool, ...] = ()


@attrs.frozen
class Place:
    """A tensor of a call: one of its inputs, or of its results and further results."""

    is_input: bool
    at: int

    def value(self, inputs: Sequence[Any], results: Sequence[Any]) -> Any:
        """The tensor."""
        return (inputs if self.is_input else results)[self.at]


class Saved(NamedTuple):
    """The tensors that a forward has saved, and the attributes of its context.

    Where a tensor stood there is its Place.
    """

    backward: tuple[Any, ...]
    forward: tuple[Any, ...]
    attributes: dict[str, Any]

    def places(self) -> list[Place]:
        """The place of each saved tensor."""
        found = [x for x in _tree.leaves(tuple(self)) if isinstance(x, Place)]
        return list(dict.fromkeys(found))

    def filled(self, values: dict[Place, torch.Tensor]) -> Saved:
        """The same with tensors."""
        fill = lambda x: values[x] if isinstance(x, Place) else x
        return Saved(*_tree.tree_map(fill, tuple(self)))


def applied(
    call: Callable[..., Any], function: Function, *args: Any, **kwargs: Any
) -> Any:
    """Call a Function under torch.func. The constants that its code reads are in the key of the
    capture.

    Args:
        call: torch's call of a Function whose forward does not take the context.
        function: the class.
        args: of the call. Tensors among them, not those inside of containers, have gradients.
        kwargs: of the call, in the order of the forward's parameters.

    Raises:
        CaptureError: the forward writes to its arguments. When it is differentiated twice: the
            derivative uses a value of the forward that is neither an argument nor a result.
    """
    for fn in (function.forward, function.backward, function.jvp):
        leaks.watch(f"autograd.Function {function.__name__}", inspect.unwrap(fn))
    if not _compat.takes_context(function):
        return call(function, *args, **kwargs)
    if kwargs:
        bound = inspect.signature(function.forward).bind(None, *args, **kwargs)
        args = bound.args[1:]
    recorded = Call(function, args)
    results = recorded.differentiable().apply(*recorded.tensors)
    return recorded.result(results)


class Call:
    """One call of a Function.

    Args:
        function: the class.
        args: of the call.
    """

    def __init__(self, function: Function, args: tuple[Any, ...]) -> None:
        self.function, self.name = (
            function,
            f"autograd.Function {function.__name__}",
        )
        self.leaves, self.treedef = _tree.flatten(args)
        self.at = [i for i, x in enumerate(self.leaves) if _is_tensor(x)]
        self.tensors = [self.leaves[i] for i in self.at]
        # of each tensor, the number of the argument that it is; None inside of a container
        self.numbers = [
            number if _is_tensor(arg) else None
            for number, arg in enumerate(args)
            for x in _tree.leaves(arg)
            if _is_tensor(x)
        ]
        self.count = len(args)
        self.needs = tuple(map(_needs_gradient, args))
        self.source = _line() or _definition(function)
        self.has_jvp = function.jvp is not torch.autograd.Function.jvp
        self.is_nested = _compat.derivative_levels() > 1
        self.outs: list[Any] = []  # the results as Places and constants
        self.inside = 0  # the number of results that are tensors
        self.is_tuple = False
        self.silent: set[int] = set()  # results without a derivative
        self.extras: list[torch.Tensor] = []
        self.materializes = True
        self.saved = Saved((), (), {})

    def differentiable(self) -> Function:
        """The Function of this call, whose forward takes tensors only."""

        class Differentiable(torch.autograd.Function):
            generate_vmap_rule = True

            @staticmethod
            def forward(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
                return self.forward(tensors)

            @staticmethod
            def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
                self.save(ctx, inputs, output)

            @staticmethod
            def backward(ctx: Any, *cotangents: Any) -> Any:
                return self.backward(ctx, cotangents)

        if self.has_jvp:
            Differentiable.jvp = staticmethod(self.jvp)
        Differentiable.__name__ = self.function.__name__
        return Differentiable

    def forward(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The results that are tensors, and what else was saved."""
        context = Context()
        context.needs_input_grad = self.needs
        versions = [_compat.version_of(x) for x in tensors]
        out: Any = self.function.forward(context, *self._arguments(tensors))
        written = [_compat.version_of(x) for x in tensors] != versions
        if written or context.dirty_tensors:
            self.refuse(
                "its forward writes in place to an argument",
                "a forward that returns a new tensor",
            )
        self.is_tuple = isinstance(out, tuple)
        results = self._number(out if self.is_tuple else (out,))
        self.inside = len(results)
        known = {id(x): Place(False, i) for i, x in enumerate(results)}
        silent = {id(x) for x in context.non_differentiable}
        self.silent = {i for i, x in enumerate(results) if id(x) in silent}
        known |= {id(x): Place(True, i) for i, x in enumerate(tensors)}
        self.materializes = context.materialize_grads
        self.extras = []
        self.saved = self._record(context, known, len(results))
        return (*results, *self.extras)

    def _arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        leaves = list(self.leaves)
        for i, x in zip(self.at, tensors, strict=True):
            leaves[i] = x
        return _tree.unflatten(self.treedef, leaves)

    def _number(self, out: tuple[Any, ...]) -> list[torch.Tensor]:
        """The tensors among the results of the forward."""
        results: list[torch.Tensor] = []
        self.outs = []
        for x in out:
            if not _is_tensor(x) and any(map(_is_tensor, _tree.leaves(x))):
                got = f"its forward returns a {type(x).__name__} of tensors"
                self.refuse(got, "a forward that returns a tuple of tensors")
            self.outs.append(Place(False, len(results)) if _is_tensor(x) else x)
            results += [x] if _is_tensor(x) else []
        return results

    def _record(
        self, context: Context, known: dict[int, Place], count: int
    ) -> Saved:
        """What a context has saved. Adds new tensors to the further results."""

        def place(x: Any) -> Any:
            if not _is_tensor(x):
                return x
            if id(x) not in known:
                known[id(x)] = Place(False, count + len(self.extras))
                self.extras.append(x)
            return known[id(x)]

        names = vars(context).items()
        attributes = {k: x for k, x in names if k not in SET_BY_TORCH}
        placed = _tree.tree_map(
            place, (context.to_save, context.saved_for_forward, attributes)
        )
        return Saved(*placed)

    def save(self, ctx: Any, inputs: Sequence[Any], results: Sequence[Any]) -> None:
        """Save the tensors in torch's context, at one level of torch.func."""
        values = [place.value(inputs, results) for place in self.saved.places()]
        ctx.save_for_backward(*values)
        if self.has_jvp:
            ctx.save_for_forward(*values)
        ctx.set_materialize_grads(self.materializes)
        ctx.mark_non_differentiable(
            *(x for i, x in enumerate(results) if i in self.silent or not _moves(x))
        )

    def _context(self, ctx: Any, is_backward: bool) -> Context:
        """The context that the user's backward or jvp takes, from torch's."""
        places = self.saved.places()
        values = dict(zip(places, ctx.saved_tensors, strict=True))
        if self.is_nested:
            values = {place: self._guarded(place, x) for place, x in values.items()}
        saved, context = self.saved.filled(values), Context()
        vars(context).update(saved.attributes)
        context.saved_tensors = saved.backward if is_backward else saved.forward
        needs = [False] * self.count
        for number, need in zip(self.numbers, ctx.needs_input_grad, strict=True):
            if number is not None:
                needs[number] = need
        context.needs_input_grad = tuple(needs)
        return context

    def _guarded(self, place: Place, x: torch.Tensor) -> torch.Tensor:
        """A saved tensor; a further result of the forward as one that has no derivative."""
        is_further = not place.is_input and place.at >= self.inside
        if not is_further or not _moves(x):
            return x
        return _Final.apply(x, self, INTERMEDIATE)

    def backward(self, ctx: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        """The gradients of the tensors, by the user's backward."""
        given = [
            cotangents[x.at] if isinstance(x, Place) else None for x in self.outs
        ]
        found = self._differentiated(self._context(ctx, is_backward=True), given)
        gradients = found if isinstance(found, tuple) else (found,)
        more = gradients[self.count :]
        if len(gradients) < self.count or any(g is not None for g in more):
            self.refuse(
                f"its backward returns {len(gradients)} gradients for {self.count} arguments",
                "a gradient or None for each argument of the forward",
            )
        return tuple(None if n is None else gradients[n] for n in self.numbers)

    def _differentiated(self, context: Context, cotangents: list[Any]) -> Any:
        """The user's backward, which may be one that is not differentiated again."""
        backward: Any = self.function.backward
        if getattr(backward, "__code__", None) is not ONCE:
            return backward(context, *cotangents)
        if not self.is_nested:
            with torch.no_grad():
                return backward.__wrapped__(context, *cotangents)
        # under no_grad the outer derivative would be zero, not refused
        found = backward.__wrapped__(context, *cotangents)
        gradients = found if isinstance(found, tuple) else (found,)
        return tuple(
            _Final.apply(g, self, MARKED_ONCE) if _is_tensor(g) else g
            for g in gradients
        )

    def jvp(self, ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        """The tangents of the results, by the user's jvp."""
        if self.is_nested and any(map(_moves, self.extras)):
            self.refuse(*INTERMEDIATE)
        given: list[Any] = [None] * self.count
        for number, tangent in zip(self.numbers, tangents, strict=True):
            if number is not None:
                given[number] = tangent
        found: Any = self.function.jvp(
            self._context(ctx, is_backward=False), *given
        )
        rows = zip(
            found if isinstance(found, tuple) else (found,), self.outs, strict=True
        )
        mine = [tangent for tangent, x in rows if isinstance(x, Place)]
        return (*mine, *[None] * len(self.extras))

    def result(self, results: Sequence[torch.Tensor]) -> Any:
        """The result as the forward returned it."""
        ends = [
            x.detach() if i in self.silent else x for i, x in enumerate(results)
        ]
        out = [ends[x.at] if isinstance(x, Place) else x for x in self.outs]
        return tuple(out) if self.is_tuple else out[0]

    def refuse(self, got: str, fix: str) -> NoReturn:
        """Refuse the call.

        Raises:
            CaptureError: always.
        """
        needed = "a pure forward, and a derivative of it"
        raise CaptureError.of(
            self.name, got, needed=needed, fix=fix, source=self.source
        )


class _Final(torch.autograd.Function):
    """The identity on a tensor of a derivative that may not be differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor, call: Call, reason: tuple[str, str]
    ) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.given = inputs[1:]

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        ctx.given[0].refuse(*ctx.given[1])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        ctx.given[0].refuse(*ctx.given[1])


def _line() -> str | None:
    """The user's line of the op that is replayed."""
    stack = torch.fx.traceback.get_current_meta().get("stack_trace")
    return sources.line_of(stack)


def _definition(function: Function) -> str | None:
    """The line of the forward."""
    code = getattr(function.forward, "__code__", None)
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _moves(x: torch.Tensor) -> bool:
    """Whether a tensor may have a gradient."""
    return x.is_floating_point() or x.is_complex()


def _needs_gradient(x: Any) -> bool:
    """Whether a gradient goes back to an argument, at any level of torch.func."""
    return (
        torch.is_grad_enabled() and _is_tensor(x) and _compat.is_differentiated(x)
    )
