"""custom_vjp and custom_jvp: functions whose derivatives the user writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import torch

from .. import _compat, _tree
from ..capture import endings, recording, regions
from ..capture.custom_rules import Forward, Reverse, ruled
from ..errors import ShardError, TreeError, problem
from ..runtime import Request
from ._transformed import Transformed, innermost


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
        if not recording.begin_rule(id(self)):
            return self.fn(*args)
        out = self.traced(still, moving)
        recording.end_rule()
        return out

    def ruled(self, rules: list[Callable[..., Any]]) -> None:
        """Set the rule, once: what was captured with it holds it.

        Raises:
            ShardError: there is one.
        """
        if self.rules:
            fix = f"{self.verb}(f) anew, with the other rule"
            raise ShardError(problem(self.__name__, "it has a rule already", fix=fix), fix=fix)
        self.rules[:] = rules

    def traced(self, still: tuple[Any, ...], moving: tuple[Any, ...]) -> Any:
        """The result, where Dynamo reads."""
        raise NotImplementedError

    def eagerly(self, still: tuple[Any, ...], moving: tuple[Any, ...]) -> Any:
        """The result, where Dynamo does not read: under a torch.func transform, in a module that is kept whole."""
        raise NotImplementedError

    def split(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The arguments that are not differentiated, and the others."""
        still = tuple([args[n] for n in self.nondiff_argnums])
        return still, tuple([x for n, x in enumerate(args) if n not in self.nondiff_argnums])

    def joined(self, still: tuple[Any, ...], moving: tuple[Any, ...]) -> list[Any]:
        """All arguments, in their order."""
        feeds = iter(still), iter(moving)
        return [next(feeds[0]) if n in self.nondiff_argnums else next(feeds[1]) for n in range(len(still) + len(moving))]

    def plain(self, still: tuple[Any, ...], moving: tuple[Any, ...], xs: list[torch.Tensor]) -> Any:
        """The function itself, as a region."""

        def run(*tensors: torch.Tensor) -> Any:
            out = self.fn(*self.joined(still, _with(moving, tensors)))
            return _with((out,), regions.leave(_tensors((out,))))[0]

        return regions.region(run, xs)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in _tree.quick_leaves(tree) if isinstance(x, torch.Tensor)]


def _with(tree: Any, tensors: Any) -> Any:
    """A tree with these tensors in the places of its own."""
    feed = iter(tensors)
    return _tree.refill(tree, iter([next(feed) if isinstance(x, torch.Tensor) else x for x in _tree.quick_leaves(tree)]))


@attrs.define(eq=False, repr=False, slots=False)
class CustomVjp(Custom):
    """A function with a rule for reverse mode."""

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Set the rule.

        Args:
            fwd: of the function's arguments; returns (result, residuals), residuals being any tree of tensors.
            bwd: (residuals, cotangent of the result) -> a tuple with a cotangent for each argument, a tree like it, or None for
                zero. The arguments of nondiff_argnums come before the residuals.

        Raises:
            ShardError: there is a rule already.
        """
        self.ruled([fwd, bwd])

    needs: ClassVar[str] = "defvjp(fwd, bwd)"

    def traced(self, still: tuple[Any, ...], moving: tuple[Any, ...]) -> Any:
        fwd, bwd = self.rules
        xs = _tensors(moving)
        out = self.plain(still, moving, xs)

        def forward(*tensors: torch.Tensor) -> Any:
            found = fwd(*self.joined(still, _with(moving, tensors)))
            check_pair(self.__name__, isinstance(found, tuple) and len(found) == 2, "fwd", "(result, residuals)")
            return _with(found, regions.leave(_tensors(found)))

        after, residuals = regions.region(forward, xs)
        check_like(self.__name__, "the result of fwd", _kinds((after,)), "that of the function", _kinds((out,)))
        kept, results = _tensors((residuals,)), _tensors((out,))

        def backward(*tensors: torch.Tensor) -> Any:
            back = bwd(*still, _with((residuals,), tensors[: len(kept)])[0], _with((out,), tensors[len(kept) :])[0])
            check_pair(self.__name__, isinstance(back, tuple) and len(back) == len(moving), "bwd", f"a tuple of {len(moving)} cotangents")
            return _with(back, regions.leave(_tensors(back)))

        back = regions.region(backward, [*kept, *results])
        for k, (g, x) in enumerate(zip(back, moving, strict=True)):
            if g is not None:
                check_like(self.__name__, f"cotangent {k} of bwd", _kinds((g,)), "the argument", _kinds((x,)))
        given = [g is not None for g, x in zip(back, moving, strict=True) for _ in _tensors((x,))]
        outs = endings.custom_vjp(self.__name__, results, [*_tensors((after,)), *kept], _tensors(back), xs, given)
        return _with((out,), outs)[0]


    def eagerly(self, still: tuple[Any, ...], moving: tuple[Any, ...]) -> Any:
        fwd, bwd = self.rules
        xs, trees = _tensors(moving), dict[str, Any]()

        def rule(*tensors: torch.Tensor) -> list[torch.Tensor]:
            trees["out"], trees["residuals"] = fwd(*self.joined(still, _with(moving, tensors)))
            return [*_tensors((trees["out"],)), *_tensors((trees["residuals"],))]

        def back(*tensors: torch.Tensor) -> list[torch.Tensor]:
            n = len(tensors) - len(_tensors((trees["out"],)))
            found = bwd(*still, _with((trees["residuals"],), tensors[:n])[0], _with((trees["out"],), tensors[n:])[0])
            pairs = zip(found, moving, strict=True)
            filled = [_with((x,), [torch.zeros_like(t) for t in _tensors((x,))])[0] if g is None else g for g, x in pairs]
            return _tensors(tuple(filled))

        out = self.fn(*self.joined(still, moving))
        fn = lambda *ts: _tensors((self.fn(*self.joined(still, _with(moving, ts))),))  # noqa: E731
        count, given = len(_tensors((out,))), (True,) * len(xs)
        made = Reverse(self.__name__, fn, len(xs), count, rule, back, given)
        return _with((out,), ruled(made, xs))[0]


@attrs.define(eq=False, repr=False, slots=False)
class CustomJvp(Custom):
    """A function with a rule for forward mode, which reverse mode transposes."""

    verb: ClassVar[str] = "custom_jvp"

    def defjvp(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Set the rule; a decorator too.

        Args:
            rule: (primals, tangents), two tuples like the arguments -> (result, tangent of the result), linear in the tangents. The
                arguments of nondiff_argnums come before the primals.

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
        xs = _tensors(moving)
        out = self.plain(still, moving, xs)

        def pushed(*tensors: torch.Tensor) -> Any:
            found = rule(*still, _with(moving, tensors[: len(xs)]), _with(moving, tensors[len(xs) :]))
            check_pair(self.__name__, isinstance(found, tuple) and len(found) == 2, "the rule", "(result, tangent of the result)")
            check_like(self.__name__, "the tangent", _kinds((found[1],)), "the result", _kinds((found[0],)))
            name, value, wanted = self.__name__, _kinds((found[0],)), _kinds((out,))
            check_like(name, "the result of the rule", value, "that of the function", wanted)
            return regions.leave(_tensors(found))

        both = regions.region(pushed, [*xs, *xs])
        return _with((out,), endings.custom_jvp(self.__name__, _tensors((out,)), list(both), xs))[0]


    def eagerly(self, still: tuple[Any, ...], moving: tuple[Any, ...]) -> Any:
        (rule,) = self.rules
        xs = _tensors(moving)
        plain = lambda *ts: _tensors((self.fn(*self.joined(still, _with(moving, ts))),))  # noqa: E731

        def push(*ts: torch.Tensor) -> list[torch.Tensor]:
            primals, tangents = _with(moving, ts[: len(xs)]), _with(moving, ts[len(xs) :])
            return _tensors(rule(*still, primals, tangents))

        out = self.fn(*self.joined(still, moving))
        made = Forward(self.__name__, plain, len(xs), len(_tensors((out,))), push)
        return _with((out,), ruled(made, xs))[0]


def _kinds(tree: Any) -> tuple[Any, ...]:
    return tuple([(tuple(x.shape), x.dtype) for x in _tensors(tree)])


@_compat.constant_in_graph
def check_rules(name: str, count: int, call: str) -> None:
    """Check that a function has its rule.

    Raises:
        ShardError: it has none.
    """
    if not count:
        raise ShardError(problem(name, "it has no rule", fix=f"f.{call} before it is called"), fix=call)


@_compat.constant_in_graph
def check_pair(name: str, holds: bool, who: str, wanted: str) -> None:
    """Check what a rule returns.

    Raises:
        TreeError: something else.
    """
    if not holds:
        raise TreeError(problem(name, f"{who} returns something else", needed=wanted))


@_compat.constant_in_graph
def check_like(name: str, what: str, got: tuple[Any, ...], like: str, wanted: tuple[Any, ...]) -> None:
    """Check that two trees hold tensors of the same shapes and dtypes.

    Raises:
        TreeError: they do not.
    """
    if got != wanted:
        said = lambda kinds: ", ".join(f"{shape} {dtype}" for shape, dtype in kinds) or "nothing"  # noqa: E731
        raise TreeError(problem(name, f"{what} holds {said(got)}", needed=f"as {like}: {said(wanted)}"))


def custom_vjp(fn: Callable[..., Any], nondiff_argnums: int | tuple[int, ...] = ()) -> CustomVjp:
    """A function whose reverse-mode derivative is a rule of yours, set with `.defvjp(fwd, bwd)`.

    Args:
        fn: of trees of tensors; it may not close over values that are differentiated.
        nondiff_argnums: positional arguments that are no tensors, given to the rule first.

    Returns:
        The function, with `defvjp`. It runs as it is where nothing is differentiated.

    Raises:
        ShardError: when called without a rule.
        TreeError: when called, a rule whose results do not fit the function's.
        CaptureError: forward mode, for which there is no rule; a closed-over value that is differentiated.

    Source: jax.custom_vjp.

    Example:
        >>> import torch, shardfn as sf
        >>> flat = sf.custom_vjp(lambda x: x**2)
        >>> flat.defvjp(lambda x: (x**2, x), lambda x, g: (g * x.clamp(-1, 1),))
        >>> sf.grad(flat)(torch.tensor(2.0))
        tensor(1.)
    """
    return CustomVjp((fn,), (nondiff_argnums,) if isinstance(nondiff_argnums, int) else tuple(nondiff_argnums), [])


def custom_jvp(fn: Callable[..., Any], nondiff_argnums: int | tuple[int, ...] = ()) -> CustomJvp:
    """A function whose derivative is a rule of yours, set with `.defjvp(rule)`; reverse mode transposes it.

    Args:
        fn: of trees of tensors; it may not close over values that are differentiated.
        nondiff_argnums: positional arguments that are no tensors, given to the rule first.

    Returns:
        The function, with `defjvp`.

    Raises:
        ShardError: when called without a rule.
        TreeError: when called, a rule whose results do not fit the function's.
        CaptureError: a closed-over value that is differentiated.

    Source: jax.custom_jvp.

    Example:
        >>> import torch, shardfn as sf
        >>> step = sf.custom_jvp(lambda x: (x > 0).to(x.dtype))
        >>> rule = step.defjvp(lambda primals, tangents: ((primals[0] > 0).float(), tangents[0] * 0.5))
        >>> sf.grad(step)(torch.tensor(2.0))
        tensor(0.5000)
    """
    return CustomJvp((fn,), (nondiff_argnums,) if isinstance(nondiff_argnums, int) else tuple(nondiff_argnums), [])
