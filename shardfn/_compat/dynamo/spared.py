"""Work that stages are spared: code of graphs that nothing runs, and searches of their nodes."""

from __future__ import annotations

import contextlib
import contextvars
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import _lazy_graph_module as lazy
from torch.fx import graph

from ..threads import replaced

MADE = "dynamo_compile_id"  # what Dynamo notes of the module that it makes
_SPARED: contextvars.ContextVar[bool] = contextvars.ContextVar("shardfn_spared", default=False)


@contextlib.contextmanager
def of_graphs() -> Iterator[None]:
    """Leave out graph code generation and argument searches inside this context."""
    with code_on_demand(), arguments_not_searched():
        yield


@contextlib.contextmanager
def code_on_demand() -> Iterator[None]:
    """Have torch write the code of a graph when it is read or run. Stages interpret their
    graphs, and writing the code of one costs as much as copying it.
    """
    with lazy._use_lazy_graph_module(True):
        yield


def graph_module(root: Any, nodes: torch.fx.Graph) -> torch.fx.GraphModule:
    """A module of a graph, whose code is written when it is read or run."""
    return lazy._LazyGraphModule(root, nodes)


def function_of(module: torch.fx.GraphModule) -> Callable[..., Any]:
    """Write the code of a graph and return it as a function. A call of the module would call the
    hooks that the user has registered for all modules.
    """
    module.recompile()
    assert module.code
    return module.forward


@contextlib.contextmanager
def arguments_not_searched() -> Iterator[None]:
    """Have the graphs of this thread not search the arguments of each new node for symbolic
    numbers, of which they would warn.
    """

    def searched(tree: Any, *args: Any, **kwargs: Any) -> Any:
        return () if _SPARED.get() else pytree.tree_iter(tree, *args, **kwargs)

    module = types.SimpleNamespace(**{**vars(pytree), "tree_iter": searched})
    token = _SPARED.set(True)
    try:
        with replaced(graph, "pytree", lambda original: module):
            yield
    finally:
        _SPARED.reset(token)


def left_unwritten(write: Any, module: Any) -> None:
    """Leave the code of Dynamo's own module for when it is run."""
    if MADE not in module.meta:
        write(module)
