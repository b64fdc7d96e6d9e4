"""The two sides of a comparison: a function at placements on a mesh, in a dtype, as its user wrote
them.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor

from ... import _tree
from ...errors import FakeValueError, ShardError, call_site
from ...mesh import axes_of, make_mesh
from ...random import ambient
from ...runtime.arguments import taken
from ...runtime.compiled import Compiled
from ...transforms import full, jit
from ...transforms import shard as shard_fn
from ...transforms.sharding._shard import Shard
from ...world import current_world, fake_world
from .values_of_ranks import Values, values_of

OWN = ("fn", "mesh", "dtype")
# of shard: what says how a step is compiled or called changes no value
OPTIONS = tuple(
    name
    for name in inspect.signature(shard_fn).parameters
    if name not in ("fn", "mesh", "backend", "warmup", "cuda_graphs", "donate_argnums", "dynamic")
)
OF_ONE_DEVICE = ("static_argnums", "seed")
EXAMPLE = "a=dict(mesh={'dp': 4}, in_placements=(None, P('dp'))), b=None for one device"


@attrs.frozen(eq=False)
class Layout:
    """One side of a comparison.

    Args:
        name: "a" or "b", for errors.
        fn: the function.
        mesh: a DeviceMesh, a dict of axis names and sizes, or None for one device.
        dtype: of floating arguments; None leaves them as they are.
        options: of `shard`.
    """

    name: str
    fn: Callable[..., Any]
    mesh: Any
    dtype: torch.dtype | None
    options: dict[str, Any]


@attrs.frozen(eq=False)
class Side:
    """One side of a comparison, run.

    Args:
        layout: the layout.
        compiled: its program.
        values: its values.
    """

    layout: Layout
    compiled: Compiled
    values: Values


def layout_of(where: str, name: str, step: Any, given: Any) -> Layout:
    """Read one side of a comparison.

    Args:
        where: the public function, for errors.
        name: of the argument.
        step: the function that is compared; under `shard`, its options are the defaults.
        given: a dict of options, or None for one device.

    Raises:
        ShardError: it is neither, or an option is unknown or cannot be alone.
    """
    if given is None:
        fn = step.fn if isinstance(step, Shard) else step
        known = step.arguments if isinstance(step, Shard) else {}
        return Layout(name, fn, None, None, {k: known[k] for k in OF_ONE_DEVICE if k in known})
    place = f"{where}, argument {name}"
    if not isinstance(given, Mapping):
        got = f"it is {type(given).__name__}"
        raise ShardError.of(place, got, needed="a dict of options, or None", fix=EXAMPLE)
    unknown = [k for k in given if k not in (*OWN, *OPTIONS)]
    if unknown:
        got = f"unknown options: {', '.join(map(repr, unknown))}"
        raise ShardError.of(
            place, got, needed=f"some of {', '.join((*OWN, *OPTIONS))}", fix=EXAMPLE
        )
    base: dict[str, Any] = {}
    fn = given.get("fn", step)
    if isinstance(fn, Shard):
        base = {k: x for k, x in fn.arguments.items() if k in ("mesh", *OPTIONS)}
        fn = fn.fn
    elif isinstance(step, Shard) and "mesh" not in given:
        base = {k: x for k, x in step.arguments.items() if k in ("mesh", *OPTIONS)}
    if not callable(fn):
        got = f"fn is {type(fn).__name__}"
        raise ShardError.of(place, got, needed="a function", fix=f"{name}=dict(fn=step)")
    dtype = given.get("dtype")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        got = f"dtype is {dtype!r}"
        raise ShardError.of(place, got, needed="a floating dtype", fix="dtype=torch.bfloat16")
    options = {**base, **{k: x for k, x in given.items() if k in ("mesh", *OPTIONS)}}
    mesh = options.pop("mesh", None)
    _check_mesh(place, mesh)
    if mesh is None:
        alone = [k for k, x in options.items() if x is not None and k in given]
        alone = [k for k in alone if k not in OF_ONE_DEVICE]
        if alone:
            got = f"{', '.join(alone)} without a mesh"
            raise ShardError.of(place, got, fix=f"{name}=dict(mesh={{'dp': 4}}, {alone[0]}=...)")
        options = {k: options[k] for k in OF_ONE_DEVICE if k in options}
    return Layout(name, fn, mesh, dtype, options)


def _check_mesh(place: str, mesh: Any) -> None:
    if mesh is None or hasattr(mesh, "mesh_dim_names"):
        return
    sizes = list(mesh.values()) if isinstance(mesh, Mapping) else []
    if sizes and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes):
        return
    needed = "a DeviceMesh, or a dict from axis names to sizes"
    raise ShardError.of(place, f"mesh is {mesh!r}", needed=needed, fix="mesh={'dp': 2, 'tp': 4}")


@contextlib.contextmanager
def staged(
    where: str, layout: Layout, args: tuple[Any, ...]
) -> Iterator[tuple[Compiled, list[Any]]]:
    """The program of a side and the leaves of its arguments, in its world. Random states are as
    before it at each run, and afterwards.

    Raises:
        ShardError: the world computes no values of all ranks.
    """
    before = ambient.state.get()
    try:
        with _mesh_of(where, layout) as mesh:
            placed = _arguments(where, layout, mesh, args)
            compiled = _compiled(layout, mesh, placed)
            leaves = leaves_of(compiled, placed)
            ambient.state.set(before)
            yield compiled, leaves
    finally:
        ambient.state.set(before)


def run(where: str, layout: Layout, args: tuple[Any, ...]) -> Side:
    """Run one side of a comparison for all its ranks.

    Raises:
        ShardError: the world computes no values of all ranks.
    """
    with staged(where, layout, args) as (compiled, leaves):
        return Side(layout, compiled, values_of(compiled, leaves))


def leaves_of(compiled: Compiled, args: tuple[Any, ...]) -> list[Any]:
    """The leaves of a call's arguments, as its program takes them."""
    kwargs: dict[str, Any] = {}
    around = compiled.request.around
    if around is not None:
        args, kwargs = around.entering(compiled.request, compiled.placed.mesh, args, kwargs)
    return taken(compiled.request, args, kwargs).leaves


@contextlib.contextmanager
def _mesh_of(where: str, layout: Layout) -> Iterator[Any]:
    """The mesh of a layout, in a simulated world."""
    world, mesh = current_world(), layout.mesh
    place = f"{where}, argument {layout.name}"
    if world.kind == "real" and world.size > 1:
        raise of_real_ranks(place)
    if world.kind == "fake":
        got, fix = "a world with numerics=False computes no values", "sf.fake_world(n)"
        raise FakeValueError.of(place, got, fix=fix, source=call_site())
    if mesh is None:
        yield None
        return
    if not isinstance(mesh, Mapping):
        if world.kind != "simulated":
            got, fix = "a DeviceMesh outside of a fake world", "with sf.fake_world(8): around it"
            raise ShardError.of(place, got, needed="simulated ranks", fix=fix, source=call_site())
        yield mesh
        return
    size = math.prod(mesh.values())
    if world.kind == "simulated" and world.size != size:
        got = f"the mesh {dict(mesh)} has {size} ranks, but the fake world has {world.size}"
        fix = f"use a mesh of {world.size} ranks, or call sf.compare outside of the fake world"
        raise ShardError.of(place, got, fix=fix, source=call_site())
    entered = contextlib.nullcontext() if world.kind == "simulated" else fake_world(size)
    with entered:
        yield make_mesh(tuple(mesh.values()), tuple(mesh), device_type="cpu")


def of_real_ranks(where: str) -> ShardError:
    """The error for real ranks, which have their own values alone."""
    return ShardError.of(
        where,
        "the ranks are real processes, and each has only its own values",
        needed="simulated ranks, in one process",
        fix="set SHARDFN_DIGESTS=path for the real run, then call sf.compare(path, other_path)",
        source=call_site(),
    )


def _arguments(where: str, layout: Layout, mesh: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments as a side takes them: detached, in its dtype, and global where they are
    DTensors of another mesh.
    """

    def own(x: Any) -> Any:
        if isinstance(x, DTensor) and (mesh is None or axes_of(x.device_mesh) != axes_of(mesh)):
            x = full(x)
        if isinstance(x, torch.Tensor) and x.requires_grad:
            x = x.detach()
        if layout.dtype is not None and isinstance(x, torch.Tensor) and x.is_floating_point():
            x = x.to(layout.dtype)
        return x

    placed = _tree.tree_map(own, args)
    tensors = [x for x in _tree.leaves(args) if isinstance(x, torch.Tensor)]
    if layout.dtype is not None and not any(x.is_floating_point() for x in tensors):
        got = f"dtype is {layout.dtype}, but no argument is a floating-point tensor"
        fix = "pass the tensors as arguments of the step, not as closed-over values"
        raise ShardError.of(f"{where}, argument {layout.name}", got, fix=fix, source=call_site())
    return placed


def _compiled(layout: Layout, mesh: Any, args: tuple[Any, ...]) -> Compiled:
    if mesh is None:
        fn = jit(layout.fn, backend="aten", **layout.options)
    else:
        fn = shard_fn(layout.fn, mesh, backend="aten", **layout.options)
    compiled = fn.compile(*args)
    if compiled.backward is None:
        return compiled
    with torch.no_grad():  # autograd follows a closed-over tensor: one program, without its halves
        return fn.compile(*args)
