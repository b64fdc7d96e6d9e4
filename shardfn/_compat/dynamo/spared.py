"""Work that a capture is spared: code of graphs that nothing runs, what torch asks of a file or a
node again and again, and the imports of backends that compile nothing of it and of torch.export.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import _lazy_graph_module as lazy
from torch.fx import graph

from ..compilations import caches
from ..patching import NEVER, Patch, methods
from ..threads import is_capturing, overridden, replaced

MADE = "dynamo_compile_id"  # what Dynamo notes of the module that it makes
LOCAL_MAP = "torch.distributed.tensor.experimental._func_map"
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


def graph_module(root: Any, nodes: torch.fx.Graph) -> torch.fx.GraphModule:
    """A module of a graph, whose code is written when it is read or run."""
    return lazy._LazyGraphModule(root, nodes)


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


@contextlib.contextmanager
def stacks_written_once() -> Iterator[None]:
    """Have Dynamo write out each stack once. Every node has the text of its stack, and many
    nodes come from one line.
    """
    from torch._dynamo.output_graph import SubgraphTracer

    known: dict[Any, str] = {}
    codes: dict[int, Any] = {}  # kept, since their ids are in the keys
    last: list[tuple[Any, torch.fx.Node]] = []  # torch writes its stack next

    def noted(note: Any, tracer: Any, tx: Any, node: torch.fx.Node) -> None:
        note(tracer, tx, node)
        while last:
            key, before = last.pop()
            if text := before.meta.get("stack_trace"):  # none where torch then failed
                known[key] = text
        if node.op == "output" or "stack_trace" in node.meta:
            return
        key = tuple(_frames(tx, codes))
        if key in known:
            node.meta["stack_trace"] = known[key]
        else:
            last.append((key, node))

    name = "_maybe_preserve_original_meta"
    with overridden(SubgraphTracer, name, noted, is_capturing):
        yield


def _frames(tx: Any, codes: dict[int, Any]) -> Iterator[Any]:
    """The frames of a stack, from the innermost on."""
    while tx is not None:
        codes[id(tx.f_code)] = tx.f_code
        yield id(tx.f_code), tx.lineno, tx.current_instruction.positions
        tx = getattr(tx, "parent", None)


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


def asked_where_unread(eliminate: Any, nodes: torch.fx.Graph, is_impure_node: Any = None) -> bool:
    """Remove dead nodes. torch looks for effects only of those that nothing reads."""
    if is_impure_node is None:
        return eliminate(nodes)
    return eliminate(nodes, lambda node: bool(node.users) or is_impure_node(node))


def left_unwritten(write: Any, module: Any) -> None:
    """Leave the code of Dynamo's own module for when it is run."""
    if MADE not in module.meta:
        write(module)


@contextlib.contextmanager
def no_sizes_sought() -> Iterator[None]:
    """Have Dynamo not look for conditions on sizes in a program of numbers, for which it writes
    the code of the graph.
    """
    with caches.settings(torch._dynamo.config, do_not_emit_runtime_asserts=True):
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
    """The sources of the objects that a function changes, for the error that refuses them, with
    the attributes and keys that change. Torch leaves out the dicts of torch.export: in a capture
    there are none.
    """
    if not is_capturing():
        return listed(output, **options)
    from torch._dynamo.source import _get_source_debug_name
    from torch._dynamo.variables import base

    outside = base.AttributeMutationExisting, base.ValueMutationExisting
    changed = [
        variable
        for variable in output.side_effects._get_modified_vars()
        if isinstance(getattr(variable, "mutation_type", None), outside)
    ]
    stored = output.side_effects.store_attr_mutations
    return [
        _get_source_debug_name(variable.source) + part
        for variable in changed
        for part in _changed_parts(variable, stored.get(variable, {})) or [""]
    ]


def _changed_parts(variable: Any, stored: Iterable[str]) -> list[str]:
    """The attributes and the keys that a function stores in an object."""
    parts = [f".{name}" for name in stored if name != "cell_contents"]
    held = getattr(variable, "_base_vt", None) or variable
    before, now = getattr(held, "original_items", None), getattr(held, "items", None)
    if isinstance(before, dict) and isinstance(now, dict):
        new = [k for k, x in now.items() if k.vt not in before or held.is_new_item(before[k.vt], x)]
        parts += [f"[{k.vt.as_python_constant()!r}]" for k in new if k.vt.is_python_constant()]
    return parts


def unmade(make: Any, pickler: Any) -> None:
    """Nothing, in place of what tells nodes apart where Dynamo seeks equal ones, which a capture
    does not have it do.
    """


def local_map_met(meet: Any, fn: Any) -> bool:
    """Whether a function is local_map's, which it can only be once that is imported."""
    return LOCAL_MAP in sys.modules and meet(fn)


PATCHES = (
    Patch(
        ("torch._dynamo.trace_rules:check_file",),
        "it goes through lists of folders for each function",
        NEVER,
        enter=files_asked_once,
    ),
    Patch(
        ("torch._dynamo.output_graph:SubgraphTracer._maybe_preserve_original_meta",),
        "it writes each frame of the stack for each node",
        NEVER,
        enter=stacks_written_once,
    ),
    Patch(
        ("torch.fx.graph.pytree",),
        "a new node's arguments are flattened to warn of symbolic numbers",
        NEVER,
        enter=arguments_not_searched,
    ),
    Patch(
        ("torch.fx:Graph.eliminate_dead_code",),
        "it asks of each node whether it has an effect, also of those that are read",
        NEVER,
        new=asked_where_unread,
    ),
    Patch(
        ("torch.fx._lazy_graph_module:_LazyGraphModule.force_recompile",),
        "it writes the code of the graph, which a capture interprets",
        NEVER,
        new=left_unwritten,
    ),
    Patch(
        ("torch._dynamo:lookup_backend",),
        "it imports all backends, a third of a second, to see whether one is `eager`",
        NEVER,
        new=backend_looked_up,
        optional=True,
    ),
    Patch(
        (
            "torch._dynamo.output_graph:uninteresting_files",
            "torch.fx.experimental.symbolic_shapes:uninteresting_files",
        ),
        "it imports torch.export, a sixth of a second, to ask where its file is",
        NEVER,
        new=own_files_of_torch,
        optional=True,
    ),
    Patch(
        methods("torch._dynamo.output_graph:OutputGraph", "get_replayed_side_effect_source_refs"),
        "it imports torch.export, to leave out that one's own dicts",
        NEVER,
        new=side_effects_listed,
        optional=True,
    ),
    Patch(
        ("torch._dynamo.graph_region_tracker:InputPickler.__init__",),
        "it imports Inductor, a tenth of a second, for a search that a capture turns off",
        NEVER,
        new=unmade,
        optional=True,
    ),
    Patch(
        methods(
            "torch._dynamo.variables.higher_order_ops:LocalMapWrappedHigherOrderVariable",
            "should_wrap_in_hop",
        ),
        "it imports experimental parts of DTensor to ask whether a function is one of them",
        NEVER,
        new=local_map_met,
        optional=True,
    ),
)
NUMBERS = (
    Patch(
        ("torch._dynamo.config.do_not_emit_runtime_asserts",),
        "it writes the code of the graph to look for conditions on sizes, and there are none",
        NEVER,
        enter=no_sizes_sought,
    ),
)
