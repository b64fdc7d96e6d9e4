"""Local graphs as JSON: the text that says which programs are equal, and that a file may hold."""

from .graphs import graph_of, loop_text, marks_of, text_of
from .values import Unwritable, devices_of, tensor_of, tensor_text, value_of, value_text

__all__ = [
    "Unwritable",
    "devices_of",
    "graph_of",
    "loop_text",
    "marks_of",
    "tensor_of",
    "tensor_text",
    "text_of",
    "value_of",
    "value_text",
]
