"""shard_map: per-rank code with explicit collectives, inside a program of global tensors or on
its own.

Dynamo reads this.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import torch
from torch.distributed.tensor import Placement, Replicate

from ... import _compat, _tree, tree_pairs
from ...capture.shard_map import axis_names as named
from ...capture.shard_map.placements import shard_texts
from ...errors import PlacementError, TreeError
from ...mesh import axes_of, check_mesh
from ...ops import shard_map as manual
from ...placement import P
from ...runtime import Request
from .._options import check_function
from .._paired import is_divided, multiples, numbers
from .._transformed import Transformed, argument_names, innermost, name_of, parameters_of


@attrs.define(eq=False, repr=False, slots=False)
class ShardMap(Transformed):
    """A function under `shard_map`."""

    verb: ClassVar[str] = "shard_map"
    may_be_of_ranks: ClassVar[bool] = False
    held: tuple[Callable[..., Any]]
    mesh: Any
    axis_names: tuple[str, ...] | None
    ins: Any
    outs: Any
    backend: str
    dynamic: Any

    def inline(self, *args: Any, **kwargs: Any) -> Any:
        where = f"shard_map({name_of(self.fn)})"
        check_given(where, len(args), self.ins is not None)
        axes = named.enter_mesh(where, self.mesh, self.axis_names)
        parameters = parameters_of(self.fn)
        names = argument_names(parameters, args, kwargs)
        paths = _paths(names, [*args, *kwargs.values()])
        specs, wrong = tree_pairs.by_parameter(self.ins, parameters, args, kwargs, _is_leaf)
        leaves = _tree.quick_leaves((args, kwargs))
        texts = _texts((where, "in_placements", axes, paths), leaves, specs, wrong)
        local_args, local_kwargs = _to_local((args, kwargs), texts)
        out = (self.fn(*local_args, **local_kwargs),)
        names = ("placements", "the values")
        specs, wrong = tree_pairs.pair(self.outs, out[0], names, "result", _is_leaf)
        paths = _paths(["result"], out)
        place = (where, "out_placements", axes, paths)
        texts = _texts(place, _tree.quick_leaves(out), specs, wrong)
        (result,) = _from_local(f"{where}, out_placements", out, texts)
        named.unbind_last(len(axes))
        return result

    def asked(self) -> Request:
        every = self.axis_names is None or (
            self.mesh is not None and set(self.axis_names) >= set(axes_of(self.mesh).names)
        )
        placements = {"in_placements": self.ins, "out_placements": self.outs} if every else {}
        fn = innermost(self.fn)
        return Request(
            self.__name__,
            self.inline,
            fn,
            mesh=self.mesh,
            needs_mesh=True,
            backend=self.backend,
            dynamic=self.dynamic,
            **placements,
        )

    def options(self) -> Any:
        return (self.mesh, self.axis_names, self.ins, self.outs, self.backend, self.dynamic)


@_compat.constant_in_graph
def check_given(where: str, count: int, is_given: bool) -> None:
    """Check that `in_placements` is given: the result of the function depends on it.

    Raises:
        TreeError: it is not given.
    """
    if count and not is_given:
        fix = "in_placements=P('axis') for a sharded argument, P() for a replicated one"
        got = f"in_placements is missing, but the call has {count} arguments"
        raise TreeError.of(f"{where}, in_placements", got, needed="a placement for each", fix=fix)


@_compat.constant_in_graph
def check_axis_names(where: str, names: tuple[Any, ...] | None) -> None:
    """Check that axis names are strs, each given once.

    Raises:
        PlacementError: they are not.
    """
    if names is not None and (
        not all(isinstance(n, str) for n in names) or len(set(names)) < len(names) or not names
    ):
        fix = "axis_names=('dp',), or None for all axes"
        got = f"axis_names is {names!r}"
        raise PlacementError.of(
            f"{where}, axis_names", got, needed="names of mesh axes, each once", fix=fix
        )


def _paths(names: list[str], trees: Any) -> tuple[str, ...]:
    """The path of each leaf of trees that have names."""
    rows = zip(names, trees, strict=True)
    return tuple([path for name, x in rows for path in _tree.quick_paths(x, name)])


def _to_local(args: tuple[Any, Any], texts: Any) -> tuple[Any, Any]:
    """The arguments with local tensors for global ones."""
    leaves = [
        manual.to_local(x, text) if isinstance(x, torch.Tensor) else x
        for x, (text, *_) in zip(_tree.quick_leaves(args), texts, strict=True)
    ]
    return _tree.refill(args, leaves)


def _from_local(where: str, out: tuple[Any, ...], texts: Any) -> tuple[Any, ...]:
    """A result with global tensors for local ones, which may be terms of a Partial sum."""
    leaves = []
    paths = _tree.quick_paths(out[0], "result")
    rows = zip(_tree.quick_leaves(out), paths, texts, strict=True)
    for x, path, (text, partial, shares) in rows:
        if isinstance(x, torch.Tensor):
            x = x / shares if shares else x
            x = manual.psum(x, partial, True) if partial else x
            x = manual.from_local(x, text, where=f"{where}: {path}")
        leaves.append(x)
    return _tree.refill(out, leaves)


def _texts(place: tuple[Any, ...], leaves: list[Any], specs: list[Any], wrong: list[str]) -> Any:
    """For each leaf, how the manual axes shard it, and over which it is Partial, as `shard_texts`
    returns it.
    """
    found = [_constant(spec) if _is_leaf(spec) else None for spec in specs]
    return _cuts(place, leaves, (tuple(found), tuple(wrong)))


def _cuts(place: tuple[Any, ...], leaves: list[Any], placements: tuple[Any, ...]) -> Any:
    """How the manual axes shard leaves, as `shard_texts` returns it. The sizes that Dynamo has
    read as symbols stay such if the axes divide them.
    """
    count = math.prod([n for _, n in place[2]])
    shapes = [multiples(x, count) if _is_tensor(x) else None for x in leaves]
    texts = shard_texts(*place, tuple(shapes), *placements)
    if place[1] == "out_placements":
        return texts  # any local size makes shards of equal sizes
    rows = [(x, text[0]) for x, text in zip(leaves, texts, strict=True)]
    uneven = [x for x, text in rows if _is_tensor(x) and not is_divided(x, text)]
    if not uneven:
        return texts
    shapes = [numbers(x) if _is_tensor(x) else None for x in leaves]
    return shard_texts(*place, tuple(shapes), *placements)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _is_leaf(spec: Any) -> bool:
    listed = (
        isinstance(spec, list) and len(spec) > 0 and all(isinstance(p, Placement) for p in spec)
    )
    return spec is None or isinstance(spec, (P, Placement)) or listed


def _constant(spec: Any) -> Any:
    """A leaf as constants: Dynamo passes only constants to functions that it does not trace."""
    if spec is None:
        return None
    if isinstance(spec, P):
        return ("stages", repr(spec)) if spec.stages else ("names", spec.parts)
    every = spec if isinstance(spec, list) else [spec]
    return "placements", tuple([_placement(p) for p in every])


def _placement(p: Placement) -> tuple[Any, ...]:
    if p.is_shard():
        return "S", p.dim
    if p.is_partial():
        return "P", p.reduce_op
    return ("R",) if isinstance(p, Replicate) else ("?", type(p).__name__)


def shard_map(
    fn: Callable[..., Any] | None = None,
    mesh: Any = None,
    in_placements: Any = None,
    out_placements: Any = None,
    *,
    axis_names: Any = None,
    backend: str = "inductor",
    dynamic: Any = None,
) -> Any:
    """Run a function on the local tensors of each rank, with explicit collectives.

    The gradient of an invariant value is summed over the ranks, as in `jax.shard_map`.

    Args:
        fn: a function of local tensors, which may call `psum`, `all_gather` and other collectives
            over the mesh axes. Without fn, `shard_map` returns a decorator.
        mesh: a DeviceMesh; by default, the mesh of the enclosing call, or of the innermost
            `use_mesh`.
        in_placements: a prefix tree over the parameters in their order, or a dict by parameter
            name. `in_placements` is needed if fn has positional arguments. Each leaf of
            `in_placements` is a `P`, one Placement (1-D meshes), a list of Placements, or None,
            which means replicated. The size of a sharded dim must be divisible by the sizes of its
            mesh axes.
        out_placements: the placements of the results: a prefix tree over the result. A result that
            is not sharded over an axis must be invariant over the axis, so varying results must be
            reduced or gathered. With `Partial()` or `Partial("avg")` in `out_placements`, the
            results of the ranks are terms of a sum or mean.
        axis_names: the mesh axes over which fn works on local tensors. By default, fn works on
            local tensors over all axes that no enclosing `shard_map` uses. On all other axes, the
            values in fn are global tensors, and sharding propagation chooses their placements.
        backend: the backend that compiles the program, "inductor" or "aten".
        dynamic: the dims of arguments whose sizes may change between calls, as in `jit`. `backend`
            and `dynamic` have an effect only if `shard_map` is the outermost transform.

    Returns:
        A function whose arguments and results are global tensors. If `shard_map` is the outermost
        transform, the results are DTensors, and the function has the methods `.trace`, `.lower` and
        `.compile`.

    Raises:
        PlacementError: in a call of the returned function, a dim cannot be split into equal shards,
            an axis is unknown or is used by an enclosing `shard_map`, or a result varies over an
            axis and is not sharded over it. The message names the argument or the result.
        TreeError: in a call of the returned function, placements are missing or do not match the
            arguments.

    Source: jax.shard_map, with varying manual axes.

    Example:
        >>> import torch, shardfn as sf
        >>> with sf.fake_world(4):
        ...     mean = sf.shard_map(
        ...         lambda x: sf.pmean(x.mean(), "dp"),
        ...         sf.make_mesh((4,), ("dp",)),
        ...         sf.P("dp"),
        ...         sf.P(),
        ...     )
        ...     sf.full(mean(torch.arange(8.0)))
        tensor(3.5000)
    """
    arguments = (mesh, in_placements, out_placements, axis_names, backend, dynamic)
    return functools.partial(_mapped, arguments=arguments) if fn is None else _mapped(fn, arguments)


def _mapped(fn: Callable[..., Any], arguments: tuple[Any, ...]) -> ShardMap:
    mesh, ins, outs, axis_names, backend, dynamic = arguments
    check_function("shard_map", fn, ", mesh, ...")
    wanted = (
        axis_names
        if axis_names is None or isinstance(axis_names, (tuple, list, set, frozenset))
        else (axis_names,)
    )
    wanted = None if wanted is None else tuple(wanted)
    check_axis_names(f"shard_map({name_of(fn)})", wanted)
    transformed = ShardMap((fn,), mesh, wanted, ins, outs, backend, dynamic)
    if not _compat.is_tracing():
        check_mesh("shard_map", mesh, or_none=True)
        transformed.request  # noqa: B018
    return transformed
