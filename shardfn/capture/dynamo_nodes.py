"""Facts about one node of Dynamo's graph: its name, its graphs, the values that it writes to in
place, and the base of a view.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from .. import _compat

BACKWARD = ("_autograd_grad", "_vjp_grad")
REQUIRES_GRAD = "_set_tensor_requires_grad"
VIEWS = {
    "view",
    "reshape",
    "t",
    "transpose",
    "permute",
    "select",
    "expand",
    "expand_as",
    "squeeze",
    "unsqueeze",
    "narrow",
    "chunk",
    "split",
    "unbind",
    "flatten",
    "unflatten",
    "diagonal",
    "movedim",
    "view_as",
    "detach",
    "getitem",
    "getattr",
    "numpy_T",  # x.T, x.mT, x.H and x.mH from torch 2.15 on
    "mT",
    "matrix_H",
    "mH",
    "swapaxes",
    "unfold",
    "alias",
    "to",
    "type_as",
    "contiguous",
    "float",
    "double",
    "half",
    "bfloat16",
}
PLUMBING = {
    "_wrap_for_grad",
    "_unwrap_for_grad",
    REQUIRES_GRAD,
    "_add_batch_dim",
    "_remove_batch_dim",
}  # ops of torch.func's levels
OURS = "shardfn."  # prims, which make values of their own, whatever their memory is here
SYMBOLS = (torch.SymInt, torch.SymBool, torch.SymFloat)
IN_PLACE = {
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ifloordiv,
    operator.imod,
    operator.ipow,
    operator.iand,
    operator.ior,
    operator.ixor,
    operator.imatmul,
    operator.setitem,
}


NOT_IN_PLACE = {operator.and_, operator.or_, operator.not_, operator.is_}  # despite their names


def graphs_of(module: torch.fx.GraphModule) -> Iterator[torch.fx.Graph]:
    """The graph and the graphs of its higher-order ops."""
    for child in module.modules():
        if isinstance(child, torch.fx.GraphModule):
            yield child.graph


def children_of(module: torch.fx.GraphModule, node: torch.fx.Node) -> list[torch.fx.GraphModule]:
    """The subgraphs among the arguments of a higher-order op."""
    if node.op != "call_function":
        return []
    values = [
        getattr(module, str(x.target), None)
        for x in node.all_input_nodes
        if x.op == "get_attr" and "." not in str(x.target)
    ]
    return [x for x in values if isinstance(x, torch.fx.GraphModule)]


def nodes_in(x: Any) -> list[torch.fx.Node]:
    """All nodes in an argument, those in lists and dicts included."""
    nodes: list[torch.fx.Node] = []
    torch.fx.node.map_arg(x, nodes.append)
    return nodes


def is_size(node: torch.fx.Node) -> bool:
    """Whether a node is a size that Dynamo has read as a symbol. All ranks have the same."""
    return isinstance(node.meta.get("example_value"), SYMBOLS)


def is_wrap(node: torch.fx.Node) -> bool:
    """Whether a node is a call of torch's `wrap`, which runs a body."""
    return getattr(node.target, "_name", None) == "wrap"


def name_of(node: torch.fx.Node) -> str:
    """The name of the function or method that a node calls. Empty for a node that calls none."""
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")


def root_of(x: torch.fx.Node) -> torch.fx.Node:
    """The base of a value, through views and in-place writes: by the memory of the values that
    Dynamo has computed, or by the names of the ops.
    """
    (memory, *_) = memories_of(x) or (None,)
    while (base := _base_of(x, memory)) is not None:
        x = base
    return x


def memories_of(x: torch.fx.Node) -> list[int]:
    """The storage of each tensor of a value that Dynamo has computed. Nothing if one is unknown."""
    value = x.meta.get("example_value")
    every: list[Any] = [value]
    if isinstance(value, (tuple, list)):
        every = [*value]
    tensors = [_compat.unwrapped(y) for y in every]
    are_known = all(map(_compat.is_fake, tensors))
    return [_compat.storage_of(y) for y in tensors] if are_known else []


def _base_of(x: torch.fx.Node, memory: int | None) -> torch.fx.Node | None:
    """The input of a node that has this memory, if there is one."""
    inputs = nodes_in((x.args, x.kwargs))
    is_ours = (getattr(x.target, "__module__", None) or "").startswith(OURS)
    if x.op == "placeholder" or is_ours:
        return None
    base = None
    for y in inputs:
        if base is None and memory in memories_of(y):
            base = y
    first = x.args[0] if x.args else None
    if base is not None or not isinstance(first, torch.fx.Node):
        return base
    if memory is not None and memories_of(first):
        return None
    name = name_of(x)
    is_by_name = name in VIEWS or name in PLUMBING or _is_in_place(x)
    return first if is_by_name else None


def _is_in_place(node: torch.fx.Node) -> bool:
    name = name_of(node)
    if node.target in NOT_IN_PLACE:
        return False
    return (
        node.target in IN_PLACE
        or (name.endswith("_") and not name.endswith("__"))
        or node.kwargs.get("inplace") is True
    )


def written_by(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The values that a node writes to in place."""
    if node.op not in ("call_function", "call_method"):
        return []
    first = nodes_in(node.args[:1]) if _is_in_place(node) else []
    schema = getattr(node.target, "_schema", None)  # of a custom op
    rows = zip(schema.arguments, node.args, strict=False) if schema else ()
    written = [x for row, arg in rows if row.is_write for x in nodes_in(arg)]
    named = schema.arguments if schema else ()
    written += [x for row in named if row.is_write for x in nodes_in(node.kwargs.get(row.name))]
    return [*dict.fromkeys((*first, *nodes_in(node.kwargs.get("out")), *written))]


def statistics_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The running statistics that a call of batch_norm or instance_norm writes to."""
    fn: Any = node.target
    if fn not in (F.batch_norm, F.instance_norm):
        return []
    bound = inspect.signature(fn).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    given = bound.arguments
    is_written = given.get("training", given.get("use_input_stats"))
    own = given["running_mean"], given["running_var"]
    return [x for x in own if is_written and isinstance(x, torch.fx.Node)]
