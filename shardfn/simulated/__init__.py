"""Tensors of a simulated world: the local tensors of all ranks, and DTensors."""

from .dtensor import SimulatedDTensor, dtensors
from .local_tensor import (
    DonatedTensor,
    SimulatedTensor,
    UnreadTensor,
    of_every_part,
    of_one_part,
    ranks_of,
    remains_of,
    shown,
    used_after_donation,
)
from .parts import is_on_part, on_mesh, own_of_part, placements_on, uneven_dim

__all__ = [
    "DonatedTensor",
    "SimulatedDTensor",
    "SimulatedTensor",
    "UnreadTensor",
    "dtensors",
    "is_on_part",
    "of_every_part",
    "of_one_part",
    "on_mesh",
    "own_of_part",
    "placements_on",
    "ranks_of",
    "remains_of",
    "shown",
    "uneven_dim",
    "used_after_donation",
]
