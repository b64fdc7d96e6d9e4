"""vmap: a function of one sample as a function of many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import torch

from .. import _compat, _tree
from ..argnums import is_number
from ..capture import named, prims
from ..errors import TreeError, problem
from ..runtime import Request
from ._flattened import Flattened
from ._options import check_function
from ._transformed import Transformed, innermost, name_of


@attrs.define(eq=False, repr=False, slots=False)
class Vmap(Transformed):
    """A function under `vmap`."""

    verb: ClassVar[str] = "vmap"
    held: tuple[Callable[..., Any]]
    in_axes: Any
    out_axes: Any
    axis_size: int | None
    axis_name: str | None = None
    spmd_axis: str | tuple[str, ...] | None = None

    def inline(self, *args: Any, **kwargs: Any) -> Any:
        flat = Flattened(self.fn, args, tuple(range(len(args))), kwargs, False)
        axes = spread(self.in_axes, args, "in_axes")
        leaves = _tree.quick_leaves(args)
        paths = tuple(_tree.quick_paths(args, "args"))
        shapes = tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in leaves)
        check_axes(name_of(self.fn), paths, shapes, tuple(axes), self.axis_size)
        if self.spmd_axis is not None:
            named.check_placed(f"vmap({name_of(self.fn)}), spmd_axis", "", (self.spmd_axis,))
            leaves = [x if d is None else cut(x, d, self.spmd_axis) for x, d in zip(leaves, axes, strict=True)]
        if self.axis_name is not None:
            size = self.axis_size
            for x, d in zip(leaves, axes, strict=True):
                size = size if d is None else x.shape[d]
            numbers = torch.arange(size, device=named.device())
            out = torch.func.vmap(_Naming(flat, self.axis_name, size), in_dims=(0, *axes))(numbers, *leaves)
        elif all(axis is None for axis in axes):
            out = [x.unsqueeze(0).expand(self.axis_size, *x.shape) for x in flat(*leaves)]
        else:
            out = torch.func.vmap(flat, in_dims=tuple(axes))(*leaves)
        outs = spread(self.out_axes, flat.returned[0][0][0], "out_axes")
        check_outs(name_of(self.fn), tuple(outs))
        if self.spmd_axis is not None:
            out = [cut(x, 0, self.spmd_axis) for x in out]
        return flat.value(x.movedim(0, d) for x, d in zip(out, outs, strict=True))

    def asked(self) -> Request:
        return Request(self.__name__, self.inline, innermost(self.fn))

    def options(self) -> Any:
        return _key(self.in_axes), _key(self.out_axes), self.axis_size, self.axis_name, self.spmd_axis


class _Naming:
    """A flat function during which a name stands for the mapped axis; its first argument, the samples' numbers, has it mapped."""

    def __init__(self, flat: Flattened, name: str, size: int) -> None:
        self.flat, self.name, self.size = flat, name, size

    def __call__(self, number: torch.Tensor, *tensors: torch.Tensor) -> Any:
        named.enter_mapped(self.name, self.size)
        out = self.flat(*tensors)
        named.leave(1)
        return out


def cut(x: torch.Tensor, dim: int, axis: str | tuple[str, ...]) -> torch.Tensor:
    """The tensor with a dim cut over mesh axes, other dims as they are."""
    said = axis if isinstance(axis, str) else ",".join(axis)
    dim = dim + x.dim() if dim < 0 else dim
    return prims.redistribute(x, ";".join([said if d == dim else "*" for d in range(x.dim())]))


def _key(axes: Any) -> Any:
    """Axes as a value that can be hashed."""
    if isinstance(axes, dict):
        return tuple((k, _key(v)) for k, v in axes.items())
    return tuple(map(_key, axes)) if isinstance(axes, (list, tuple)) else axes


def spread(prefix: Any, tree: Any, what: str) -> list[int | None]:
    """One axis for every leaf of a tree, from a prefix of it."""
    if prefix is None or is_number(prefix):
        return [prefix] * len(_tree.quick_leaves((tree,)))
    if isinstance(prefix, dict) and isinstance(tree, dict) and list(prefix) == list(tree):
        return [axis for key in tree for axis in spread(prefix[key], tree[key], what)]
    if isinstance(prefix, (list, tuple)) and isinstance(tree, (list, tuple)) and len(prefix) == len(tree):
        return [axis for p, t in zip(prefix, tree, strict=True) for axis in spread(p, t, what)]
    refuse_prefix(what, str(prefix), type(tree).__name__, len(tree) if isinstance(tree, (dict, list, tuple)) else 1)
    return []


@_compat.constant_in_graph
def refuse_prefix(what: str, prefix: str, kind: str, count: int) -> None:
    """Say that axes do not fit.

    Raises:
        TreeError: always.
    """
    fix = "one int or None for all of it, or the same structure"
    raise TreeError(problem(f"vmap, {what}", prefix, needed=f"a prefix of a {kind} of {count}", fix=fix), fix=fix)


@_compat.constant_in_graph
def check_axes(name: str, paths: tuple[str, ...], shapes: tuple[Any, ...], axes: tuple[int | None, ...], size: int | None) -> None:
    """Check that every mapped axis is there, and that all are of one size.

    Raises:
        TreeError: axes of different sizes, or that a leaf does not have; no axis at all.
    """
    wrong, found = [], []
    for path, shape, axis in zip(paths, shapes, axes, strict=True):
        if axis is not None and (shape is None or not -len(shape) <= axis < len(shape)):
            wrong.append(f"{path} is {'no tensor' if shape is None else f'of shape {shape}'} and has no axis {axis}")
        elif axis is not None:
            found.append((path, axis, shape[axis]))
    sizes = {n for _, _, n in found} | ({size} if size is not None else set())
    if len(sizes) > 1:
        wrong += [f"axis {axis} of {path} has size {n}" for path, axis, n in found]
        wrong += [] if size is None else [f"axis_size is {size}"]
    if not sizes and not wrong:
        wrong = ["no argument is mapped, and axis_size is not given"]
    if wrong:
        fix = "in_axes with None for what all samples share, and axes of one size"
        raise TreeError(problem(f"vmap({name})", *wrong, needed="mapped axes of one size", fix=fix), fix=fix)


@_compat.constant_in_graph
def check_outs(name: str, axes: tuple[int | None, ...]) -> None:
    """Check that every result says where its samples go.

    Raises:
        TreeError: one says None.
    """
    if None in axes:
        fix = "an int for each result; index a result that all samples share afterwards, as in y[0]"
        raise TreeError(problem(f"vmap({name}), out_axes", "None for a result", needed="ints", fix=fix), fix=fix)


@_compat.constant_in_graph
def check_settings(name: str, axis_size: Any, axis_name: Any) -> None:
    """Check the size and the name of a mapped axis.

    Raises:
        TreeError: a size that is no positive int, a name that is no text.
    """
    if axis_size is not None and not (is_number(axis_size) and axis_size > 0):
        fix = "axis_size=None where an argument is mapped"
        got = f"axis_size is {axis_size!r}"
        raise TreeError(problem(f"vmap({name}), axis_size", got, needed="a positive int", fix=fix), fix=fix)
    if axis_name is not None and not (isinstance(axis_name, str) and axis_name):
        fix = "axis_name='batch'"
        raise TreeError(problem(f"vmap({name}), axis_name", f"axis_name is {axis_name!r}", needed="a name", fix=fix), fix=fix)


def vmap(
    fn: Callable[..., Any],
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: str | None = None,
    axis_size: int | None = None,
    spmd_axis: str | tuple[str, ...] | None = None,
) -> Vmap:
    """A function of many samples at once, from a function of one.

    Args:
        fn: of one sample; returns a tensor or a tree of them.
        in_axes: a prefix tree over the positional arguments: which axis of each leaf counts the samples; None where all
            samples share a leaf.
        out_axes: a prefix tree over the result: where that axis goes.
        axis_name: what `psum` and the other collectives in fn call the mapped axis.
        axis_size: how many samples; needed only if no argument is mapped.
        spmd_axis: a mesh axis, or several, that cuts the mapped axis, of what comes in as of what goes out.

    Returns:
        A function of the same arguments with the axis added.

    Raises:
        TreeError: when called, mapped axes of different sizes, each listed; axes that do not fit the arguments.

    Source: jax.vmap.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.vmap(lambda x, y: (x * y).sum(), in_axes=(0, None))(torch.eye(2), torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
    """
    check_function("vmap", fn)
    check_settings(name_of(fn), axis_size, axis_name)
    return Vmap((fn,), in_axes, out_axes, axis_size, axis_name, spmd_axis)
