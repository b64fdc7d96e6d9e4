"""custom_vjp and custom_jvp: functions whose derivatives the user writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import attrs
import torch

from ... import _compat, _tree
from ...argnums import check_argnums, positions
from ...capture import trace
from ...capture.control_flow import bodies, endings
from ...capture.control_flow.custom_derivatives import Forward, Reverse, ruled
from ...errors import ShardError, TreeError, problem
from ...runtime import Request
from .._options import check_function
from .._paired import paired, zero_like
from .._transformed import Transformed, innermost, name_of


@attrs.define(eq=False, repr=False, slots=False)
class Custom(Transformed):
    """A function with a derivative of its own."""

    verb: ClassVar[str] = "custom_vjp"
    needs: ClassVar[str]  # what sets the rule
    held: tuple[Callable[..., Any]]
    nondiff_argnums: tuple[int, ...]
    rules: list[Callable[..., Any]]

    def asked(self) -> Request:
        return Request(self.__name__, self.inline, innermost(self.fn))

    def options(self) -> Any:
        return self.nondiff_argnums, tuple(self.rules)

    def inline(self, *args: Any) -> Any:
        check_rules(self.__name__, len(self.rules), self.needs)
        still, moving = self.split(args)
        if not _compat.is_in_dynamo():
            return self.eagerly(still, moving)
        if not trace.begin_rule(id(self)):
            return self.fn(*args)
        out = self.traced(still, moving)
        trace.end_rule()
        return out

    def ruled(self, rules: list[Callable[..., Any]]) -> None:
        """Set the rule, once: what was captured with it holds it.

        Raises:
            ShardError: there is one.
        """
        check_unruled(self.__name__, self.verb, len(self.rules))
        self.rules[:] = rules

    def traced(self, still: tuple[Any, ...], moving: tuple[Any, ...]) -> Any:
        """The result, where Dynamo reads."""
        raise NotImplementedError

    def eagerly(self, still: tuple[Any, ...], moving: tuple[Any, ...]) -> Any:
        """The result, where Dynamo does not read: under a torch.func transform, in a module
        that is kept whole.
        """
        raise NotImplementedError

    def split(
        self, args: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The arguments that are not differentiated, and the others."""
        numbers = self.numbers(len(args))
        still = tuple([args[n] for n in numbers])
        return still, tuple([x for n, x in enumerate(args) if n not in numbers])

    def numbers(self, count: int) -> tuple[int, ...]:
        """The positions of the arguments that are not differentiated, of so many."""
        return positions(
            self.__name__, "nondiff_argnums", self.nondiff_argnums, count
        )

    def joined(self, still: tuple[Any, ...], moving: tuple[Any, ...]) -> list[Any]:
        """All arguments, in their order."""
        every: dict[int, Any] = dict(
            zip(self.numbers(len(still) + len(moving)), still, strict=True)
        )
        feed = iter(moving)
        return [
            every[n] if n in every else next(feed)
            for n in range(len(still) + len(moving))
        ]

    def plain(
        self,
        still: tuple[Any, ...],
        moving: tuple[Any, ...],
        xs: list[torch.Tensor],
    ) -> Any:
        """The function itself, as a region."""

        def run(*tensors: torch.Tensor) -> Any:
            out = self.fn(*self.joined(still, _tree.with_tensors(moving, tensors)))
            return _tree.with_tensors(out, bodies.leave(_tree.tensors(out)))

        return bodies.region(run, xs)


@attrs.define(eq=False, repr=False, slots=False)
class CustomVjp(Custom):
    """A function with a rule for reverse mode."""

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Set the rule.

        Args:
            fwd: of the function's arguments; returns (result, residuals), residuals being any
                tree of tensors.
            bwd: (residuals, cotangent of the result) -> a tuple with a cotangent for each
                argument, a tree like it, or None for zero. The arguments of nondiff_argnums
                come before the residuals.

        Raises:
            ShardError: there is a rule already.
        """
        self.ruled([fwd, bwd])

    needs: ClassVar[str] = "defvjp(fwd, bwd)"

    def traced(self, still: tuple[Any, ...], moving: tuple[Any, ...]) -> Any:
        fwd, bwd = self.rules
        xs = _tree.tensors(moving)
        out = self.plain(still, moving, xs)
        results = _tree.tensors(out)

        def forward(*tensors: torch.Tensor) -> Any:
            found = fwd(*self.joined(still, _tree.with_tensors(moving, tensors)))
            after, residuals = self.forward_results(found, out)
            left = bodies.leave([*after, *_tree.tensors(residuals)])
            return left[: len(after)], _tree.with_tensors(
                residuals, left[len(after) :]
            )

        after, residuals = bodies.region(forward, xs)
        kept = _tree.tensors(residuals)

        def backward(*tensors: torch.Tensor) -> Any:
            cotangent = _cotangent(out, tensors[len(kept) :])
            back = bwd(
                *still,
                _tree.with_tensors(residuals, tensors[: len(kept)]),
                cotangent,
            )
            gradients = self.cotangents(back, moving)
            left = iter(bodies.leave([g for g in gradients if g is not None]))
            return [None if g is None else next(left) for g in gradients]

        back = bodies.region(backward, [*kept, *results])
        given = [g is not None for g in back]
        gradients = [g for g in back if g is not None]
        outs = endings.custom_vjp(
            self.__name__, results, [*after, *kept], gradients, xs, given
        )
        return _tree.with_tensors(out, outs)

    def forward_results(
        self, found: Any, out: Any
    ) -> tuple[list[torch.Tensor], Any]:
        """(the tensors of the result that fwd returns, in the order of the function's; the
        residuals).
        """
        is_pair = isinstance(found, tuple) and len(found) == 2
        check_pair(self.__name__, is_pair, "fwd", "(result, residuals)")
        names, paths = (
            ("the results of fwd", "those of the function"),
            ("result", "result"),
        )
        leaves = paired(
            self.__name__,
            found[0],
            out,
            names,
            paths,
            "return what the function returns",
        )
        return [x for x in leaves if isinstance(x, torch.Tensor)], found[1]

    def cotangents(
        self, back: Any, moving: tuple[Any, ...]
    ) -> list[torch.Tensor | None]:
        """What bwd returns for each tensor of the arguments; None for zero."""
        is_tuple = isinstance(back, tuple) and len(back) == len(moving)
        check_pair(
            self.__name__, is_tuple, "bwd", f"a tuple of {len(moving)} cotangents"
        )
        names, paths = (
            ("the cotangents of bwd", "the arguments"),
            ("cotangent", "args"),
        )
        fix = "return for each argument a tree like it, or None for zero"
        leaves = paired(self.__name__, back, moving, names, paths, fix, is_zero)
        pairs = zip(leaves, _tree.quick_leaves(moving), strict=True)
        tensors = [(g, x) for g, x in pairs if isinstance(x, torch.Tensor)]
        return [g if _tree.is_floating(x) else None for g, x in tensors]

    def eagerly(self, still: tuple[Any, ...], moving: tuple[Any, ...]) -> Any:
        fwd, bwd = self.rules
        xs, trees = _tree.tensors(moving), dict[str, Any]()
        out = self.fn(*self.joined(still, moving))
        count = len(_tree.tensors(out))

        def rule(*tensors: torch.Tensor) -> list[torch.Tensor]:
            found = fwd(*self.joined(still, _tree.with_tensors(moving, tensors)))
            after, trees["residuals"] = self.forward_results(found, out)
            return [*after, *_tree.tensors(trees["residuals"])]

        def back(*tensors: torch.Tensor) -> list[torch.Tensor]:
            n = len(tensors) - count
            residuals = _tree.with_tensors(trees["residuals"], tensors[:n])
            found = self.cotangents(
                bwd(*still, residuals, _cotangent(out, tensors[n:])), moving
            )
            return [
                torch.zeros_like(x) if g is None else g
                for g, x in zip(found, xs, strict=True)
            ]

        def fn(*tensors: torch.Tensor) -> list[torch.Tensor]:
            return _tree.tensors(
                self.fn(*self.joined(still, _tree.with_tensors(moving, tensors)))
            )

        made = Reverse(
            self.__name__, fn, len(xs), count, rule, back, (True,) * len(xs)
        )
        return _tree.with_tensors(out, ruled(made, xs))


def is_zero(x: Any) -> bool:
    """Whether a part of a tree of cotangents says zero."""
    return x is None


def _cotangent(out: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The cotangent of a result: these for its tensors, zeros for its constants."""
    feed = iter(tensors)
    leaves = _tree.quick_leaves((out,))
    filled = [
        next(feed) if isinstance(x, torch.Tensor) else zero_like(x) for x in leaves
    ]
    return _tree.refill((out,), iter(filled))[0]


@attrs.define(eq=False, repr=False, slots=False)
class CustomJvp(Custom):
    """A function with a rule for forward mode, which reverse mode transposes."""

    verb: ClassVar[str] = "custom_jvp"

    def defjvp(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Set the rule; a decorator too.

        Args:
            rule: (primals, tangents), two tuples like the arguments -> (result, tangent of the
                result), linear in the tangents. The arguments of nondiff_argnums come before
                the primals.

        Returns:
            The rule.

        Raises:
            ShardError: there is a rule already.
        """
        self.ruled([rule])
        return rule

    needs: ClassVar[str] = "defjvp(rule)"

    def traced(self, still: tuple[Any, ...], moving: tuple[Any, ...]) -> Any:
        (rule,) = self.rules
        xs = _tree.tensors(moving)
        out = self.plain(still, moving, xs)

        def pushed(*tensors: torch.Tensor) -> Any:
            primals = _tree.with_tensors(moving, tensors[: len(xs)])
            tangents = _cotangent(moving, tensors[len(xs) :])
            return bodies.leave(self.pushed(rule(*still, primals, tangents), out))

        both = bodies.region(pushed, [*xs, *xs])
        outs = endings.custom_jvp(self.__name__, _tree.tensors(out), list(both), xs)
        return _tree.with_tensors(out, outs)

    def pushed(self, found: Any, out: Any) -> list[torch.Tensor]:
        """What the rule returns, in the order of the function's result: its tensors, then their
        tangents.
        """
        is_pair = isinstance(found, tuple) and len(found) == 2
        check_pair(
            self.__name__, is_pair, "the rule", "(result, tangent of the result)"
        )
        theirs, paths = "those of the function", ("result", "result")
        after = paired(
            self.__name__, found[0], out, ("the results of the rule", theirs), paths
        )
        names, paths = (
            ("the tangents of the rule", "the results"),
            ("tangent", "result"),
        )
        dots = paired(self.__name__, found[1], out, names, paths)
        rows = zip(after, dots, strict=True)
        tensors = [(x, t) for x, t in rows if isinstance(x, torch.Tensor)]
        tangents = [torch.zeros_like(x) if t is None else t for x, t in tensors]
        return [*[x for x, _ in tensors], *tangents]

    def eagerly(self, still: tuple[Any, ...], moving: tuple[Any, ...]) -> Any:
        (rule,) = self.rules
        xs = _tree.tensors(moving)
        out = self.fn(*self.joined(still, moving))

        def plain(*tensors: torch.Tensor) -> list[torch.Tensor]:
            return _tree.tensors(
                self.fn(*self.joined(still, _tree.with_tensors(moving, tensors)))
            )

        def push(*tensors: torch.Tensor) -> list[torch.Tensor]:
            primals = _tree.with_tensors(moving, tensors[: len(xs)])
            tangents = _cotangent(moving, tensors[len(xs) :])
            return self.pushed(rule(*still, primals, tangents), out)

        made = Forward(self.__name__, plain, len(xs), len(_tree.tensors(out)), push)
        return _tree.with_tensors(out, ruled(made, xs))


@_compat.constant_in_graph
def check_unruled(name: str, verb: str, count: int) -> None:
    """Check that a function has no rule yet.

    Raises:
        ShardError: it has one.
    """
    if count:
        fix = f"{verb}(f) once more, with the other rule"
        raise ShardError(problem(name, "it has a rule already", fix=fix), fix=fix)


@_compat.constant_in_graph
def check_rules(name: str, count: int, call: str) -> None:
    """Check that a function has its rule.

    Raises:
        ShardError: it has none.
    """
    if not count:
        raise ShardError(
            problem(name, "it has no rule", fix=f"f.{call} before it is called"),
            fix=call,
        )


@_compat.constant_in_graph
def check_pair(name: str, holds: bool, who: str, wanted: str) -> None:
    """Check what a rule returns.

    Raises:
        TreeError: something else.
    """
    if not holds:
        raise TreeError(
            problem(name, f"{who} returns something else", needed=wanted)
        )


def custom_vjp(
    fn: Callable[..., Any], nondiff_argnums: int | tuple[int, ...] = ()
) -> CustomVjp:
    """Give a function your own reverse-mode derivative, set with `.defvjp(fwd, bwd)`.

    Args:
        fn: of trees of tensors; it may not close over values that are differentiated.
        nondiff_argnums: positional arguments other than tensors; the rule gets them first.

    Returns:
        The function, with `defvjp`. It runs as it is where nothing is differentiated.

    Raises:
        ShardError: when called without a rule.
        TreeError: when called, a rule whose results do not fit the function's.
        CaptureError: forward mode, for which there is no rule; a closed-over value that is
            differentiated.

    Source: jax.custom_vjp.

    Example:
        >>> import torch, shardfn as sf
        >>> flat = sf.custom_vjp(lambda x: x**2)
        >>> flat.defvjp(lambda x: (x**2, x), lambda x, g: (g * x.clamp(-1, 1),))
        >>> sf.grad(flat)(torch.tensor(2.0))
        tensor(1.)
    """
    check_function("custom_vjp", fn)
    numbers = check_argnums(
        f"custom_vjp({name_of(fn)})", "nondiff_argnums", nondiff_argnums
    )
    return CustomVjp((fn,), numbers, [])


def custom_jvp(
    fn: Callable[..., Any], nondiff_argnums: int | tuple[int, ...] = ()
) -> CustomJvp:
    """Give a function your own derivative, set with `.defjvp(rule)`. Reverse mode transposes it.

    Args:
        fn: of trees of tensors; it may not close over values that are differentiated.
        nondiff_argnums: positional arguments other than tensors; the rule gets them first.

    Returns:
        The function, with a method `defjvp`.

    Raises:
        ShardError: when called without a rule.
        TreeError: when called, a rule whose results do not fit the function's.
        CaptureError: a closed-over value that is differentiated.

    Source: jax.custom_jvp.

    Example:
        >>> import torch, shardfn as sf
        >>> step = sf.custom_jvp(lambda x: (x > 0).to(x.dtype))
        >>> rule = step.defjvp(
        ...     lambda primals, tangents: (
        ...         (primals[0] > 0).float(),
        ...         tangents[0] * 0.5,
        ...     )
        ... )
        >>> sf.grad(step)(torch.tensor(2.0))
        tensor(0.5000)
    """
    check_function("custom_jvp", fn)
    numbers = check_argnums(
        f"custom_jvp({name_of(fn)})", "nondiff_argnums", nondiff_argnums
    )
    return CustomJvp((fn,), numbers, [])
