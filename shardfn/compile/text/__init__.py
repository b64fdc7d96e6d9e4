"""Local graphs as JSON: the text that says which programs are equal, and that a file may hold."""

from .graphs import Unwritable, graph_of, loop_text, marks_of, text_of

__all__ = ["Unwritable", "graph_of", "loop_text", "marks_of", "text_of"]
