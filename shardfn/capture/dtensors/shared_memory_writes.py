"""In-place writes to memory that a DTensor shares with another tensor: they are refused, or the new
value is read in place of the tensor. In eager torch both change; here they are two values.
"""

from __future__ import annotations

import collections
from typing import Any

import torch

from ...errors import CaptureError
from ...ops import placement, shard_map
from ...ops.nodes import args_of
from .. import annotations as sources
from ..control_flow import bodies, control_flow_ops
from ..dynamo_nodes import memories_of, name_of, root_of, written_by
from ..refusals.refused_writes import BUFFERS

# the result shares memory with the first argument in eager torch
SHARING = (
    *placement.PLACING_CALLS,
    placement.forget_dtensor,
    placement.forbid_writes,
    shard_map.as_invariant,
    shard_map.from_local,
    shard_map.to_local,
)
OF_DTENSORS = (*placement.PLACING_CALLS, placement.forbid_writes)
GIVEN = "an argument or a closed-over tensor"


def refuse_writes(python: torch.fx.GraphModule, name: str) -> None:
    """Refuse writes whose effect another tensor would show in eager torch.

    Raises:
        CaptureError: names the op and the user's line.
    """
    for module in python.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        if any(node.target in OF_DTENSORS for node in module.graph.nodes):
            _refuse_writes(module.graph, name)
        for node in module.graph.find_nodes(op="call_function", target=control_flow_ops.custom_vjp):
            _refuse_in_rule(module, node)


def _refuse_in_rule(module: torch.fx.GraphModule, rule: torch.fx.Node) -> None:
    """Refuse a function with a rule that writes to an argument, which the code reads later.

    Raises:
        CaptureError: names the function.
    """
    name, outs, forward, _, xs, _ = args_of(rule)
    written = [k for left in (outs, forward) for k in _written_arguments(module, left)]
    order = {node: k for k, node in enumerate(module.graph.nodes)}
    for x in [xs[k] for k in written]:
        root = root_of(x)
        values = [y for y in order if y.op != "output"]
        same = [y for y in values if root_of(y) is root]
        readers = [reader for y in same for reader in y.users]
        later = [y for y in readers if order[y] > order[rule]]
        first = shared_memory(x)[-1]
        is_given = first.op in ("placeholder", "get_attr")
        if is_given or any(y not in same for y in later):
            raise CaptureError.of(
                f"autograd.Function {name}",
                "the forward writes in place to an argument that later code reads",
                needed="a forward that returns a new tensor",
                fix=f"{name}.apply(x.clone()), or x = x.clone() in its forward",
                source=sources.user_line(rule),
            )


def _written_arguments(module: torch.fx.GraphModule, results: list[torch.fx.Node]) -> list[int]:
    """The numbers of the arguments that a body writes to."""
    wrap = args_of(results[0])[0]
    body = getattr(module, args_of(wrap)[0].target).graph
    entered = body.find_nodes(op="call_function", target=bodies.mark_inputs)
    items = [user for node in entered[:1] for user in node.users]
    changed = [root_of(x) for node in body.nodes for x in written_by(node)]
    memories: set[int] = set()
    for x in changed:
        memories.update(memories_of(x))
    numbers: list[int] = []
    for x in items:
        is_shared = not memories.isdisjoint(memories_of(x))
        if is_shared or x.meta.get("overwritten", False):
            numbers.append(args_of(x)[1])
    return numbers


def _refuse_writes(graph: torch.fx.Graph, name: str) -> None:
    order = {node: k for k, node in enumerate(graph.nodes)}
    sharing = collections.defaultdict[torch.fx.Node, list[torch.fx.Node]](list)
    for node in graph.nodes:
        if node.op != "output":
            sharing[shared_memory(node)[-1]].append(node)
    for node in graph.nodes:
        for x in written_by(node):
            root, *_ = memory = shared_memory(x)
            is_shared = any(y.target in OF_DTENSORS for y in memory)
            if is_shared and memory[-1].op in ("placeholder", "get_attr"):
                raise _refused(node, name, GIVEN, f"; {BUFFERS}")
            now = order[node]
            before = [y for y in sharing[memory[-1]] if order[y] <= now]
            others = [y for y in before if root_of(y) is not root]
            if any(order[user] > now for y in others for user in y.users):
                raise _refused(node, name, "a DTensor")


def shared_memory(x: torch.fx.Node) -> list[torch.fx.Node]:
    """The values whose memory a value shares in eager torch, the first one last."""
    values = [root_of(x)]
    while values[-1].target in SHARING:
        values.append(root_of(args_of(values[-1])[0]))
    return values


def _refused(node: torch.fx.Node, name: str, of: str, also: str = "") -> CaptureError:
    return CaptureError.of(
        name,
        f"{name_of(node)} writes to the memory of {of}",
        needed="a function without side effects",
        fix=f"return the new value, or write to a copy: x.clone(){also}",
        source=sources.user_line(node),
    )


def is_replaceable(x: torch.fx.Node, value: torch.fx.Node, graph: torch.fx.Graph) -> bool:
    """Whether a new value may be read in place of a tensor that it overwrites: no other node shows
    that memory.

    Args:
        x: the tensor.
        value: the new value.
        graph: that Dynamo is writing.
    """
    is_made = x.op in ("call_function", "call_method") and x.graph is graph
    if not is_made or value.graph is not graph or not _have_equal_layout(x, value):
        return False
    others = [y for y in graph.nodes if y.op != "output" and y is not x]
    found = shared_memory(x)
    if found == [x]:
        return not any(x in shared_memory(y) for y in others)
    # a value that enters a body, as one of a list
    entered, *_ = found
    own = memories_of(x)
    others = [y for y in others if y is not entered]
    is_own = entered.target is bodies.mark_inputs and bool(own)
    if not is_own or any({*own} & {*memories_of(y)} for y in others):
        return False
    x.meta["overwritten"] = True
    return True


def _have_equal_layout(x: torch.fx.Node, y: torch.fx.Node) -> bool:
    """Whether two values have one shape, one order in memory and one dtype."""
    layouts = [_layout(node.meta.get("example_value")) for node in (x, y)]
    return layouts[0] == layouts[1] is not None


def _layout(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return None
    return tuple(x.shape), tuple(x.stride()), x.dtype
