"""Work that a capture is spared: code of graphs that nothing runs, what Dynamo asks of a file
again for each call, and the imports of backends that compile nothing of it and of torch.export.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.fx import _lazy_graph_module as lazy

from ..threads import is_capturing, overridden, replaced

OWN_FILES = (
    "__init__.py",
    "_compile.py",
    "_dynamo/eval_frame.py",
    "_inductor/sizevars.py",
    "_library/custom_ops.py",
    "_library/fake_impl.py",
    "_logging/_internal.py",
    "_logging/structured.py",
    "_subclasses/fake_tensor.py",
    "_subclasses/meta_utils.py",
    "export/_trace.py",
    "fx/_symbolic_trace.py",
    "fx/experimental/recording.py",
    "fx/experimental/sym_node.py",
    "fx/experimental/symbolic_shapes.py",
    "fx/interpreter.py",
)  # generic code, where no node of a program is from


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
def files_read_once() -> Iterator[None]:
    """Have Dynamo ask once about a file, and write out each of its lines once."""
    with files_asked_once(), frames_written_once():
        yield


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


class _Stack(traceback.StackSummary):
    """A stack of Python frames. The text of one that is known is not made again."""

    known: dict[Any, str]

    def format_frame_summary(self, frame: traceback.FrameSummary, **kwargs: Any) -> str:
        names = "filename", "lineno", "name", "colno", "end_colno"
        key = tuple(getattr(frame, name, None) for name in names)
        if key not in self.known:
            self.known[key] = super().format_frame_summary(frame, **kwargs)
        return self.known[key]


@contextlib.contextmanager
def frames_written_once() -> Iterator[None]:
    """Have Dynamo write out each frame once. Every node has the text of its stack, and most of
    its frames are those of the node before it.
    """
    from torch._dynamo import output_graph

    known: dict[Any, str] = {}

    def stack(frames: Any) -> _Stack:
        found = _Stack(frames)
        found.known = known
        return found

    summary = types.SimpleNamespace(from_list=stack)
    module = types.SimpleNamespace(**{**vars(traceback), "StackSummary": summary})
    with replaced(output_graph, "traceback", lambda original: module):
        yield


def backend_looked_up(look_up: Any, backend: Any) -> Any:
    """A backend of torch.compile. Dynamo asks for `eager` to see whether it is the one that a
    capture uses, which it can only be once it is imported.
    """
    from torch._dynamo.backends import registry

    if backend == "eager" and backend not in registry._COMPILER_FNS:
        return None
    return look_up(backend)


@functools.cache
def own_files_of_torch(asked: Any) -> set[str]:
    """The files of torch that Dynamo leaves out where it says which line made a node. Those that
    `asked` takes from modules are named here, so that torch.export is not imported.
    """
    from torch._dynamo import guards

    folder = Path(torch.__file__).parent
    operators = (folder / "_higher_order_ops").glob("*.py")
    named = {str(folder / name) for name in OWN_FILES}
    return named | {*map(str, operators)} | guards.uninteresting_files() | {"<string>"}


def side_effects_listed(listed: Any, output: Any, **options: Any) -> list[str]:
    """The sources of the objects that a function changes, for the error that refuses them. Torch
    leaves out the dicts of torch.export: without it there are none.
    """
    if "torch.export._trace" in sys.modules:
        return listed(output, **options)
    from torch._dynamo.source import _get_source_debug_name
    from torch._dynamo.variables import base

    outside = base.AttributeMutationExisting, base.ValueMutationExisting
    changed = [
        variable
        for variable in output.side_effects._get_modified_vars()
        if isinstance(getattr(variable, "mutation_type", None), outside)
    ]
    return [_get_source_debug_name(variable.source) for variable in changed]
