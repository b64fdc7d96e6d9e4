"""Local graphs as JSON: the text by which programs compare equal, and which an artefact file
holds.
"""

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
