"""custom_jvp: functions whose forward-mode derivative the user writes.

Dynamo reads this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import torch

from ... import _tree
from ...argnums import check_argnums
from ...capture.control_flow import bodies, control_flow_ops
from ...capture.control_flow.custom_derivatives import ForwardRule, apply_rule
from .._options import check_function
from .._paired import paired
from .._transformed import name_of
from ._custom import Custom, check_pair, cotangent_of, positional


@attrs.define(eq=False, repr=False, slots=False)
class CustomJvp(Custom):
    """A function with a custom forward-mode derivative, which reverse mode transposes."""

    verb: ClassVar[str] = "custom_jvp"

    def defjvp(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Set the derivative rule of the function. `defjvp` can also be used as a decorator.

        Args:
            rule: a function (primals, tangents) -> (result, tangent of the result), linear in the
                tangents. Primals and tangents are tuples like the arguments. The arguments at
                nondiff_argnums come before the primals.

        Returns:
            The rule.

        Raises:
            ShardError: the function already has a derivative rule.
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
            tangents = cotangent_of(moving, tensors[len(xs) :])
            return bodies.mark_results(self.pushed(rule(*still, primals, tangents), out))

        both = bodies.run_body(pushed, [*xs, *xs])
        outs = control_flow_ops.custom_jvp(self.__name__, _tree.tensors(out), list(both), xs)
        return _tree.with_tensors(out, outs)

    def pushed(self, found: Any, out: Any) -> list[torch.Tensor]:
        """The tensors that the rule returns, in the order of the function's result, then their
        tangents.
        """
        is_pair = isinstance(found, tuple) and len(found) == 2
        check_pair(self.__name__, is_pair, "the rule", "(result, tangent of the result)")
        theirs = "those of the function"
        paths = ("result", "result")
        after = paired(self.__name__, found[0], out, ("the results of the rule", theirs), paths)
        names = ("the tangents of the rule", "the results")
        paths = ("tangent", "result")
        dots = paired(self.__name__, found[1], out, names, paths)
        rows = zip(after, dots, strict=True)
        tensors = [(x, t) for x, t in rows if isinstance(x, torch.Tensor)]
        tangents = [torch.zeros_like(x) if t is None else t for x, t in tensors]
        return [*[x for x, _ in tensors], *tangents]

    def eagerly(self, still: tuple[Any, ...], moving: tuple[Any, ...]) -> Any:
        (rule,) = self.rules
        xs = _tree.tensors(moving)
        out = self.fn(*self.joined(still, moving))

        def push(*tensors: torch.Tensor) -> list[torch.Tensor]:
            primals = _tree.with_tensors(moving, tensors[: len(xs)])
            tangents = cotangent_of(moving, tensors[len(xs) :])
            return self.pushed(rule(*still, primals, tangents), out)

        count = len(_tree.tensors(out))
        forward = ForwardRule(self.__name__, self.flat(still, moving), len(xs), count, push)
        return _tree.with_tensors(out, apply_rule(forward, xs))


def custom_jvp(fn: Callable[..., Any], nondiff_argnums: int | tuple[int, ...] = ()) -> CustomJvp:
    """Give a function a custom derivative, which `.defjvp(rule)` sets. In reverse mode, the
    transpose of the custom derivative is used.

    Args:
        fn: a function of trees of tensors. The function must not close over values that are
            differentiated.
        nondiff_argnums: the positions of arguments that are not tensors. The derivative rule
            receives the arguments at `nondiff_argnums` before all other arguments. Keywords and
            default values are arguments in their order too.

    Returns:
        The function fn, with a method `defjvp`.

    Raises:
        ShardError: the function is called before `defjvp` has set a rule.
        TreeError: in a call of the function, the derivative rule returns results of another
            structure, shape or dtype than the function.
        CaptureError: the function closes over a value that is differentiated.

    Source: jax.custom_jvp.

    Example:
        >>> import torch, shardfn as sf
        >>> step = sf.custom_jvp(lambda x: (x > 0).to(x.dtype))
        >>> rule = step.defjvp(
        ...     lambda primals, tangents: ((primals[0] > 0).float(), tangents[0] * 0.5)
        ... )
        >>> sf.grad(step)(torch.tensor(2.0))
        tensor(0.5000)
    """
    check_function("custom_jvp", fn)
    numbers = check_argnums(f"custom_jvp({name_of(fn)})", "nondiff_argnums", nondiff_argnums)
    names, defaults = positional(fn)
    return CustomJvp((fn,), numbers, [], names, defaults)
