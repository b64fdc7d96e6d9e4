"""Work that a capture is spared: code of graphs that nothing runs, what Dynamo asks of a file
again for each call, and the import of backends that compile nothing of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import _lazy_graph_module as lazy

from ..threads import is_capturing, overridden


@contextlib.contextmanager
def code_on_demand() -> Iterator[None]:
    """Have torch write the code of a graph when it is read or run. A capture interprets its
    graphs, and writing the code of one costs as much as copying it.
    """
    with lazy._use_lazy_graph_module(True):
        yield


def graph_module(root: Any, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A module of a graph, whose code is written when it is read or run."""
    return lazy._LazyGraphModule(root, graph)


@contextlib.contextmanager
def files_asked_once() -> Iterator[None]:
    """Have Dynamo ask once whether it reads a file. It compares the name with its lists for each
    function.
    """
    from torch._dynamo import trace_rules

    known: dict[Any, Any] = {}

    def asked(check: Any, file: str | None, is_inlined_call: bool = False) -> Any:
        key = file, is_inlined_call
        if key not in known:
            known[key] = check(file, is_inlined_call)
        return known[key]

    with overridden(trace_rules, "check_file", asked, is_capturing):
        yield


def backend_looked_up(look_up: Any, backend: Any) -> Any:
    """A backend of torch.compile. Dynamo asks for `eager` to see whether it is the one that a
    capture uses, which it can only be once it is imported.
    """
    from torch._dynamo.backends import registry

    if backend == "eager" and backend not in registry._COMPILER_FNS:
        return None
    return look_up(backend)
