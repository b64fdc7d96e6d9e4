"""Functions with user-defined derivatives: custom_vjp and custom_jvp, under every transform.

As in JAX, the innermost transform that differentiates a function uses its rule. Outer
transforms differentiate the code of the rule like any other code. If that code calls the
function, its rule applies there too.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from ... import _compat
from ...errors import CaptureError
from .bodies import BodyResult
from .flat_tensors import Body, is_float, vmapped_body

Tensors = Sequence[torch.Tensor]


@attrs.frozen(eq=False)
class Rule:
    """A function with a derivative rule of the user, over flat tensors: arguments, then closed-over
    values.

    Args:
        name: of the function.
        fn: the function: tensors -> results.
        count: the number of arguments.
        results: the number of results.
    """

    name: str
    fn: Body
    count: int
    results: int

    def pulled(self, level: _compat.Level, tensors: Tensors) -> list[torch.Tensor]:
        """The results under reverse mode at this level, with the backward that the rule gives."""
        raise NotImplementedError

    def pushed(
        self, level: _compat.Level, tensors: Tensors, tangents: list[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """The results under forward mode at this level, with the tangents that the rule gives."""
        raise NotImplementedError

    def mapped(self, dims: tuple[int | None, ...], size: int) -> Rule:
        """The rule under vmap, with the batch dim first in every result."""
        raise NotImplementedError


def apply_rule(rule: Rule, tensors: Tensors) -> list[torch.Tensor]:
    """Call a function with a derivative rule under all active transforms of torch.func."""
    level = _compat.Level()
    if level.kind == "vmap":
        below, dims, size = level.batched(tensors)
        with level.lowered():
            if all(d is None for d in dims):
                return apply_rule(rule, below)
            outs = apply_rule(rule.mapped(dims, size), below)
        return [level.sample(x) for x in outs]
    _refuse_closed_over(rule, level, tensors[rule.count :])
    if any(level.moves(x) for x in tensors[: rule.count]):
        return _apply_differentiated(rule, level, tensors)
    if level.kind is None:
        return list(rule.fn(*tensors))
    with level.lowered():
        outs = apply_rule(rule, [level.below(x) for x in tensors])
    if level.kind == "jvp" and any(level.tangent(x) is not None for x in tensors[: rule.count]):
        return [level.dual(x, torch.zeros_like(x)) if is_float(x) else x for x in outs]
    return outs


def _apply_differentiated(rule: Rule, level: _compat.Level, tensors: Tensors) -> list[torch.Tensor]:
    """Call a function with a derivative rule at a level that differentiates with respect to some
    argument.
    """
    if level.kind is None:
        return rule.pulled(level, tensors)
    below = [level.below(x) for x in tensors]
    if level.kind == "jvp":
        return rule.pushed(level, below, [level.tangent(x) for x in tensors[: rule.count]])
    return rule.pulled(level, tensors)


def _refuse_closed_over(rule: Rule, level: _compat.Level, free: Tensors) -> None:
    """Refuse closed-over values that are differentiated: the rule has no gradient for them."""
    if any(level.moves(x) for x in free):
        raise CaptureError.of(
            rule.name,
            "the function closes over a value that is differentiated",
            fix="pass the value as an argument, and give its derivative in the rule",
        )


def _or_zeros(like: Tensors, xs: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [torch.zeros_like(x) if t is None else t for x, t in zip(like, xs, strict=True)]


@attrs.frozen(eq=False)
class ReverseRule(Rule):
    """A custom_vjp: a function with a forward and a backward.

    Args:
        forward: tensors -> (results, residuals).
        back: (residuals, cotangents, closed-over values) -> cotangents of the given arguments.
        given: which arguments have a cotangent.
    """

    forward: Body
    back: Body
    given: tuple[bool, ...]

    def pulled(self, level: _compat.Level, tensors: Tensors) -> list[torch.Tensor]:
        xs = tensors[: self.count]
        free = [level.below(x) for x in tensors[self.count :]]
        with level.lowered():
            outs = self.forward(*(level.below(x) for x in xs), *free)

        def pull(
            cotangents: Sequence[torch.Tensor | None], again: Tensors | None
        ) -> list[torch.Tensor | None]:
            made = outs if again is None else self.forward(*again, *free)
            results = made[: self.results]
            residuals = made[self.results :]
            feed = iter(self.back(*residuals, *_or_zeros(results, cotangents), *free))
            return [next(feed) if has else None for has in self.given]

        return level.pulled(outs[: self.results], pull, xs)

    def pushed(
        self, level: _compat.Level, tensors: Tensors, tangents: list[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        raise CaptureError.of(
            self.name,
            "the function has only a reverse-mode rule, and is differentiated in forward mode",
            fix="use sf.custom_jvp, whose rule serves both modes",
        )

    def mapped(self, dims: tuple[int | None, ...], size: int) -> Rule:
        free = dims[self.count :]
        of_given = [d for d, has in zip(dims, self.given, strict=False) if has]

        def back(*xs: torch.Tensor) -> list[torch.Tensor]:
            inner = (*[0] * (len(xs) - len(free)), *free)
            pairs = zip(vmapped_body(self.back, inner, size)(*xs), of_given, strict=True)
            return [g.sum(0) if d is None else g.movedim(0, d) for g, d in pairs]

        fn = vmapped_body(self.fn, dims, size)
        forward = vmapped_body(self.forward, dims, size)
        return attrs.evolve(self, fn=fn, forward=forward, back=back)


@attrs.frozen(eq=False)
class ForwardRule(Rule):
    """A custom_jvp: a function with a rule for tangents, which reverse mode transposes.

    Args:
        push: (arguments, tangents, closed-over values) -> (results, tangents of the results).
    """

    push: Body

    def pulled(self, level: _compat.Level, tensors: Tensors) -> list[torch.Tensor]:
        xs = tensors[: self.count]
        free = [level.below(x) for x in tensors[self.count :]]
        below = [level.below(x) for x in xs]
        with level.lowered():
            outs = self.push(*below, *(torch.zeros_like(x) for x in below), *free)[: self.results]

        def pull(
            cotangents: Sequence[torch.Tensor | None], again: Tensors | None
        ) -> list[torch.Tensor | None]:
            return self.transposed(below if again is None else again, free, cotangents)

        return level.pulled(outs, pull, xs)

    def transposed(
        self, xs: Tensors, free: Tensors, cotangents: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The cotangents of the arguments, from those of the results."""
        given = [k for k, g in enumerate(cotangents) if g is not None]
        floats = [k for k, x in enumerate(xs) if is_float(x)]
        tangents = [torch.zeros_like(x) for x in xs]

        def run(*moving: torch.Tensor) -> tuple[torch.Tensor, ...]:
            filled = list(tangents)
            for k, t in zip(floats, moving, strict=True):
                filled[k] = t
            outs = self.push(*xs, *filled, *free)
            return tuple(outs[self.results + k] for k in given)

        pull = torch.func.vjp(run, *(tangents[k] for k in floats))[1]
        feed = iter(pull(tuple(cotangents[k] for k in given)))
        return [next(feed) if is_float(x) else None for x in xs]

    def pushed(
        self, level: _compat.Level, tensors: Tensors, tangents: list[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        xs = tensors[: self.count]
        free = tensors[self.count :]
        with level.lowered():
            outs = self.push(*xs, *_or_zeros(xs, tangents), *free)
        pairs = zip(outs[: self.results], outs[self.results :], strict=True)
        return [level.dual(x, t) if is_float(x) else level.wrapped(x) for x, t in pairs]

    def mapped(self, dims: tuple[int | None, ...], size: int) -> Rule:
        xs = dims[: self.count]
        free = dims[self.count :]
        fn = vmapped_body(self.fn, dims, size)
        push = vmapped_body(self.push, (*xs, *xs, *free), size)
        return attrs.evolve(self, fn=fn, push=push)


def replay_custom_vjp(
    name: str,
    outs: Sequence[BodyResult],
    fwd: Sequence[BodyResult],
    bwd: Sequence[BodyResult],
    xs: Tensors,
    has_cotangent: Sequence[bool],
) -> list[torch.Tensor]:
    """When Dynamo's graph is replayed: call a custom_vjp, whose rule is two more bodies.

    Args:
        name: of the function.
        outs: its results.
        fwd: arguments -> results and residuals.
        bwd: residuals and cotangents -> cotangents of the arguments.
        xs: the arguments.
        has_cotangent: which of them have a cotangent.
    """
    plain = outs[0].region
    forward = fwd[0].region
    back = bwd[0].region if bwd else None
    n = len(xs)
    sizes = (len(plain.free), len(forward.free), len(back.free) if back else 0)
    at = [n, n + sizes[0], n + sizes[0] + sizes[1]]

    def pull(*ts: torch.Tensor) -> list[torch.Tensor]:
        if back is None:
            return []
        end = len(ts) - sum(
            sizes
        )  # residuals and cotangents, then the closed-over values of all three
        return back(ts[:end], ts[end + sizes[0] + sizes[1] :])

    rule = ReverseRule(
        name,
        lambda *ts: plain(ts[:n], ts[at[0] : at[1]])[: len(outs)],
        n,
        len(outs),
        lambda *ts: forward(ts[:n], ts[at[1] : at[2]]),
        pull,
        tuple(has_cotangent),
    )
    return apply_rule(rule, [*xs, *plain.free, *forward.free, *(back.free if back else [])])


def replay_custom_jvp(
    name: str, outs: Sequence[BodyResult], pushed: Sequence[BodyResult], xs: Tensors
) -> list[torch.Tensor]:
    """When Dynamo's graph is replayed: call a custom_jvp, whose rule is one more body: (arguments,
    tangents) -> (results, tangents).
    """
    plain = outs[0].region
    push = pushed[0].region
    n = len(xs)
    k = len(plain.free)
    rule = ForwardRule(
        name,
        lambda *ts: plain(ts[:n], ts[n : n + k]),
        n,
        len(outs),
        lambda *ts: push(ts[: 2 * n], ts[2 * n + k :]),
    )
    return apply_rule(rule, [*xs, *plain.free, *push.free])
