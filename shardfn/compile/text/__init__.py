"""The JSON text of the graph of one rank, for comparing programs and for saved programs."""

from .graphs import graph_of, loop_text, placements_of, text_of
from .values import Unwritable, devices_of, tensor_of, tensor_text, value_of, value_text

__all__ = [
    "Unwritable",
    "devices_of",
    "graph_of",
    "loop_text",
    "placements_of",
    "tensor_of",
    "tensor_text",
    "text_of",
    "value_of",
    "value_text",
]
