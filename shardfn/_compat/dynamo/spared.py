"""Work that a capture is spared: code of graphs that nothing runs, and searches of their nodes."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import _lazy_graph_module as lazy
from torch.fx import graph

from ..threads import is_capturing, replaced

MADE = "dynamo_compile_id"  # what Dynamo notes of the module that it makes


@contextlib.contextmanager
def of_graphs() -> Iterator[None]:
    """Leave out graph code generation and argument searches inside this context."""
    with code_on_demand(), arguments_not_searched():
        yield


@contextlib.contextmanager
def code_on_demand() -> Iterator[None]:
    """Have torch write the code of a graph when it is read or run. A capture interprets its
    graphs, and writing the code of one costs as much as copying it.
    """
    with lazy._use_lazy_graph_module(True):
        yield


def graph_module(root: Any, nodes: torch.fx.Graph) -> torch.fx.GraphModule:
    """A module of a graph, whose code is written when it is read or run."""
    return lazy._LazyGraphModule(root, nodes)


@contextlib.contextmanager
def arguments_not_searched() -> Iterator[None]:
    """Have a graph not search the arguments of each new node for symbolic numbers, of which it
    would warn.
    """

    def searched(tree: Any, *args: Any, **kwargs: Any) -> Any:
        return () if is_capturing() else pytree.tree_iter(tree, *args, **kwargs)

    module = types.SimpleNamespace(**{**vars(pytree), "tree_iter": searched})
    with replaced(graph, "pytree", lambda original: module):
        yield


def left_unwritten(write: Any, module: Any) -> None:
    """Leave the code of Dynamo's own module for when it is run."""
    if MADE not in module.meta:
        write(module)
