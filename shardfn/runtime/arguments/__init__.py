"""Arguments: checked, placed, and read as the local tensors of each rank."""

from .checks import refuse_lost_gradient, refuse_lost_tangent, refuse_without_values
from .local_tensors import cut, itself, join, local_of, reader, spec_of
from .look import OWN, donated_tensors, look
from .placed import Placed, aval_of, donated_places
from .prepared import OF_PART, is_prepared, prepared_for, whole_mesh
from .structure import leaves_like

__all__ = [
    "OF_PART",
    "OWN",
    "Placed",
    "aval_of",
    "cut",
    "donated_places",
    "donated_tensors",
    "is_prepared",
    "itself",
    "leaves_like",
    "join",
    "local_of",
    "look",
    "prepared_for",
    "reader",
    "refuse_lost_gradient",
    "refuse_lost_tangent",
    "refuse_without_values",
    "spec_of",
    "whole_mesh",
]
