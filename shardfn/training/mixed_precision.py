"""mixed_precision: a function that computes in a smaller dtype than its parameters have.

Dynamo reads this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import attrs
import torch

from .. import _compat, _tree
from ..accepted import accept
from ..capture import annotations
from ..errors import ShardError
from ..patterns import compiled, near
from ..transforms._options import check_function
from ..transforms._transformed import Transformed, name_of


@attrs.define(eq=False, repr=False, slots=False)
class MixedPrecision(Transformed):
    """The result of `mixed_precision`."""

    verb: ClassVar[str] = "mixed_precision"
    held: tuple[Callable[..., Any]]
    compute: torch.dtype
    params: torch.dtype
    reduce: torch.dtype
    keep: tuple[str, ...]
    argnums: tuple[int, ...] | None

    def inline(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with casts of its arguments."""
        with annotations.annotate_cast(str(self.compute), str(self.reduce)):
            cast = [
                self.cast(i, x) if self.argnums is None or i in self.argnums else x
                for i, x in enumerate(args)
            ]
        return self.fn(*cast, **kwargs)

    def cast(self, number: int, arg: Any) -> Any:
        """Cast the floating tensors of one argument to the compute dtype."""
        floats = _tree.tensors((arg,), _tree.is_floating)
        paths = _float_paths(arg)
        kept: tuple[bool, ...] = (False,) * len(floats)
        if number == 0:
            kept = _kept(name_of(self.fn), paths, self.keep)
            dtypes = tuple(str(x.dtype) for x in floats)
            _check_params(name_of(self.fn), paths, dtypes, str(self.params))
        lower = [
            x if is_kept else x.to(self.compute) for x, is_kept in zip(floats, kept, strict=True)
        ]
        return _tree.with_tensors((arg,), lower, _tree.is_floating)[0]

    def options(self) -> Any:
        return self.compute, self.params, self.reduce, self.keep, self.argnums


@_compat.of_trees
def _float_paths(arg: Any) -> tuple[str, ...]:
    """List the paths of an argument's floating tensors, as `module.named_parameters`
    writes them.
    """
    leaves = _tree.quick_leaves((arg,))
    paths = _tree.quick_paths((arg,), "")
    pairs = zip(paths, leaves, strict=True)
    return tuple(_dotted(path) for path, x in pairs if _tree.is_floating(x))


def _dotted(path: str) -> str:
    """Rewrite a pytree path `[0]['w1'].x` as a module path `w1.x`."""
    text = path.removeprefix("[0]").replace("['", ".").replace("']", "")
    return text.replace("[", ".").replace("]", "").removeprefix(".")


@_compat.constant_in_graph
def _kept(name: str, paths: tuple[str, ...], keep: tuple[str, ...]) -> tuple[bool, ...]:
    """Select the parameters that keep their dtype by the `keep` patterns.

    Raises:
        ShardError: a pattern that matches none.
    """
    patterns = {text: compiled(text) for text in keep}
    unused = [
        text
        for text, pattern in patterns.items()
        if not any(pattern.fullmatch(path) for path in paths)
    ]
    if unused:
        lines = [
            f"{text!r} matches no parameter; similar paths are {', '.join(near(text, paths))}"
            for text in unused
        ]
        raise ShardError.of(
            f"mixed_precision({name}), keep", *lines, fix="write the paths of parameters"
        )
    return tuple(any(pattern.fullmatch(path) for pattern in patterns.values()) for path in paths)


@_compat.constant_in_graph
def _check_params(name: str, paths: tuple[str, ...], dtypes: tuple[str, ...], wanted: str) -> None:
    """Check the dtype of the parameters.

    Raises:
        ShardError: one has another.
    """
    wrong = [
        f"{path or 'the parameter'} is {dtype}"
        for path, dtype in zip(paths, dtypes, strict=True)
        if dtype != wanted
    ]
    if wrong:
        fix = f"x.to({wanted}), or params="
        raise ShardError.of(f"mixed_precision({name})", *wrong, needed=wanted, fix=fix)


def mixed_precision(
    fn: Callable[..., Any],
    *,
    compute: torch.dtype = torch.bfloat16,
    params: torch.dtype = torch.float32,
    reduce: torch.dtype = torch.float32,
    keep: Sequence[str] = (),
    argnums: int | Sequence[int] | None = None,
) -> MixedPrecision:
    """Compute a function in a smaller dtype than the dtype of its parameters.

    The floating-point tensors in the arguments are cast to the dtype `compute`. Sharded parameters
    are cast before they are gathered, so a gather sends fewer bytes. Gradients have the dtype of
    the parameters, which the optimizer updates.

    Args:
        fn: a function whose first argument is the parameters: a tensor or a pytree.
        compute: the dtype in which fn computes.
        params: the dtype of the parameters, and of their gradients.
        reduce: the dtype in which gradients are reduced over ranks. If `reduce` equals `compute`,
            the reductions send fewer bytes. If `reduce` equals `params`, the sums are not rounded
            to a smaller dtype. The option `reduce_dtype` of `bucketed_grad` takes precedence over
            `reduce`.
        keep: patterns for the paths of parameters that are not cast, such as `"**.norm.weight"`.
        argnums: the positions of the arguments that are cast. By default, `mixed_precision` casts
            all arguments.

    Returns:
        A function with the same arguments as fn. The results of the function are not cast back, and
        keep the dtypes in which fn computes them.

    Raises:
        ShardError: a dtype is not a floating-point dtype, a parameter has another dtype than
            `params`, or a pattern matches no parameter.
        TreeError: fn is not a function.

    Source: Micikevicius et al. 2018, "Mixed Precision Training", arXiv:1710.03740;
    torch.distributed.fsdp.MixedPrecisionPolicy; jmp.

    Example:
        >>> import torch, shardfn as sf
        >>> f = sf.mixed_precision(lambda w, x: (x @ w).sum())
        >>> f(torch.ones(3, 2), torch.ones(4, 3)).dtype
        torch.bfloat16
        >>> sf.grad(f)(torch.ones(3, 2), torch.ones(4, 3)).dtype
        torch.float32
    """
    check_function("mixed_precision", fn)
    patterns = _patterns(keep)
    _check_dtypes(repr(compute), repr(params), repr(reduce))
    numbers = _positions(argnums)
    return MixedPrecision((fn,), compute, params, reduce, patterns, numbers)


@_compat.constant_in_graph
def _positions(argnums: Any) -> tuple[int, ...] | None:
    """Normalize argnums to positions; None for all arguments.

    Raises:
        ShardError: something else than positions.
    """
    accept("mixed_precision", argnums=argnums)
    if argnums is None:
        return None
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)


@_compat.constant_in_graph
def _patterns(keep: Iterable[str]) -> tuple[str, ...]:
    """Normalize `keep` to a tuple of patterns.

    Raises:
        ShardError: not a list of text.
    """
    is_row = isinstance(keep, list | tuple)
    if not is_row or not all(isinstance(text, str) for text in keep):
        got = f"keep is {keep!r}"
        fix = 'keep=["**.norm.weight"]'
        raise ShardError.of("mixed_precision", got, needed="a list of patterns", fix=fix)
    return tuple(keep)


@_compat.constant_in_graph
def _check_dtypes(compute: str, params: str, reduce: str) -> None:
    """Check that the dtypes are floating, and fit together.

    Raises:
        ShardError: they do not.
    """
    names = {"compute": compute, "params": params, "reduce": reduce}
    dtypes = {
        name: getattr(torch, text.removeprefix("torch."), None) for name, text in names.items()
    }
    wrong = [
        f"{name} is {names[name]}"
        for name, dtype in dtypes.items()
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point
    ]
    if wrong:
        fix = "torch.bfloat16, torch.float16, torch.float32 or torch.float64"
        raise ShardError.of("mixed_precision", *wrong, needed="floating dtypes", fix=fix)
    if reduce not in (compute, params):
        needed = f"compute ({compute}) or params ({params})"
        raise ShardError.of("mixed_precision", f"reduce is {reduce}", needed=needed)
