"""The common base of custom_vjp and custom_jvp: functions with derivatives of their own.

Dynamo reads this.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import attrs
import torch

from ... import _compat, _tree
from ...argnums import all_parameters, positions, signature_of
from ...capture import aten_trace
from ...capture.control_flow import bodies
from ...errors import ShardError, TreeError, problem
from .._paired import zero_like
from .._transformed import Transformed


@attrs.define(eq=False, repr=False, slots=False)
class Custom(Transformed):
    """A function with a derivative of its own."""

    verb: ClassVar[str] = "custom_vjp"
    needs: ClassVar[str]  # the call that sets the rule, for errors
    held: tuple[Callable[..., Any]]
    nondiff_argnums: tuple[int, ...]
    rules: list[Callable[..., Any]]
    names: tuple[str, ...]  # of the parameters that have a position
    defaults: tuple[Any, ...]  # of the last ones

    def options(self) -> Any:
        return self.nondiff_argnums, tuple(self.rules)

    def inline(self, *args: Any, **kwargs: Any) -> Any:
        check_rules(self.__name__, len(self.rules), self.needs)
        args = self.by_position(args, kwargs)
        still, moving = self.split(args)
        if not _compat.is_in_dynamo():
            if torch.compiler.is_dynamo_compiling():
                refuse_compiled(self.__name__)
            return self.eagerly(still, moving)
        if not aten_trace.begin_rule(id(self)):
            return self.fn(*args)
        out = self.traced(still, moving)
        aten_trace.end_rule()
        return out

    def ruled(self, rules: list[Callable[..., Any]]) -> None:
        """Set the rule. It can be set once, since captured programs hold it.

        Raises:
            ShardError: there is a rule already.
        """
        check_unruled(self.__name__, self.verb, len(self.rules))
        self.rules[:] = rules

    def traced(self, still: tuple[Any, ...], moving: tuple[Any, ...]) -> Any:
        """The result, while Dynamo traces."""
        raise NotImplementedError

    def eagerly(self, still: tuple[Any, ...], moving: tuple[Any, ...]) -> Any:
        """The result of a call that Dynamo does not trace: under a torch.func transform, or in
        a module that it leaves as one call.
        """
        raise NotImplementedError

    def by_position(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """All arguments by position, as rules receive them: keywords and default values too."""
        first = len(self.names) - len(self.defaults)
        every = list(args)
        left = dict(kwargs)
        for n in range(len(args), len(self.names)):
            if self.names[n] in left:
                every.append(left.pop(self.names[n]))
            elif n >= first:
                every.append(self.defaults[n - first])
            else:
                break
        check_keywords(self.__name__, tuple(left), self.names)
        return tuple(every)

    def split(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """(arguments that are not differentiated, arguments that are)."""
        numbers = self.numbers(len(args))
        still = tuple([args[n] for n in numbers])
        return still, tuple([x for n, x in enumerate(args) if n not in numbers])

    def numbers(self, count: int) -> tuple[int, ...]:
        """The positions of the arguments that are not differentiated, given the number of
        arguments.
        """
        return positions(self.__name__, "nondiff_argnums", self.nondiff_argnums, count)

    def joined(self, still: tuple[Any, ...], moving: tuple[Any, ...]) -> list[Any]:
        """All arguments, in their order."""
        every: dict[int, Any] = dict(
            zip(self.numbers(len(still) + len(moving)), still, strict=True)
        )
        feed = iter(moving)
        return [every[n] if n in every else next(feed) for n in range(len(still) + len(moving))]

    def flat(
        self, still: tuple[Any, ...], moving: tuple[Any, ...]
    ) -> Callable[..., list[torch.Tensor]]:
        """The function itself as a function of the tensors of its differentiated arguments,
        returning the tensors of its result. For calls that Dynamo does not trace.
        """

        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            args = self.joined(still, _tree.with_tensors(moving, tensors))
            return _tree.tensors(self.fn(*args))

        return run

    def plain(self, still: tuple[Any, ...], moving: tuple[Any, ...], xs: list[torch.Tensor]) -> Any:
        """The function itself, as a body."""

        def run(*tensors: torch.Tensor) -> Any:
            out = self.fn(*self.joined(still, _tree.with_tensors(moving, tensors)))
            return _tree.with_tensors(out, bodies.mark_results(_tree.tensors(out)))

        return bodies.run_body(run, xs)


def positional(fn: Callable[..., Any]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """(the names of the parameters of a function that have a position, the default values of the
    last ones). Dynamo cannot read the default values of a function that it has seen made.
    """
    if _compat.is_tracing():
        code = getattr(fn, "__code__", None)
        return () if code is None else code.co_varnames[: code.co_argcount], ()
    signature = signature_of(fn)
    if signature is None:
        return (), ()
    names, *_ = all_parameters(signature)
    defaults = [signature.parameters[name].default for name in names]
    return names, tuple(x for x in defaults if x is not inspect.Parameter.empty)


def cotangent_of(out: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The cotangent of a result: the given cotangents for its tensors, zeros for its constants."""
    feed = iter(tensors)
    leaves = _tree.quick_leaves((out,))
    filled = [next(feed) if isinstance(x, torch.Tensor) else zero_like(x) for x in leaves]
    return _tree.refill((out,), filled)[0]


@_compat.constant_in_graph
def refuse_compiled(name: str) -> None:
    """Refuse a call inside a function that the user compiles with torch.compile.

    Raises:
        ShardError: always.
    """
    raise ShardError.of(
        name,
        "the function has a derivative of its own, which torch.compile cannot trace",
        fix="sf.jit in place of torch.compile, or f = torch.compiler.disable(f) before the call",
    )


@_compat.constant_in_graph
def check_unruled(name: str, verb: str, count: int) -> None:
    """Check that a function has no rule yet.

    Raises:
        ShardError: it has one.
    """
    if count:
        fix = f"call {verb}(f) again with the other rule"
        raise ShardError.of(name, "the function already has a rule", fix=fix)


@_compat.constant_in_graph
def check_rules(name: str, count: int, call: str) -> None:
    """Check that a function has its rule.

    Raises:
        ShardError: it has none.
    """
    if not count:
        raise ShardError(
            problem(name, "it has no rule", fix=f"f.{call} before it is called"), fix=call
        )


@_compat.constant_in_graph
def check_keywords(name: str, left: tuple[str, ...], names: tuple[str, ...]) -> None:
    """Check that all keywords of a call are arguments that have a position.

    Raises:
        TreeError: some are not, or are arguments by position too.
    """
    if left:
        got = f"the keywords {', '.join(left)} are not among the arguments after those by position"
        raise TreeError.of(
            name,
            got,
            needed=f"arguments that a rule receives by position: {', '.join(names) or 'unnamed'}",
            fix="pass them by position, or close over them",
        )


@_compat.constant_in_graph
def check_pair(name: str, holds: bool, who: str, wanted: str) -> None:
    """Check the result of a rule.

    Raises:
        TreeError: it has another form.
    """
    if not holds:
        raise TreeError.of(name, f"{who} returns a result with another structure", needed=wanted)
