"""The record of one call's arguments, and their metadata for capture."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from ...mesh import all_coordinates
from ...partition import layout
from ...simulated import shown
from ...types import Aval, Marks, MeshAxes, ShapeDtype
from ...world import World, default_device_type


@attrs.frozen(eq=False, repr=False)
class Placed:
    """The arguments of one call: which are static, and the placements of each tensor."""

    world: World
    mesh: Any
    axes: MeshAxes
    treedef: Any
    paths: tuple[str, ...]  # of all leaves
    tensors: tuple[int, ...]  # which leaves are tensors
    dtensors: tuple[bool, ...]  # of the tensors
    avals: tuple[Aval, ...]  # of the tensors
    marks: tuple[Marks, ...]  # of the tensors
    unreduced: tuple[int, ...]  # which of the tensors are unreduced gradients
    donated: tuple[int, ...]  # which leaves are tensors of donated arguments
    followed: tuple[int, ...]  # which leaves are tensors that autograd follows
    static: frozenset[int]  # which leaves are of static arguments
    constants: tuple[tuple[int, Any, Any], ...]  # for the other leaves: position, key, value
    state: tuple[Any, ...]  # torch's settings at the call
    # by leaf, the dims that may change between calls: `dynamic.dims_of`
    dynamic: dict[int, dict[int, bool]]

    @property
    def is_simulated(self) -> bool:
        """Whether the simulator runs the programs of all ranks in this process."""
        return self.world.kind == "simulated" and self.mesh is not None

    @property
    def device(self) -> str:
        """The type of the devices of the mesh, or the device of the arguments."""
        if self.mesh is not None:
            return self.mesh.device_type
        return next((x.device for x in self.avals if x.device != "cpu"), "cpu")

    @property
    def coordinate(self) -> tuple[int, ...]:
        """This rank's coordinate in the mesh, or that of the rank that is shown."""
        if self.is_simulated:
            return all_coordinates(self.axes)[shown(self.mesh, self.world.rank)]
        return tuple(self.mesh.get_coordinate()) if self.mesh is not None else ()


def donated_places(placed: Placed) -> list[int]:
    """Which placeholders are donated inputs."""
    skip = len(placed.axes.names)
    return [skip + k for k, leaf in enumerate(placed.tensors) if leaf in placed.donated]


def aval_of(x: Any, mesh: Any) -> Aval:
    """The metadata of a tensor for capture."""
    shape = tuple(x.shape)
    if isinstance(x, ShapeDtype):
        return Aval(
            shape,
            layout.dense_strides(shape, range(len(shape))),
            x.dtype,
            device_of(torch.device("meta"), mesh),
        )
    device = device_of(x.device, mesh)
    return Aval(shape, x.stride(), x.dtype, device)


def device_of(device: torch.device, mesh: Any) -> str:
    """The device of an argument; for one without values that of the mesh, or torch's default."""
    if device.type != "meta":
        return str(device)
    if mesh is not None:
        return mesh.device_type
    default = default_device_type()
    return "cpu" if default == "meta" else default
