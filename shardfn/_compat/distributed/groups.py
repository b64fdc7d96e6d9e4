"""Process groups by name, meshes, and DTensors and their specs without torch's checks."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the functional collective ops
import torch.distributed.nn  # its functions hold the group that they find when imported
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

# Private members of torch, each by a name of ours.
local_tensor = operator.attrgetter("_local_tensor")  # of a DTensor
spec_of = operator.attrgetter("_spec")  # of a DTensor: mesh, placements, global shape


# the collectives that return their results
FUNCTIONAL = torch.distributed._functional_collectives


def named(owner: Any, rows: Mapping[str, Any]) -> dict[Any, Any]:
    """Build a table keyed by the functions of a module with these names, where it has them."""
    return {getattr(owner, name): row for name, row in rows.items() if hasattr(owner, name)}


def group_tag(group: Any) -> str:
    """Return the tag of a process group."""
    return dist.distributed_c10d._get_group_tag(group)


def name_of_group(ranks: Sequence[int], tag: str) -> str | None:
    """Look up the name of the process group with these ranks and tag. None if this rank is in no
    such group.
    """
    find = dist.distributed_c10d._resolve_group_name_by_ranks_and_tag
    try:
        return find(list(ranks), tag)
    except ValueError:  # without a text
        return None


def fake_store() -> Any:
    """Make the store of a fake process group, without other processes."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def own_store() -> Any:
    """Make the in-memory store of a one-process group."""
    return torch._C._distributed_c10d.HashStore()


@contextlib.contextmanager
def rules_kept() -> Iterator[None]:
    """Patch new process groups to leave Dynamo's table of rules cached. Torch rebuilds it for
    each group, in 40 ms.
    """
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    table: Any = getattr(rules, "get_torch_obj_rule_map", None)
    if table is None or not table.cache_info().currsize or dist.get_rank not in table():
        yield
        return
    with mock.patch.object(rules, "clear_lru_cache", lambda: None):
        yield


def register_group(name: str, group: dist.ProcessGroup) -> None:
    """Register this rank's process group under a name that is the same on every rank."""
    registry = torch._C._distributed_c10d
    try:
        if registry._resolve_process_group(name) == group:
            return
        registry._unregister_process_group(name)
    except RuntimeError:
        pass  # the name is unused
    registry._register_process_group(name, group)


def leave_groups() -> None:
    """Destroy all process groups and end their threads, also those that meshes hold."""
    meshes = [x for x in gc.get_objects() if type(x) is DeviceMesh]
    for mesh in meshes:
        getattr(mesh, "_pg_registry", {}).clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


TABLES = (  # of torch's process groups
    *("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"),
    "pg_coalesce_state",
)


@contextlib.contextmanager
def groups_set_aside() -> Iterator[None]:
    """Hide all process groups of torch in a context, and restore them afterwards. Groups created
    inside must have ended.
    """
    c10d: Any = torch.distributed.distributed_c10d
    world, registry = c10d._world, torch._C._distributed_c10d
    default, count = world.default_pg, world.group_count
    tables = [(table, dict(table)) for table in (getattr(world, name) for name in TABLES)]
    comms = [*world.comms]

    def end_new() -> None:  # in place of all: groups are named by how many there have been
        for number in range(count, world.group_count):
            with contextlib.suppress(RuntimeError):
                registry._unregister_process_group(str(number))

    for table, _ in tables:
        table.clear()
    world.comms.clear()
    c10d._update_default_pg(None)
    try:
        with mock.patch.object(c10d, "_unregister_all_process_groups", end_new):
            yield
    finally:
        for table, rows in tables:
            table.clear()
            table.update(rows)
        world.comms[:] = comms
        world.group_count = count
        c10d._update_default_pg(default)


def root_mesh(mesh: Any) -> Any:
    """Return the mesh that a mesh is a slice of, or the mesh itself."""
    root = getattr(mesh, "_get_root_mesh", None)
    return (
        root()
        if root is not None
        else torch.distributed.device_mesh._mesh_resources.get_root_mesh(mesh)
    )


def flattened_meshes(mesh: Any) -> dict[str, Any]:
    """Return the one-axis meshes that `_flatten` has made of a root mesh, by name."""
    return getattr(root_mesh(mesh), "_flatten_mapping", {})


def entered_meshes() -> list[Any]:
    """Return the meshes that this thread has entered by torch's `with mesh:`, the innermost
    last.
    """
    return torch.distributed.device_mesh._mesh_resources.mesh_stack


def named_group(name: str) -> dist.ProcessGroup:
    """Look up this rank's process group of a name."""
    return torch._C._distributed_c10d._resolve_process_group(name)


def wait_later(out: torch.Tensor, work: Any) -> None:
    """Register a Work handle for a buffer, so that `wait_tensor` of it waits for the
    communication.
    """
    torch._C._distributed_c10d._register_work(out, work)


def dtensor_spec(
    mesh: Any, placements: tuple[Placement, ...], shape: Any, stride: Any, dtype: torch.dtype
) -> Any:
    """Make a DTensorSpec of a mesh, placements and global shape, stride and dtype."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    return DTensorSpec(mesh, placements, TensorMeta(torch.Size(shape), tuple(stride), dtype))


def split_factor(placement: Placement) -> int | None:
    """Return the split factor of a _StridedShard; None for another placement."""
    from torch.distributed.tensor.placement_types import _StridedShard

    if type(placement) is not _StridedShard:
        return None
    return int(placement.split_factor)


def strided_shard(dim: int, blocks: int) -> Placement:
    """Make torch's _StridedShard: a chunk of each of so many blocks of a dim."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=blocks)


@functools.cache
def _unreduced_class() -> type:
    """Make the DTensorSpec subclass of unreduced gradients."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    class UnreducedSpec(DTensorSpec):
        """The spec of an unreduced gradient. It differs from the specs of other Partial values."""

        def __eq__(self, other: object) -> bool:
            return type(other) is type(self) and super().__eq__(other)

        __hash__ = DTensorSpec.__hash__

    return UnreducedSpec


def unreduced_spec(spec: Any) -> Any:
    """Convert a spec to that of a gradient that leaves a program before its reduction."""
    return _unreduced_class()(spec.mesh, spec.placements, spec.tensor_meta)


def is_unreduced(spec: Any) -> bool:
    """Check whether a spec is that of an unreduced gradient."""
    return type(spec) is _unreduced_class()


@functools.cache
def _gone_class() -> type:
    """Make the DTensorSpec subclass of donated tensors."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    class GoneSpec(DTensorSpec):
        def __eq__(self, other: object) -> bool:
            return False

        def __hash__(self) -> int:
            return id(self)

    return GoneSpec


def gone_spec(spec: Any) -> Any:
    """Copy a spec for a donated tensor; the copy equals no other spec."""
    return _gone_class()(spec.mesh, spec.placements, spec.tensor_meta)


def dtensors(
    locals_: Sequence[torch.Tensor], specs: Sequence[Any], kind: Any = DTensor
) -> list[DTensor]:
    """Wrap local tensors as DTensors with these specs, without torch's checks.

    Args:
        locals_: the local tensors.
        specs: of each.
        kind: the class of all, or a list with that of each.
    """
    kinds = kind if isinstance(kind, list) else [kind] * len(specs)
    make = getattr(torch.Tensor, "_dtensor__new__", None)
    if make is None:
        rows = zip(kinds, locals_, specs, strict=True)
        return [each(x, spec, requires_grad=False) for each, x, spec in rows]
    assert len(locals_) == len(specs) == len(kinds)
    # its last argument: requires_grad. A call of it in C takes 0.9 us, and one in Python 1.1
    return list(map(make, kinds, locals_, specs, repeat(False)))


def empty_dtensor(
    mesh: Any,
    placements: Sequence[Placement],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
) -> DTensor:
    """Make a DTensor on the meta device, with this rank's local shape."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
    local = torch.empty(sizes, dtype=dtype, device="meta")
    spec = dtensor_spec(mesh, tuple(placements), shape, stride, dtype)
    return dtensors([local], [spec])[0]


def with_own_masks(x: DTensor) -> DTensor:
    """Copy a DTensor's masked placements. torch shares the mask of a lookup in a row-sharded
    table until the result is reduced: the next lookup would meet one without values (torch
    2.13).
    """
    spec = spec_of(x)
    masked = [p for p in spec.placements if hasattr(p, "mask_buffer")]
    if not masked:
        return x
    placements = tuple(map(copy.copy, spec.placements))
    for shared, own in zip(spec.placements, placements, strict=True):
        if hasattr(shared, "mask_buffer"):
            mask = shared.mask_buffer
            object.__setattr__(own, "mask_buffer", copy.copy(mask))
            mask.data, mask.refcount = None, 0
    spec = dtensor_spec(spec.mesh, placements, tuple(spec.shape), tuple(spec.stride), x.dtype)
    return dtensors([local_tensor(x)], [spec])[0]


def is_arriving(x: torch.Tensor) -> bool:
    """Check whether a tensor is an AsyncCollectiveTensor, whose collective has not been waited
    for.
    """
    return isinstance(x, torch.distributed._functional_collectives.AsyncCollectiveTensor)


def shardings_forgotten() -> None:
    """Clear DTensor's caches of sharding propagation, which hold meshes of a world that has
    ended.
    """
    from torch.distributed.tensor import DTensor

    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
