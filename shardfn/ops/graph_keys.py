"""The table of the keys of `node.meta`: which stage writes each, which stages read it, and its
values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch

from ..types import Collective

# The graphs that carry keys, in order: Dynamo's, which is replayed; the Program's, over global
# shapes; a LocalProgram's, of one rank; Inductor's input.
PYTHON = "python"
GLOBAL = "global"
LOCAL = "local"
LOWERED = "lowered"
TORCH = "torch"  # as an owner: torch writes the key


@attrs.frozen
class Key:
    """A row of the table: one key of `node.meta` in one kind of graph.

    Args:
        name: the key.
        graph: the kind of graph that carries it.
        owner: the stage that writes it, a folder of shardfn, or torch.
        readers: the stages that read it. Empty for a key that is only carried.
        holds: a description of the value.
        fits: whether a value is valid.
    """

    name: str
    graph: str
    owner: str
    readers: tuple[str, ...]
    holds: str
    fits: Callable[[Any], bool]


VALUES = (torch.Tensor, int, float, complex, type(None))


def _is_a(*types: type) -> Callable[[Any], bool]:
    """Build a check that a value is of one of the types. A bool does not count as an int."""
    if bool in types or int not in types:
        return lambda value: isinstance(value, types)
    return lambda value: isinstance(value, types) and not isinstance(value, bool)


def _is_value(value: Any) -> bool:
    """Return whether a value is a fake tensor or a number, or a nested list of them."""
    if isinstance(value, VALUES):
        return True
    return isinstance(value, (list, tuple)) and all(map(_is_value, value))


def _is_type(value: Any) -> bool:
    """Return whether a value is a pair of a global shape and a placement for each mesh axis."""
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    shape, placements = value
    return (
        all(isinstance(n, int) for n in shape)
        and isinstance(placements, tuple)
        and all(isinstance(placement, (str, int, tuple)) for placement in placements)
    )


def _is_annotations(value: Any) -> bool:
    """Return whether a value is a dict with string keys."""
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _is_any(value: Any) -> bool:
    """Accept every value."""
    return True


READ_BY_ALL = ("capture", "partition", "schedule", "inspect", "compile", "runtime", "transforms")
LINE = _is_a(str, type(None))
FAKE = "the node's fake tensor, or a list of fake tensors"
SOURCE = "file:line of the user's code, or None"
MODULE = "the path of the submodule that called the op, or None"
PHASE = "forward or backward"
MOVE = "a number that identifies the redistribution, equal on all ranks"

# fmt: off
KEYS: tuple[Key, ...] = (
    # torch writes these while Dynamo and make_fx trace.
    Key("example_value", PYTHON, TORCH, ("capture", "_compat"), FAKE, _is_any),
    Key("stack_trace", PYTHON, TORCH, ("capture",), "the user's stack", LINE),
    Key("grapharg", PYTHON, TORCH, ("capture",), "the source of an input", _is_any),
    Key("tensor_dict", PYTHON, TORCH, ("_compat",), "the attributes of a tensor", _is_any),
    Key("stack_trace", GLOBAL, TORCH, ("capture",), "the user's stack", LINE),
    Key("seq_nr", GLOBAL, TORCH, ("capture",), "links a backward op to its forward op", _is_a(int)),
    Key("eager_input_vals", GLOBAL, TORCH, (), "arguments before decomposition", _is_any),
    Key("from_node", GLOBAL, TORCH, (), "provenance", _is_any),
    Key("nn_module_stack", GLOBAL, TORCH, ("capture",), "the modules that contain the op", _is_any),
    Key("original_aten", GLOBAL, TORCH, (), "the op before decomposition", _is_any),
    Key("source_fn_stack", GLOBAL, TORCH, (), "the functions that contain the op", _is_any),
    Key("tensor_meta", GLOBAL, TORCH, (), "shape and dtype", _is_any),
    Key("torch_fn", GLOBAL, TORCH, (), "the torch function", _is_any),
    Key("unbacked_bindings", GLOBAL, TORCH, (), "symbols", _is_any),
    # capture: source lines, phases and annotations.
    Key("custom", PYTHON, "capture", ("capture",), "annotations of an op", _is_annotations),
    Key("overwritten", PYTHON, "capture", ("capture",), "whether a body replaces it", _is_a(bool)),
    Key("custom", GLOBAL, "capture", ("capture", "partition", "inspect"),
        "annotations of an op", _is_annotations),
    Key("source", GLOBAL, "capture",
        ("capture", "ops", "inspect", "runtime", "transforms", "proof"), SOURCE, LINE),
    Key("module", GLOBAL, "capture", ("ops",), MODULE, LINE),
    Key("phase", GLOBAL, "capture", ("capture", "partition", "schedule", "inspect", "proof"),
        PHASE, _is_a(str)),
    Key("val", GLOBAL, "capture", ("_compat", "ops", *READ_BY_ALL, "training", "proof"), FAKE,
        _is_value),
    # partition: one rank's ops and collectives.
    Key("val", LOCAL, "partition", ("ops", *READ_BY_ALL), FAKE, _is_value),
    Key("source", LOCAL, "partition",
        ("ops", "capture", "compile", "inspect", "reports"), SOURCE, LINE),
    Key("module", LOCAL, "partition", ("ops", "reports"), MODULE, LINE),
    Key("phase", LOCAL, "partition", ("schedule", "compile", "reports"), PHASE, _is_a(str)),
    Key("is_recomputed", LOCAL, "partition", ("partition",),
        "whether the op is an op of the forward that the backward recomputes", _is_a(bool)),
    Key("origin", LOCAL, "partition", (), "the global node that it implements", _is_a(str)),
    Key("step", LOCAL, "partition", ("schedule", "proof"), "the step's number", _is_a(int)),
    Key("slots", LOCAL, "partition", ("proof",),
        "the numbers, in the partition plan, of the values that the node's tensor holds",
        _is_a(tuple)),
    Key("type", LOCAL, "partition", ("partition", "schedule", "compile", "proof"),
        "global shape and placements", _is_type),
    Key("collective", LOCAL, "partition",
        ("capture", "partition", "schedule", "inspect", "compile", "runtime", "proof", "reports"),
        "the collective's record: kind, axis and bytes", _is_a(Collective)),
    Key("transfer", LOCAL, "partition", ("schedule",), MOVE, _is_a(tuple)),
    Key("moved", LOCAL, "partition", ("schedule",), MOVE, _is_a(tuple)),
    Key("plans", LOCAL, "partition", ("schedule",), "the plans of a loop's graphs", _is_a(tuple)),
    # schedule: the order.
    Key("batch", LOCAL, "schedule", ("schedule", "inspect"), "its scheduled batch", _is_a(int)),
    # compile: what Inductor needs.
    Key("user_visible_output_idxs", LOWERED, "_compat", (), "the tensor results", _is_a(list)),
    Key("should_fallback", LOWERED, "_compat", (), "whether torch's kernel runs", _is_a(bool)),
)
# fmt: on
BY_GRAPH: dict[str, dict[str, Key]] = {
    graph: {key.name: key for key in KEYS if key.graph == graph}
    for graph in (PYTHON, GLOBAL, LOCAL, LOWERED)
}


def wrong_keys(nodes: Iterable[torch.fx.Node], graph: str) -> list[str]:
    """Describe each key of some nodes that is not in the table, or whose value does not fit its
    row.

    Args:
        nodes: of a graph.
        graph: the kind of graph.
    """
    keys = BY_GRAPH[graph]
    wrong = []
    for node in nodes:
        for name, value in node.meta.items():
            key = keys.get(name)
            if key is None:
                wrong.append(f"{node}: {name!r} is not a meta key of a {graph} graph")
            elif not key.fits(value):
                wrong.append(f"{node}: {name!r} must be {key.holds}; got {value!r}")
    return wrong


def check_keys(nodes: Iterable[torch.fx.Node], graph: str) -> None:
    """Assert that nodes carry only keys of the table, each with a valid value.

    Raises:
        AssertionError: a stage wrote a key that it does not own. Names the nodes.
    """
    wrong = wrong_keys(nodes, graph)
    assert not wrong, "node.meta: " + "; ".join(wrong[:5])
