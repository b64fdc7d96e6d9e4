"""Tensors of a world in one process: the local tensors of all ranks, and DTensors of them."""

from .dtensor import SimulatedDTensor, dtensors
from .local_tensor import (
    DonatedTensor,
    SimulatedTensor,
    UnreadTensor,
    of_one_part,
    remains_of,
    shown,
    used_after_donation,
)

__all__ = [
    "DonatedTensor",
    "SimulatedDTensor",
    "SimulatedTensor",
    "UnreadTensor",
    "dtensors",
    "of_one_part",
    "remains_of",
    "shown",
    "used_after_donation",
]
