"""custom_vjp: functions whose reverse-mode derivative the user writes.

Dynamo reads this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import torch

from ... import _compat, _tree
from ...argnums import check_argnums
from ...capture.control_flow import bodies, control_flow_ops
from ...capture.control_flow.custom_derivatives import ReverseRule, apply_rule
from .._options import check_function
from .._paired import paired
from .._transformed import name_of
from ._custom import Custom, check_pair, cotangent_of, positional


@attrs.define(eq=False, repr=False, slots=False)
class CustomVjp(Custom):
    """A function with a custom reverse-mode derivative."""

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Set the derivative rule of the function.

        Args:
            fwd: a function of the function's arguments, which returns (result, residuals). The
                residuals are any tree of tensors.
            bwd: a function (residuals, cotangent of the result), which returns a tuple with one
                cotangent for each argument. A cotangent is a tree like the argument, or None for
                zero. The arguments at nondiff_argnums come before the residuals.

        Raises:
            ShardError: the function already has a derivative rule.
        """
        self.ruled([fwd, bwd])

    needs: ClassVar[str] = "defvjp(fwd, bwd)"

    def traced(self, still: tuple[Any, ...], moving: tuple[Any, ...]) -> Any:
        xs = _tree.tensors(moving)
        out = self.plain(still, moving, xs)
        results = _tree.tensors(out)
        after, residuals = self.forward_region(still, moving, out)
        saved = _tree.tensors(residuals)
        back = self.backward_region(still, moving, out, residuals)
        given = [g is not None for g in back]
        gradients = [g for g in back if g is not None]
        outs = control_flow_ops.custom_vjp(
            self.__name__, results, [*after, *saved], gradients, xs, given
        )
        return _tree.with_tensors(out, outs)

    def forward_region(self, still: tuple[Any, ...], moving: tuple[Any, ...], out: Any) -> Any:
        """fwd as a body: (the tensors of its result, its residuals)."""
        fwd, _ = self.rules

        def forward(*tensors: torch.Tensor) -> Any:
            returned = fwd(*self.joined(still, _tree.with_tensors(moving, tensors)))
            after, residuals = self.forward_results(returned, out)
            left = bodies.mark_results([*after, *_tree.tensors(residuals)])
            count = len(after)
            return left[:count], _tree.with_tensors(residuals, left[count:])

        return bodies.run_body(forward, _tree.tensors(moving))

    def backward_region(
        self, still: tuple[Any, ...], moving: tuple[Any, ...], out: Any, residuals: Any
    ) -> Any:
        """bwd as a body: for each tensor of the arguments its cotangent, or None."""
        _, bwd = self.rules
        saved = _tree.tensors(residuals)
        count = len(saved)

        def backward(*tensors: torch.Tensor) -> Any:
            cotangent = cotangent_of(out, tensors[count:])
            own_residuals = _tree.with_tensors(residuals, tensors[:count])
            back = bwd(*still, own_residuals, cotangent)
            gradients = self.cotangents(back, moving)
            left = iter(bodies.mark_results([g for g in gradients if g is not None]))
            return [None if g is None else next(left) for g in gradients]

        return bodies.run_body(backward, [*saved, *_tree.tensors(out)])

    def forward_results(self, found: Any, out: Any) -> tuple[list[torch.Tensor], Any]:
        """(the tensors of the result that fwd returns, in the order of the function's result;
        the residuals).
        """
        is_pair = isinstance(found, tuple) and len(found) == 2
        check_pair(self.__name__, is_pair, "fwd", "(result, residuals)")
        names = ("the results of fwd", "those of the function")
        paths = ("result", "result")
        leaves = paired(
            self.__name__, found[0], out, names, paths, "return the same result as the function"
        )
        return [x for x in leaves if isinstance(x, torch.Tensor)], found[1]

    def cotangents(self, back: Any, moving: tuple[Any, ...]) -> list[torch.Tensor | None]:
        """The cotangent of each tensor of the arguments, as bwd returns it. None for zero."""
        is_tuple = isinstance(back, tuple) and len(back) == len(moving)
        check_pair(self.__name__, is_tuple, "bwd", f"a tuple of {len(moving)} cotangents")
        names = ("the cotangents of bwd", "the arguments")
        paths = ("cotangent", "args")
        fix = "return for each argument a tree with the same structure, or None for zero"
        leaves = paired(self.__name__, back, moving, names, paths, fix, is_zero)
        pairs = zip(leaves, _tree.quick_leaves(moving), strict=True)
        tensors = [(g, x) for g, x in pairs if isinstance(x, torch.Tensor)]
        return [g if _tree.is_floating(x) else None for g, x in tensors]

    def eagerly(self, still: tuple[Any, ...], moving: tuple[Any, ...]) -> Any:
        xs = _tree.tensors(moving)
        out = self.fn(*self.joined(still, moving))
        rule = _EagerRule(self, still, moving, out)
        reverse = ReverseRule(
            self.__name__,
            self.flat(still, moving),
            len(xs),
            len(_tree.tensors(out)),
            rule.forward,
            rule.backward,
            (True,) * len(xs),
        )
        return _tree.with_tensors(out, apply_rule(reverse, xs))


@attrs.define(eq=False)
class _EagerRule:
    """A rule as functions of flat tensors, for calls that Dynamo does not trace."""

    custom: CustomVjp
    still: tuple[Any, ...]  # the arguments that are not differentiated
    moving: tuple[Any, ...]  # the others
    out: Any  # the result of the function
    residuals: Any = None  # the tree that fwd returned last

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """(arguments) -> the result, then the residuals."""
        fwd, _ = self.custom.rules
        moving = _tree.with_tensors(self.moving, tensors)
        returned = fwd(*self.custom.joined(self.still, moving))
        after, self.residuals = self.custom.forward_results(returned, self.out)
        return [*after, *_tree.tensors(self.residuals)]

    def backward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """(residuals, cotangents of the result) -> the cotangents of the arguments."""
        _, bwd = self.custom.rules
        start = len(tensors) - len(_tree.tensors(self.out))
        residuals = _tree.with_tensors(self.residuals, tensors[:start])
        back = bwd(*self.still, residuals, cotangent_of(self.out, tensors[start:]))
        cotangents = self.custom.cotangents(back, self.moving)
        pairs = zip(cotangents, _tree.tensors(self.moving), strict=True)
        return [torch.zeros_like(x) if g is None else g for g, x in pairs]


@_compat.of_trees
def is_zero(x: Any) -> bool:
    """Whether a part of a tree of cotangents stands for zero."""
    return x is None


def custom_vjp(fn: Callable[..., Any], nondiff_argnums: int | tuple[int, ...] = ()) -> CustomVjp:
    """Give a function a custom reverse-mode derivative, which `.defvjp(fwd, bwd)` sets.

    Args:
        fn: a function of trees of tensors. The function must not close over values that are
            differentiated.
        nondiff_argnums: the positions of arguments that are not tensors. `fwd` receives all
            arguments in their order, and `bwd` receives the arguments at `nondiff_argnums` first.
            Keywords and default values are arguments in their order too.

    Returns:
        The function fn, with a method `defvjp`. A call runs fn unchanged if no derivative is taken.

    Raises:
        ShardError: the function is called before `defvjp` has set a rule.
        TreeError: in a call of the function, the results of `fwd` or `bwd` do not fit the function.
        CaptureError: fn is differentiated in forward mode, which `defvjp` does not define, or fn
            closes over a value that is differentiated.

    Source: jax.custom_vjp.

    Example:
        >>> import torch, shardfn as sf
        >>> flat = sf.custom_vjp(lambda x: x**2)
        >>> flat.defvjp(lambda x: (x**2, x), lambda x, g: (g * x.clamp(-1, 1),))
        >>> sf.grad(flat)(torch.tensor(2.0))
        tensor(1.)
    """
    check_function("custom_vjp", fn)
    numbers = check_argnums(f"custom_vjp({name_of(fn)})", "nondiff_argnums", nondiff_argnums)
    names, defaults = positional(fn)
    return CustomVjp((fn,), numbers, [], names, defaults)
