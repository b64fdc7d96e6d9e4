"""Contexts inside a captured function, which hold while their body is traced: `with mesh:` and
`with use_mesh(mesh):` have a current mesh, and in `with loss_parallel():` the plain labels of a
loss are the same on all ranks.
"""

from __future__ import annotations

from typing import Any

from ... import _compat
from ...errors import PlacementError
from ...mesh import check_mesh, enter, leave, real_mesh
from ..shard_map.axis_names import current_scope


@_compat.read_by_dynamo
class InMesh:
    """A mesh as a context that Dynamo can read."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh

    def __enter__(self) -> Any:
        _enter(self.mesh)
        return self.mesh

    def __exit__(self, *exc: object) -> None:
        _leave()


@_compat.read_by_dynamo
def in_mesh(mesh: Any) -> InMesh:
    """The context of `use_mesh(mesh)` and of `with mesh:` inside of a function."""
    return InMesh(mesh)


@_compat.constant_in_graph
def _enter(mesh: Any) -> None:
    mesh = real_mesh(mesh)
    check_mesh("use_mesh", mesh)
    enter(mesh)


@_compat.constant_in_graph
def _leave() -> None:
    leave()


@_compat.constant_in_graph
def enter_loss() -> None:
    """Count one more `loss_parallel` context that is entered."""
    current_scope().losses += 1


@_compat.constant_in_graph
def leave_loss() -> None:
    """Count one `loss_parallel` context less."""
    current_scope().losses -= 1


@_compat.constant_in_graph
def is_in_loss() -> bool:
    """Whether a loss stands in a `loss_parallel`, in the code of one rank. Among global tensors its
    labels are global anyhow.
    """
    here = current_scope()
    return here.losses > 0 and len(here.manual) > 0


@_compat.constant_in_graph
def refuse_sharded(dims: tuple[int | None, ...], ndim: int) -> None:
    """Refuse plain labels where the logits shard more than the classes, as torch does.

    Args:
        dims: for each mesh axis, the dim of the logits that it shards.
        ndim: of the logits.

    Raises:
        PlacementError: the labels of each rank would be others.
    """
    classes = 1 if ndim > 1 else 0
    others = [dim for dim in dims if dim is not None and dim != classes]
    if others:
        raise PlacementError.of(
            "loss_parallel",
            f"the labels are a plain tensor, but the logits are sharded on dim {others[0]}",
            needed="labels as a DTensor that is sharded as the logits are, but replicated over "
            "the mesh axes that shard the dim of classes",
            fix="DTensor.from_local(target, mesh, placements), or distribute_tensor",
            dim=others[0],
        )
