"""autograd.Functions whose forward takes the context, in the form that torch.func takes.

Such a forward saves whatever it computes. Here it runs on a context that records, and the
tensors that it saves are further results.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from ... import _compat, _tree
from ...errors import CaptureError, source_at
from .. import annotations as sources
from ..refusals import leaked_values
from .autograd_function_code import is_of_ranks
from .autograd_function_records import (
    Context,
    ForwardRecord,
    TensorPlace,
    is_tensor,
    may_have_gradient,
)

Base = torch.autograd.Function
Function = type[torch.autograd.Function]
# reasons to refuse a call: the problem, and the suggestion
WRITES = ("the forward writes in place to an argument", "write a forward that returns a new tensor")
INTERMEDIATE = (
    "the second derivative needs a value of the forward that is neither an argument nor a result",
    "compute the value in the backward from its arguments; or return the value as an extra "
    "result of the forward",
)
TANGENT = (  # torch, later than 2.15
    "the jvp is differentiated in forward mode, and torch drops that second derivative",
    "differentiate forward over reverse: sf.hessian, or sf.jvp of sf.grad; or use sf.custom_jvp",
)
MARKED_ONCE = (
    "the backward is marked once_differentiable, but is differentiated",
    "remove the mark once_differentiable from the backward",
)
TAKES_GRADIENTS = (
    "the backward takes a gradient by requires_grad_ and torch.autograd.grad, and is itself "
    "differentiated",
    "in the backward use torch.func.vjp(f, x)[1](g)[0] in place of torch.autograd.grad(f(x), x, g)",
)
ONCE = torch.autograd.function.once_differentiable(len).__code__


def apply_function(call: Callable[..., Any], function: Function, *args: Any, **kwargs: Any) -> Any:
    """Call an autograd.Function under torch.func. The constants that its code reads are in the key
    of the capture.

    Args:
        call: torch's call of a Function whose forward does not take the context.
        function: the class.
        args: of the call. Tensors among them, not those inside of containers, have gradients.
        kwargs: of the call, in the order of the forward's parameters.

    Raises:
        CaptureError: the forward writes to its arguments. When it is differentiated twice: the
            derivative uses a value of the forward that is neither an argument nor a result. It
            communicates, or asks for its rank.
    """
    if is_of_ranks(function):
        raise CaptureError.of(
            _name(function),
            "the Function communicates or reads its rank inside a functionalized module, "
            "whose code shardfn does not trace",
            needed="code that shardfn traces",
            fix="torch.func.functional_call(module, params, args) in place of functionalize",
            source=_replayed_line() or _definition(function),
        )
    is_users = not (function.__module__ or "").startswith("shardfn.")
    has_jvp = function.jvp is not torch.autograd.Function.jvp
    if is_users and has_jvp and _compat.followed([*args, *kwargs.values()]).count("jvp") > 1:
        got, fix = TANGENT
        source = _replayed_line() or _definition(function)
        raise CaptureError.of(_name(function), got, fix=fix, source=source)
    for fn in (function.forward, function.backward, function.jvp):
        leaked_values.watch(_name(function), inspect.unwrap(fn), is_pure=is_users)
    leaked_values.note_methods(function)
    if not _compat.takes_context(function):
        return call(_run_in_capture(function), *args, **kwargs)
    if kwargs:
        bound = inspect.signature(function.forward).bind(None, *args, **kwargs)
        args = bound.args[1:]
    recorded = RecordedCall(function, args)
    results = recorded.differentiable().apply(*recorded.tensors)
    return recorded.record.result(results)


class RecordedCall:
    """One call of an autograd.Function whose forward takes the context.

    Args:
        function: the class.
        args: of the call.
    """

    record: ForwardRecord  # of its forward, which runs first

    def __init__(self, function: Function, args: tuple[Any, ...]) -> None:
        self.function = function
        self.args = args
        self.leaves, self.treedef = _tree.flatten(args)
        self.tensors = list(filter(is_tensor, self.leaves))
        self.numbers = _numbers(args)
        self.needs = tuple(map(_needs_gradient, args))
        self.source = _replayed_line() or _definition(function)
        self.has_jvp = function.jvp is not torch.autograd.Function.jvp
        self.is_nested = _compat.derivative_levels() > 1

    def differentiable(self) -> Function:
        """An autograd.Function for this call alone, whose forward takes tensors only."""

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
        """Run the forward. Returns the results that are tensors, and the other tensors that it
        saved.
        """
        context = Context()
        context.needs_input_grad = self.needs
        feed = iter(tensors)
        args = list(self.leaves)
        for i, x in enumerate(args):
            if is_tensor(x):
                args[i] = next(feed)
        before = _versions(tensors)
        arguments = _tree.unflatten(self.treedef, args)
        with _python_shown():
            out: Any = self.function.forward(context, *arguments)
        is_written = _versions(tensors) != before
        if is_written or context.dirty_tensors:
            self.refuse(*WRITES)
        results = _as_tuple(out)
        self._refuse_containers(results)
        self.record = ForwardRecord.of(context, tensors, out)
        return *filter(is_tensor, results), *self.record.extras

    def _refuse_containers(self, results: Sequence[Any]) -> None:
        """Refuse tensors inside of a result, which torch gives no gradients."""
        for x in results:
            if is_tensor(x):
                continue
            leaves = _tree.leaves(x)
            if any(map(is_tensor, leaves)):
                self.refuse(
                    f"the forward returns a {type(x).__name__} of tensors",
                    "return a tuple of tensors from the forward",
                )

    def save(self, ctx: Any, inputs: Sequence[Any], results: Sequence[Any]) -> None:
        """Save the tensors in torch's context, at one level of torch.func."""
        record = self.record
        values = [place.value(inputs, results) for place in record.places]
        ctx.save_for_backward(*values)
        if self.has_jvp:
            ctx.save_for_forward(*values)
        ctx.set_materialize_grads(record.materializes)
        constant = [x for x in results if not may_have_gradient(x)]
        silent = [results[i] for i in record.silent]
        ctx.mark_non_differentiable(*constant, *silent)

    def _context(self, ctx: Any) -> tuple[Context, Any, Any]:
        """The context that the user's backward or jvp takes, from torch's, and the tensors that
        were saved for each.
        """
        values: dict[TensorPlace, torch.Tensor] = {}
        for place, x in zip(self.record.places, ctx.saved_tensors, strict=True):
            values[place] = self._guarded(place, x)
        backward, forward, attributes = self.record.filled(values)
        context = Context()
        vars(context).update(attributes)
        needs = [False] * len(self.args)
        for number, need in zip(self.numbers, ctx.needs_input_grad, strict=True):
            if number is not None:
                needs[number] = need
        context.needs_input_grad = tuple(needs)
        return context, backward, forward

    def _guarded(self, place: TensorPlace, x: torch.Tensor) -> torch.Tensor:
        """A saved tensor; one that is neither an input nor a result has no derivative."""
        if self.is_nested and self.record.is_extra(place) and may_have_gradient(x):
            return NotDifferentiableAgain.apply(x, self, INTERMEDIATE)
        return x

    def backward(self, ctx: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        """The gradients of the tensors, by the user's backward."""
        of_results: list[Any] = []
        for x in self.record.outs:
            is_end = isinstance(x, TensorPlace)
            of_results.append(cotangents[x.at] if is_end else None)
        context, context.saved_tensors, _ = self._context(ctx)
        with _gradients_inside(self.function), _python_shown():
            gradients = self._gradients(context, of_results)
        count = len(self.args)
        is_more = any(g is not None for g in gradients[count:])
        if len(gradients) < count or is_more:
            self.refuse(
                f"the backward returns {len(gradients)} gradients for {count} arguments",
                "return a gradient or None for each argument of the forward",
            )
        of_tensors: list[Any] = []
        for number in self.numbers:
            of_tensors.append(None if number is None else gradients[number])
        return tuple(of_tensors)

    def _gradients(self, context: Context, cotangents: list[Any]) -> tuple[Any, ...]:
        """The results of the user's backward, which may be differentiable once only."""
        backward: Any = self.function.backward
        if getattr(backward, "__code__", None) is not ONCE:
            return _as_tuple(backward(context, *cotangents))
        if not self.is_nested:
            with torch.no_grad():
                return _as_tuple(backward.__wrapped__(context, *cotangents))
        # under no_grad the outer derivative would be zero, not refused
        results = backward.__wrapped__(context, *cotangents)
        gradients = list(_as_tuple(results))
        for i, g in enumerate(gradients):
            if is_tensor(g):
                gradients[i] = NotDifferentiableAgain.apply(g, self, MARKED_ONCE)
        return tuple(gradients)

    def jvp(self, ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        """The tangents of the results, by the user's jvp."""
        extras = self.record.extras
        if self.is_nested and any(map(may_have_gradient, extras)):
            self.refuse(*INTERMEDIATE)
        of_arguments: list[Any] = [None] * len(self.args)
        for number, tangent in zip(self.numbers, tangents, strict=True):
            if number is not None:
                of_arguments[number] = tangent
        context, _, context.saved_tensors = self._context(ctx)
        with _python_shown():
            results = _as_tuple(self.function.jvp(context, *of_arguments))
        of_outs: list[Any] = []
        for tangent, x in zip(results, self.record.outs, strict=True):
            if isinstance(x, TensorPlace):
                of_outs.append(tangent)
        none = [None] * len(extras)
        return *of_outs, *none

    def refuse(self, got: str, fix: str) -> NoReturn:
        """Refuse this call of an autograd.Function.

        Raises:
            CaptureError: always.
        """
        _refuse(self.function, got, fix, self.source)


class NotDifferentiableAgain(torch.autograd.Function):
    """The identity on a tensor of a derivative, whose own derivative is refused."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, call: RecordedCall, reason: tuple[str, str]) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.given = inputs[1:]

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        call, reason = ctx.given
        call.refuse(*reason)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        call, reason = ctx.given
        call.refuse(*reason)


def _refuse(function: Function, got: str, fix: str, source: str | None) -> NoReturn:
    raise CaptureError.of(
        _name(function), got, needed="a pure forward with a derivative", fix=fix, source=source
    )


def _run_in_capture(function: Function) -> Function:
    """An autograd.Function with `setup_context`, whose methods run as in a capture. Its backward
    may take gradients itself.
    """
    methods = "forward", "setup_context", "backward", "jvp", "vmap"
    own = [name for name in methods if getattr(function, name) is not getattr(Base, name)]
    members: dict[str, Any] = {"__module__": function.__module__}
    for name in own:
        members[name] = staticmethod(_method_run(function, name))
    return type(function.__name__, (function,), members)


def _method_run(function: Function, name: str) -> Callable[..., Any]:
    """A method of an autograd.Function, run as in a capture."""
    method = getattr(function, name)

    @functools.wraps(method)
    def run(*args: Any) -> Any:
        inside = _gradients_inside(function) if name == "backward" else contextlib.nullcontext()
        with inside, _python_shown():
            return method(*args)

    return run


@contextlib.contextmanager
def _python_shown() -> Iterator[None]:
    """Turn print and its like, in a method that runs, into ops that show values."""
    with _compat.reading(), _compat.patched("functions"):
        yield


@contextlib.contextmanager
def _gradients_inside(function: Function) -> Iterator[None]:
    """Let the backward of a Function call requires_grad_, and take gradients of what it computes
    from there. They are constants for the derivatives around, so those are refused.
    """
    is_allowed = _compat.derivative_levels() <= 1
    try:
        with _compat.requires_grad_allowed() if is_allowed else contextlib.nullcontext():
            yield
    except RuntimeError as error:
        if is_allowed or _compat.REQUIRES_GRAD not in str(error):
            raise
        _refuse(function, *TAKES_GRADIENTS, _definition(function))


def _name(function: Function) -> str:
    """The name of a Function in errors."""
    return f"autograd.Function {function.__name__}"


def _numbers(args: tuple[Any, ...]) -> list[int | None]:
    """For each tensor in the arguments of a call, the number of the argument that it is. None
    inside of a container.
    """
    numbers: list[int | None] = []
    for number, arg in enumerate(args):
        inside = filter(is_tensor, _tree.leaves(arg))
        numbers += [number if x is arg else None for x in inside]
    return numbers


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The number of in-place writes to each tensor so far."""
    return list(map(_compat.version_of, tensors))


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def _replayed_line() -> str | None:
    """The user's line of the op that is replayed."""
    stack = torch.fx.traceback.get_current_meta().get("stack_trace")
    return sources.line_of(stack)


def _definition(function: Function) -> str | None:
    """The line of the forward."""
    code = getattr(function.forward, "__code__", None)
    if code is None:
        return None
    return source_at(code.co_filename, code.co_firstlineno)


def _needs_gradient(x: Any) -> bool:
    """Whether a gradient goes back to an argument, at any level of torch.func."""
    if not is_tensor(x) or not torch.is_grad_enabled():
        return False
    return _compat.is_differentiated(x)
