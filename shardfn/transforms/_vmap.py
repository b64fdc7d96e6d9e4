"""vmap: a function of one sample applied to a batch of samples.

Dynamo reads this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import attrs
import torch

from .. import _compat, _tree, tree_pairs
from ..argnums import is_number
from ..capture.shard_map import axis_names
from ..errors import TreeError
from ..ops import placement
from ..ops.text_formats import KEEP, print_spec
from ._flattened import Flattened
from ._options import check_function
from ._paired import check_leaves, compare_sizes, kinds
from ._transformed import Transformed, name_of

RANDOMNESS = ("error", "different", "same")  # as torch.func.vmap's


@attrs.define(eq=False, repr=False, slots=False)
class Vmap(Transformed):
    """A function under `vmap`."""

    verb: ClassVar[str] = "vmap"
    by_fields: ClassVar[bool] = True
    held: tuple[Callable[..., Any]]
    in_axes: Any
    out_axes: Any
    axis_size: int | None
    axis_name: str | None = None
    spmd_axis: str | tuple[str, ...] | None = None
    randomness: str = "error"

    def inline(self, *args: Any, **kwargs: Any) -> Any:
        where = f"vmap({name_of(self.fn)})"
        mapped = Mapped(self.fn, args, tuple(range(len(args))), kwargs, False, _tree.is_tensor)
        mapped.outs, mapped.name = self.out_axes, where
        axes = spread(where, "in_axes", self.in_axes, args, "args")
        leaves = _tree.quick_leaves(args)
        paths = tuple(_tree.quick_paths(args, "args"))
        compare_sizes(leaves, axes)
        size = batch_size(where, paths, kinds(leaves), tuple(axes), self.axis_size)
        pairs = [(x, d) for x, d in zip(leaves, axes, strict=True) if isinstance(x, torch.Tensor)]
        if isinstance(size, str):  # of a symbol
            sizes = [x.shape[d] for x, d in pairs if d is not None]
            size = sizes[0]
        tensors = self.sharded(where, pairs)
        dims = tuple([d for _, d in pairs])
        stacked, shared = self.batched(mapped, tensors, dims, size)
        if self.spmd_axis is not None:
            stacked = tuple([cut(x, 0, self.spmd_axis) for x in stacked])
        return mapped.batched(size, iter(stacked), iter(shared))

    def sharded(
        self, where: str, pairs: list[tuple[torch.Tensor, int | None]]
    ) -> list[torch.Tensor]:
        """Tensors with their mapped dims, each sharded on that dim over `spmd_axis`."""
        if self.spmd_axis is None:
            return [x for x, _ in pairs]
        axis_names.check_placed(f"{where}, spmd_axis", "", (self.spmd_axis,))
        return [x if d is None else cut(x, d, self.spmd_axis) for x, d in pairs]

    def batched(
        self, mapped: Mapped, tensors: list[torch.Tensor], dims: tuple[int | None, ...], size: int
    ) -> Any:
        """(results of all samples, stacked along dim 0; results that all samples share)."""
        flat: Callable[..., Any] = mapped
        is_shared = all(d is None for d in dims)
        if self.axis_name is not None:
            flat = _Naming(mapped, self.axis_name, size)
        elif is_shared and self.randomness == "different":
            flat = lambda number, *xs: mapped(*xs)
        if flat is not mapped:  # it takes the samples' numbers first
            numbers = torch.arange(size, device=axis_names.device())  # (size,)
            tensors, dims = [numbers, *tensors], (0, *dims)
        elif is_shared:
            out, shared = mapped(*tensors)
            stacked = [x.unsqueeze(0).expand(size, *x.shape) for x in out]
            return tuple(stacked), shared
        # torch's annotation has no None for a shared result
        out_dims: Any = (0, None)
        over_samples = torch.func.vmap(
            flat, in_dims=dims, out_dims=out_dims, randomness=self.randomness
        )
        return over_samples(*tensors)

    def options(self) -> Any:
        return (
            _key(self.in_axes),
            _key(self.out_axes),
            self.axis_size,
            self.axis_name,
            self.spmd_axis,
            self.randomness,
        )


class Mapped(Flattened):
    """A flat function of one sample. It returns (tensors that get the mapped dim, tensors that
    all samples share).
    """

    outs: Any  # out_axes
    name: str

    def __call__(self, *tensors: torch.Tensor) -> Any:
        Flattened.__call__(self, *tensors)
        value = self.returned[-1][0][0]
        axes = spread(self.name, "out_axes", self.outs, value, "result")
        # in a list: Dynamo drops an attribute that is set after an op with graphs (torch 2.13)
        self.returned.append(axes)
        leaves = _tree.quick_leaves((value,))
        check_outs(self.name, tuple(_tree.quick_paths(value, "result")), kinds(leaves), tuple(axes))
        pairs = [(x, d) for x, d in zip(leaves, axes, strict=True) if isinstance(x, torch.Tensor)]
        return tuple([x for x, d in pairs if d is not None]), tuple(
            [x for x, d in pairs if d is None]
        )

    def batched(
        self, size: int, stacked: Iterator[torch.Tensor], shared: Iterator[torch.Tensor]
    ) -> Any:
        """The result, with the mapped dim where `out_axes` puts it. A number that gets it
        becomes a tensor.
        """
        value = self.returned[0][0][0]
        axes = self.returned[1]
        filled = []
        for x, d in zip(_tree.quick_leaves((value,)), axes, strict=True):
            if isinstance(x, torch.Tensor):
                filled.append(next(shared) if d is None else next(stacked).movedim(0, d))
            elif x is None or d is None:
                filled.append(x)
            else:
                filled.append(torch.full((size,), x, device=axis_names.device()))
        return _tree.refill((value,), filled)[0]


class _Naming:
    """A flat function that binds an axis name to the mapped dim while it runs. Its first
    argument holds the index of each sample and is mapped.
    """

    def __init__(self, flat: Flattened, name: str, size: int) -> None:
        self.flat, self.name, self.size = flat, name, size

    def __call__(self, number: torch.Tensor, *tensors: torch.Tensor) -> Any:
        axis_names.bind_mapped_dim(self.name, self.size)
        out = self.flat(*tensors)
        axis_names.unbind_last(1)
        return out


def cut(x: torch.Tensor, dim: int, axis: str | tuple[str, ...]) -> torch.Tensor:
    """Constrain one dim of a tensor to be sharded over mesh axes, and leave the other dims free."""
    axes = (axis,) if isinstance(axis, str) else axis
    dim = dim + x.dim() if dim < 0 else dim
    return placement.redistribute(
        x, print_spec([axes if d == dim else (KEEP,) for d in range(x.dim())])
    )


def _key(axes: Any) -> Any:
    """Turn a tree of in_axes or out_axes into a hashable key."""
    if isinstance(axes, dict):
        return tuple((k, _key(v)) for k, v in axes.items())
    return tuple(map(_key, axes)) if isinstance(axes, (list, tuple)) else axes


@_compat.of_trees
def spread(where: str, what: str, prefix: Any, tree: Any, path: str) -> list[int | None]:
    """Broadcast a prefix tree of axes over a tree: one axis for every leaf."""
    prefix = tuple(prefix) if isinstance(prefix, list) and isinstance(tree, tuple) else prefix
    axes, wrong = tree_pairs.pair(prefix, tree, ("the axes", "the leaves"), path, is_axis)
    strangers = [f"{axis} is not the number of a dim" for axis in axes if not is_axis(axis)]
    check_prefix(f"{where}, {what}", str(prefix), tuple(wrong or strangers))
    return axes


@_compat.of_trees
def is_axis(x: Any) -> bool:
    """Return whether x is an int or None, and so a leaf of a tree of axes."""
    return x is None or is_number(x)


@_compat.constant_in_graph
def check_prefix(where: str, prefix: str, wrong: tuple[str, ...]) -> None:
    """Check that a tree of axes is a prefix of the arguments.

    Raises:
        TreeError: it does not.
    """
    if wrong:
        fix = "give one int or None for the whole tree, or a tree with the same structure"
        raise TreeError.of(where, prefix, *wrong, needed="a prefix tree of axes", fix=fix)


@_compat.constant_in_graph
def batch_size(
    name: str,
    paths: tuple[str, ...],
    leaves: tuple[Any, ...],
    axes: tuple[int | None, ...],
    size: int | None,
) -> Any:
    """The number of samples, or the text of a symbol. Checks that all mapped dims exist and have
    one size.

    Raises:
        TreeError: mapped dims of different sizes, a dim that a leaf does not have, or no mapped
            dim at all.
    """
    wrong = []
    found = []
    for path, leaf, axis in zip(paths, leaves, axes, strict=True):
        shape = None if isinstance(leaf, str) else leaf[0]
        if axis is None or leaf == "NoneType":
            continue
        if shape is None:
            wrong.append(f"{path} is a {leaf}, so it has no dim {axis}")
        elif not -len(shape) <= axis < len(shape):
            wrong.append(f"{path} has no dim {axis}: its shape is {shape}")
        else:
            found.append((path, axis, shape[axis]))
    sizes = {n for _, _, n in found} | ({size} if size is not None else set())
    if len(sizes) > 1:
        wrong += [f"axis {axis} of {path} has size {n}" for path, axis, n in found]
        wrong += [] if size is None else [f"axis_size is {size}"]
    if not sizes and not wrong:
        wrong = ["no argument is mapped, and axis_size is not given"]
    if wrong:
        fix = "set in_axes to None for arguments that all samples share, and map dims of equal size"
        raise TreeError.of(name, *wrong, needed="mapped axes of equal sizes", fix=fix)
    return sizes.pop()


@_compat.constant_in_graph
def check_outs(
    name: str, paths: tuple[str, ...], leaves: tuple[Any, ...], axes: tuple[int | None, ...]
) -> None:
    """Check that each result can get the mapped dim where `out_axes` puts it.

    Raises:
        TreeError: a dim that a result does not have, or a result that is not a tensor or a
            number.
    """
    check_leaves(name, "a result cannot be stacked", paths, leaves, "numbers")
    dims = [0 if isinstance(leaf, str) else len(leaf[0]) for leaf in leaves]
    wrong = [
        f"{path} has no dim {axis}: with the mapped dim it has {n + 1} dims"
        for path, n, axis in zip(paths, dims, axes, strict=True)
        if axis is not None and not -n - 1 <= axis <= n
    ]
    if wrong:
        fix = "give out_axes from 0 to the number of dims of one sample's result"
        raise TreeError.of(f"{name}, out_axes", *wrong, fix=fix)


@_compat.constant_in_graph
def check_settings(name: str, axis_size: Any, axis_name: Any) -> None:
    """Check the size and the name of a mapped dim.

    Raises:
        TreeError: a size that is not a positive int, or a name that is not a str.
    """
    if axis_size is not None and not (is_number(axis_size) and axis_size > 0):
        fix = "axis_size=None, since an argument is mapped"
        got = f"axis_size is {axis_size!r}"
        raise TreeError.of(f"vmap({name}), axis_size", got, needed="a positive int", fix=fix)
    if axis_name is not None and not (isinstance(axis_name, str) and axis_name):
        fix = "axis_name='batch'"
        raise TreeError.of(
            f"vmap({name}), axis_name", f"axis_name is {axis_name!r}", needed="a name", fix=fix
        )


@_compat.constant_in_graph
def check_randomness(name: str, randomness: Any) -> None:
    """Check what torch's random calls do under vmap.

    Raises:
        TreeError: it is not "error", "different" or "same".
    """
    if randomness not in RANDOMNESS:
        fix = " or ".join(f"randomness={word!r}" for word in RANDOMNESS)
        got = f"randomness is {randomness!r}"
        raise TreeError.of(f"vmap({name}), randomness", got, fix=fix)


def vmap(
    fn: Callable[..., Any],
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: str | None = None,
    axis_size: int | None = None,
    spmd_axis: str | tuple[str, ...] | None = None,
    randomness: str = "error",
) -> Vmap:
    """Vectorize a function of one sample over a batch of samples.

    Args:
        fn: a function of one sample that returns a tensor or a tree of tensors.
        in_axes: a prefix tree over the positional arguments, with the batch dim of each leaf, or
            None for an argument that all samples share.
        out_axes: a prefix tree over the result, with the batch dim of each leaf, or None for a
            result that is equal for all samples. A number that fn returns becomes a tensor with one
            element for each sample.
        axis_name: the name of the batch dim, for `psum` and other collectives in fn.
        axis_size: the number of samples, which is needed only if all samples share all arguments.
        spmd_axis: mesh axes over which the batch dim is sharded, in inputs and outputs.
        randomness: whether `torch.rand`, dropout and similar ops in fn raise an "error", or draw
            "different" or the "same" numbers for each sample. Random numbers from keys of
            `sf.random` do not need `randomness`.

    Returns:
        A function with the same arguments as fn, in which mapped arguments and results have a batch
        dim.

    Raises:
        TreeError: in a call of the returned function, the batch dims of the arguments have
            different sizes, or the axes do not fit the arguments. The message lists the sizes of
            all batch dims.

    Source: jax.vmap.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.vmap(lambda x, y: (x * y).sum(), in_axes=(0, None))(
        ...     torch.eye(2), torch.tensor([1.0, 2.0])
        ... )
        tensor([1., 2.])
    """
    check_function("vmap", fn)
    check_settings(name_of(fn), axis_size, axis_name)
    check_randomness(name_of(fn), randomness)
    return Vmap((fn,), in_axes, out_axes, axis_size, axis_name, spmd_axis, randomness)
