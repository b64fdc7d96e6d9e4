"""bucketed_grad: value_and_grad whose gradient reductions are sent in buckets, overlapped with
the backward.

Dynamo reads this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import torch

from ... import _compat, _tree
from ...argnums import Argnums
from ...buckets import BucketPlan, check_caps
from ...errors import TreeError
from .._transformed import name_of, parameter_names
from ._bucket_options import wishes_text
from ._grad import ValueAndGrad, check_derivative

# a predicate of paths, or a prefix tree of bools
Ignore = Callable[[str], bool] | Any


class _Default(str):
    """A default that differs from the same text written by the user."""


FIRST_CAP = _Default("1MiB")


@attrs.define(eq=False, repr=False, slots=False)
class BucketedGrad(ValueAndGrad):
    """`bucketed_grad` of a function."""

    verb: ClassVar[str] = "bucketed_grad"
    held: tuple[Callable[..., Any]]
    argnums: Argnums
    has_aux: bool
    caps: tuple[Any, Any, Any]  # cap, first_cap (None: 1MiB, or cap if that is less), max_in_flight
    ignore: Ignore
    reduce_dtype: torch.dtype | None
    plan: BucketPlan | None

    def inline(self, *args: Any, **kwargs: Any) -> Any:
        wishes = self.wishes(
            args
        )  # checked first, so that bad input is refused before anything is traced
        return self.returned(*self.placed(self.found(args, kwargs), args, wishes))

    def wishes(self, args: tuple[Any, ...]) -> list[str]:
        names, numbers = (parameter_names(self.fn, len(args)), self.numbers(len(args)))
        roots = [names[n] if n < len(names) else f"args[{n}]" for n in numbers]
        paths, kinds = _leaf_kinds([args[n] for n in numbers], roots)
        by_path = [bool(self.ignore(p)) for p in paths] if callable(self.ignore) else None
        by_tree = None if callable(self.ignore) else self.ignore
        rows = None if self.plan is None else self.plan.as_constant()
        name = f"bucketed_grad({name_of(self.fn)})"
        text = wishes_text(
            name, self.caps, roots, paths, kinds, by_path, by_tree, self.reduce_dtype, rows
        )
        return text.split("\n") if text else []

    def options(self) -> Any:
        said = (
            self.ignore if callable(self.ignore) else repr(self.ignore)
        )  # 1 == True in Python, but 1 is not a bool
        return (self.argnums, self.has_aux, repr(self.caps), said, self.reduce_dtype, self.plan)


@_compat.of_trees
def _leaf_kinds(trees: list[Any], roots: list[str]) -> tuple[list[str], list[Any]]:
    """The path of each leaf that is not None, and its dtype, or the name of its type."""
    paths = [p for x, root in zip(trees, roots, strict=True) for p in _tree.quick_paths(x, root)]
    leaves = _tree.quick_leaves(trees)
    pairs = [(p, x) for p, x in zip(paths, leaves, strict=True) if x is not None]
    kinds = [x.dtype if isinstance(x, torch.Tensor) else type(x).__name__ for _, x in pairs]
    return [p for p, _ in pairs], kinds


def bucketed_grad(
    fn: Callable[..., Any],
    cap: int | str = "25MB",
    first_cap: int | str = FIRST_CAP,
    *,
    argnums: Argnums = 0,
    has_aux: bool = False,
    ignore: Ignore = None,
    reduce_dtype: torch.dtype | None = None,
    max_in_flight: int | str = "1GiB",
    plan: BucketPlan | None = None,
) -> BucketedGrad:
    """Return a `value_and_grad` of fn that reduces gradients in buckets while the backward still
    runs.

    Args:
        fn: a function that returns a floating-point scalar, or (scalar, aux) with `has_aux`.
        cap: the size at which a bucket is closed, in bytes or as text, such as "512KB" (powers of
            1000) or "1GiB" (powers of 1024). The last gradient of a bucket may make the bucket
            larger than `cap`.
        first_cap: the size at which the first bucket is closed, so that communication starts early.
            The default of `first_cap` is 1 MiB (1,048,576 bytes), as in torch's
            DistributedDataParallel, or `cap` if `cap` is smaller.
        argnums: the positions of the arguments to differentiate, each a tree of floating-point
            tensors.
        has_aux: whether fn also returns auxiliary data, a tree, in addition to the scalar.
        ignore: leaves whose gradients are reduced separately: a predicate of the leaf's path, such
            as "params['w1']", or a prefix tree of bools.
        reduce_dtype: the dtype in which gradients are sent; by default, the dtype of the gradients.
        max_in_flight: the largest number of bytes of gradients and gathered parameters that may be
            in flight at once.
        plan: a bucket plan to use instead of `cap` and `first_cap`, such as an edited copy of
            `lower(...).plan`. The program uses exactly the buckets of the plan, with the same order
            of buckets and leaves, or raises an error.

    Returns:
        A function with the same arguments as fn, which returns (value, gradients), or ((value,
        aux), gradients). A gradient has the shape, dtype and placement of the differentiated
        argument.

    Raises:
        ShardError: cap is not a positive number of bytes, or `first_cap` exceeds `cap`.
        TreeError: in a call of the returned function, an argument is not floating-point, `ignore`
            matches no leaf, or `plan` was made for another program.
        CaptureError: in a call of the returned function, fn does not return a scalar.

    Source: Li et al., PyTorch Distributed (VLDB 2020), section 3.2; DDPOptimizer in
    torch._dynamo; jax.value_and_grad.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.bucketed_grad(lambda w: (w * w).sum(), cap="25MB")(torch.tensor([1.0, 2.0]))
        (tensor(5.), tensor([2., 4.]))
    """
    check_derivative("bucketed_grad", fn, argnums, has_aux)
    caps = (cap, None if first_cap is FIRST_CAP else first_cap, max_in_flight)
    if not _compat.is_tracing():
        check_caps(f"bucketed_grad({name_of(fn)})", caps)
        if plan is not None and not isinstance(plan, BucketPlan):
            fix = "pass fn.lower(...).plan, or BucketPlan.load(path)"
            raise TreeError.of(
                f"bucketed_grad({name_of(fn)}), plan",
                f"a {type(plan).__name__}",
                needed="a BucketPlan",
                fix=fix,
            )
    return BucketedGrad((fn,), argnums, has_aux, caps, ignore, reduce_dtype, plan)
