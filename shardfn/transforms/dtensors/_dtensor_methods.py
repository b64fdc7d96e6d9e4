"""DTensor's methods and factory functions inside a captured function, in terms of our prims.

A DTensor is a global tensor; `from_local` and `to_local` convert between it and local tensors.

Dynamo reads this.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from ... import _compat
from ...capture.dtensors import placement_checks, replaced_calls
from ...capture.dtensors.mesh_contexts import in_mesh
from ...errors import PlacementError
from ...mesh import use_mesh
from ...ops import placement
from ...ops import shard_map as prims
from ...ops.text_formats import print_axes
from ...placement import P
from .._paired import is_divided, kind, multiples, numbers
from ._collective_values import of_rank

FROM_LOCAL = "DTensor.from_local"
DISTRIBUTE = "distribute_tensor"


@_compat.read_by_dynamo
def from_local(
    local_tensor: torch.Tensor,
    device_mesh: Any = None,
    placements: Any = None,
    *,
    run_check: bool = False,
    shape: Any = None,
    stride: Any = None,
    grad_placements: Any = None,
) -> torch.Tensor:
    """DTensor.from_local. A replicated placement says that all ranks have the same tensor."""
    _check_tensor(FROM_LOCAL, local_tensor)
    # any local size makes shards of equal sizes
    local = multiples(local_tensor, 1) if shape is None else kind(local_tensor)[0]
    rows = placement_checks.checked_placements(
        FROM_LOCAL, device_mesh, None, _said(FROM_LOCAL, placements), local
    )
    shards = placement_checks.check_shape(
        FROM_LOCAL, rows, local, None if shape is None else tuple(shape)
    )
    _check_gradient(FROM_LOCAL, device_mesh, None, grad_placements, local)
    x = placement.forbid_writes(local_tensor, "a DTensor")
    same = tuple([name for name, _, said in rows if said == "R"])
    x = of_rank(x, 0, same) if same and run_check else x
    placed = joined(x, rows, shards)
    if stride is not None:
        shape = numbers(placed)
        strides = tuple([int(n) for n in placed.stride()])
        placement_checks.check_stride(FROM_LOCAL, shape, strides, tuple(stride))
    return placed


@_compat.read_by_dynamo
def joined(x: torch.Tensor, rows: Any, shards: str) -> torch.Tensor:
    """Make a DTensor of local tensors, with placements as (axis, size, placement) rows and as the
    text that the prim takes.
    """
    same = tuple([name for name, _, said in rows if said == "R"])
    x = _invariant(x, same) if same else x
    for name, n, said in rows:
        if said[0] == "P":
            x = _reduced(x, name, n, said[1:])
    x = prims.from_local(x, shards, where=f"{FROM_LOCAL}: its argument")
    return placement.placed(x, placement_checks.placements_text(rows))


@_compat.read_by_dynamo
def redistribute(
    x: torch.Tensor,
    placed: str | None,
    device_mesh: Any = None,
    placements: Any = None,
    *,
    async_op: bool = False,
    forward_dtype: Any = None,
    backward_dtype: Any = None,
) -> torch.Tensor:
    """Run DTensor.redistribute. With async_op the program waits where the result is read."""
    what = "DTensor.redistribute"
    if placements is None:
        placement_checks.refuse_option(
            what, "without placements", "x.redistribute(mesh, [Replicate()])"
        )
    is_constraint = placement_checks.is_constraint()
    if not is_constraint:
        placement_checks.refuse_plain(what, placed)
    rows = placement_checks.checked_placements(
        what, device_mesh, placed, _said(what, placements), kind(x)[0]
    )
    placement_checks.refuse_partial(what, rows)
    _check_dtype(f"{what}, forward_dtype", forward_dtype)
    _check_dtype(f"{what}, backward_dtype", backward_dtype)
    text = placement_checks.placements_text(rows)
    if is_constraint:
        y = placement.moved(x, text, text, forward_dtype, backward_dtype)
        return placement.forget_dtensor(y)
    return placement.moved(x, text, placed or "", forward_dtype, backward_dtype)


@_compat.read_by_dynamo
def _check_dtype(what: str, dtype: Any) -> None:
    """Refuse a forward_dtype or backward_dtype of redistribute that is no torch.dtype."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        got = f"a {type(dtype).__name__}"
        placement_checks.refuse_option(what, got, "a dtype, such as torch.bfloat16")


@_compat.read_by_dynamo
def _placed(x: torch.Tensor, rows: Any, is_constraint: bool) -> torch.Tensor:
    """Constrain a global tensor to placements; as a DTensor, or inside `shard` as a
    plain tensor.
    """
    text = placement_checks.placements_text(rows)
    y = placement.placed(x, text)
    return placement.forget_dtensor(y) if is_constraint else y


@_compat.read_by_dynamo
def to_local(x: torch.Tensor, placed: str | None, *, grad_placements: Any = None) -> torch.Tensor:
    """Run DTensor.to_local. Where ranks use the local tensor with values that differ, its gradient
    is summed over them; `grad_placements` decides for a replicated DTensor that meets plain
    arguments.
    """
    what = "DTensor.to_local"
    rows = placement_checks.placement_rows(what, placed)
    _check_gradient(what, None, placed, grad_placements, kind(x)[0])
    for name, _, said in rows:
        if said[0] == "P":
            x = prims.own_term(x, name, said[1:])
    shape = multiples(x, math.prod([n for _, n, _ in rows]))
    shards = placement_checks.shards_of(what, rows, shape)
    if not is_divided(x, shards):
        shards = placement_checks.shards_of(what, rows, numbers(x))
    x = prims.to_local(x, shards)
    replicated = [name for name, _, said in rows if said == "R"]
    if grad_placements is None:
        return placement.forbid_writes(x, "a DTensor", "", print_axes(replicated))
    pairs = zip(rows, grad_placements, strict=True)
    terms = [row[0] for row, p in pairs if p.is_partial()]
    equal = [name for name in replicated if name not in terms]
    return placement.forbid_writes(x, "a DTensor", print_axes(equal))


@_compat.read_by_dynamo
def _check_gradient(
    what: str, mesh: Any, placed: str | None, said: Any, shape: tuple[int, ...]
) -> None:
    """Refuse `grad_placements` that the DTensor's mesh and shape do not allow."""
    if said is not None:
        what = f"{what}, grad_placements"
        placement_checks.checked_placements(what, mesh, placed, _said(what, said), shape)


@_compat.read_by_dynamo
def full_tensor(
    x: torch.Tensor, placed: str | None, *, grad_placements: Any = None
) -> torch.Tensor:
    """Run DTensor.full_tensor: all-gather, and return the plain tensor."""
    what = "DTensor.full_tensor"
    if placement_checks.is_constraint():
        rows = placement_checks.checked_placements(what, None, placed, None, kind(x)[0])
        return _placed(x, rows, True)
    text = placement_checks.replicated_text(what, placed)
    _check_gradient(what, None, placed, grad_placements, kind(x)[0])
    x = placement.moved(x, text, placed or "")
    return to_local(x, text, grad_placements=grad_placements)


@_compat.read_by_dynamo
def distributed(
    tensor: torch.Tensor,
    device_mesh: Any = None,
    placements: Any = None,
    *,
    src_data_rank: int | None = 0,
) -> torch.Tensor:
    """Run distribute_tensor: shard the tensor of rank `src_data_rank`; if that is None, each rank
    shards its own equal copy.
    """
    _check_tensor(DISTRIBUTE, tensor)
    if isinstance(tensor, DTensor):
        return tensor.redistribute(device_mesh, placements)
    shape = kind(tensor)[0]
    rows = placement_checks.checked_placements(
        DISTRIBUTE, device_mesh, None, _said(DISTRIBUTE, placements), shape
    )
    placement_checks.refuse_partial(DISTRIBUTE, rows)
    if placement_checks.is_constraint():
        return _placed(tensor, rows, True)
    axes = tuple([name for name, _, _ in rows])
    if src_data_rank is None:
        x = _invariant(tensor, axes)
    else:
        x = of_rank(tensor, _source(rows, src_data_rank), axes)
    return placement.placed(x, placement_checks.placements_text(rows))


@_compat.read_by_dynamo
def _source(rows: Any, rank: int) -> int:
    """Return the linear rank whose coordinate is `rank` on every mesh axis, the sender of
    distribute_tensor.
    """
    number = 0
    for name, n, _ in rows:
        if not 0 <= rank < n:
            got = f"src_data_rank is {rank}, but axis {name} has {n} ranks"
            placement_checks.refuse_option(
                DISTRIBUTE, got, "a src_data_rank below the size of each mesh axis, or None"
            )
        number = number * n + rank
    return number


@_compat.read_by_dynamo
def _invariant(x: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
    """Treat a local tensor as invariant over mesh axes, as the user's code states it."""
    return prims.as_invariant(x, print_axes(axes))


@_compat.read_by_dynamo
def placements_of(placed: str | None) -> tuple[Any, ...]:
    """Return DTensor.placements as torch's Placement objects."""
    rows = placement_checks.placement_rows("DTensor.placements", placed)
    return tuple([_placement(said) for _, _, said in rows])


@_compat.read_by_dynamo
def partial_of(placed: str | None) -> str:
    """Return the printed placements of a Partial DTensor; "" for one that is not Partial."""
    return placed if placed is not None and "=P" in placed else ""


@_compat.read_by_dynamo
def spec_of(placed: str | None) -> Any:
    """Refuse the private attribute DTensor._spec."""
    fix = "x.placements, x.device_mesh, x.shape and x.stride()"
    placement_checks.refuse_option("DTensor._spec", "a private attribute", fix)


@_compat.read_by_dynamo
def _placement(said: str) -> Any:
    if said[0] == "S":
        return Shard(int(said[1:]))
    return Partial(said[1:]) if said[0] == "P" else Replicate()


@_compat.constant_in_graph
def _refuse_no_placements(what: str, got: str) -> None:
    """Refuse a value that is not a list of placements.

    Raises:
        PlacementError: always.
    """
    name, _, argument = what.partition(", ")
    raise PlacementError.of(
        f"{name}, {argument or 'placements'}",
        f"got {got}",
        needed="a list of Shard, Replicate and Partial, one for each axis of the mesh",
        fix="[Shard(0)]",
    )


@_compat.read_by_dynamo
def _said(what: str, placements: Any) -> Any:
    """Print a list of torch Placements as constants that Dynamo carries: `S0`, `R` or `Psum`."""
    if placements is None:
        return None
    rows: Any = placements
    if isinstance(placements, Placement | P | str | int | float):
        _refuse_no_placements(what, type(placements).__name__)
    return tuple([_one(what, p) for p in rows])


@_compat.read_by_dynamo
def _one(what: str, p: Any) -> str:
    if not isinstance(p, Placement):
        _refuse_no_placements(what, f"a list with a {type(p).__name__}")
    if p.is_shard():
        return f"S{p.dim}"
    if p.is_partial():
        return f"P{p.reduce_op}"
    return "R" if isinstance(p, Replicate) else f"?{type(p).__name__}"


@_compat.read_by_dynamo
def _check_tensor(what: str, x: Any) -> None:
    """Refuse a first argument that is no tensor."""
    if not isinstance(x, torch.Tensor):
        kind_of = type(x).__name__
        placement_checks.refuse_option(what, f"its first argument is a {kind_of}", "a tensor")


@_compat.read_by_dynamo
def _reduced(x: torch.Tensor, axis: str, n: int, kind: str) -> torch.Tensor:
    """Reduce the terms that the ranks of an axis hold, by sum, avg, max or min."""
    if kind in ("max", "min"):
        return prims.extremum(x, axis, kind)
    return prims.psum(x / n if kind == "avg" else x, axis, True)


@_compat.read_by_dynamo
def _made(make: Any, name: str, size: tuple[Any, ...], options: Any) -> torch.Tensor:
    """Make a DTensor by a factory such as torch.zeros, after checking its size and placements."""
    what = f"torch.distributed.tensor.{name}"
    size = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    shape = tuple([int(n) for n in size])
    mesh = options.get("device_mesh")
    placements = options.get("placements")
    rows = placement_checks.checked_placements(what, mesh, None, _said(what, placements), shape)
    placement_checks.refuse_partial(what, rows)
    x = make(shape, dtype=options.get("dtype"))
    return _placed(x, rows, placement_checks.is_constraint())


def _factory(make: Any, name: str) -> Any:
    """Build the replacement of a factory of torch.distributed.tensor, such as `zeros`."""

    @_compat.read_by_dynamo
    def made(*size: Any, **options: Any) -> torch.Tensor:
        return _made(make, name, size, options)

    return made


@_compat.read_by_dynamo
def full(size: Any, fill_value: Any, **options: Any) -> torch.Tensor:
    """Run torch.distributed.tensor.full."""
    make = lambda shape, dtype: torch.full(shape, fill_value, dtype=dtype)
    return _made(make, "full", (size,), options)


replaced_calls.METHODS.update(
    {"redistribute": redistribute, "to_local": to_local, "full_tensor": full_tensor}
)
replaced_calls.ATTRIBUTES["placements"] = placements_of
replaced_calls.ATTRIBUTES["_spec"] = spec_of
replaced_calls.ATTRIBUTES[replaced_calls.PARTIAL] = partial_of
replaced_calls.ATTRIBUTES[replaced_calls.PART] = placement_checks.placements_on_part
replaced_calls.FUNCTIONS.update(
    {
        use_mesh: in_mesh,
        DeviceMesh.__enter__: in_mesh,
        DTensor.from_local: from_local,
        distribute_tensor: distributed,
        torch.distributed.tensor.full: full,
    }
)
FACTORIES = {  # empty is zeros: its values would differ by rank
    "zeros": torch.zeros,
    "ones": torch.ones,
    "empty": torch.zeros,
    "rand": torch.rand,  # the numbers that one device would draw here
    "randn": torch.randn,
}
replaced_calls.FUNCTIONS.update(
    {
        getattr(torch.distributed.tensor, name): _factory(make, name)
        for name, make in FACTORIES.items()
    }
)
