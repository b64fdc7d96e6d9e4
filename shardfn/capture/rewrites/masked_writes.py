"""`y[mask] = x[mask]` in Dynamo's graph, as torch.where.

The mask selects the same elements on both sides, so neither their number nor their order matters.
What elementwise ops compute from `x[mask]` in between, as in `y[mask] *= 2`, they compute for every
element, with ones where the mask is false: such elements and their derivatives are dropped.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from ... import _compat
from ...ops.nodes import args_of
from ..dynamo_nodes import graphs_of, name_of, root_of, written_by

# ops of single elements, by the names of the function, the method and the operator
NAMES = (
    "abs add addcdiv addcmul ceil clamp clamp_max clamp_min clone cos detach div double erf exp "
    "expm1 float floor floordiv gelu half iadd imul isub itruediv leaky_relu log log1p log2 long "
    "mul multiply neg pow reciprocal relu round rsqrt rsub sigmoid sign silu sin softplus sqrt "
    "square sub subtract tan tanh to true_divide truediv trunc"
)
OF_MASKS = "all and_ any eq ge gt invert isfinite isinf isnan le lt ne or_ sum xor"
ELEMENTWISE = frozenset(NAMES.split())
PURE = ELEMENTWISE.union(OF_MASKS.split()) - {"iadd", "imul", "isub", "itruediv"}


def write_selected_(x: torch.Tensor, mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`x[mask] = values` of as many values as Dynamo does not know; Dynamo keeps this call."""
    return x.copy_(x.clone())


def install() -> None:
    """Have Dynamo keep this call. Capture calls this before it traces."""
    _compat.keep_in_graph(write_selected_)


def join_masks(python: torch.fx.GraphModule) -> None:
    """Rewrite writes of masked elements to the elements of the same mask."""
    for graph in graphs_of(python):
        writes = [
            node for node in graph.nodes if node.target in (operator.setitem, write_selected_)
        ]
        for write in writes:
            _join(graph, write)
    python.recompile()


def _join(graph: torch.fx.Graph, write: torch.fx.Node) -> None:
    """Rewrite one write, if all that it writes are elements of its own mask."""
    x, mask, value = args_of(write)
    tensors = _value(x), _value(value)
    if not _is_mask(mask) or any(t is None for t in tensors):
        return
    if tensors[0].dtype != tensors[1].dtype:  # torch refuses it
        return
    order = {node: place for place, node in enumerate(graph.nodes)}
    computed = _computed_from(write, order)
    if not computed:
        return
    whole: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in sorted(computed, key=order.__getitem__):
        with graph.inserting_before(node.next):
            if _is_selection(node):
                selected, chosen = args_of(node)
                one = True if _value(selected).dtype == torch.bool else 1
                wide = _wide(graph, chosen, selected)
                whole[node] = graph.call_function(torch.where, (wide, selected, one))
            else:
                whole[node] = graph.node_copy(node, lambda n: whole.get(n, n))
        whole[node].meta = _without_value(node)
    with graph.inserting_before(write):
        out = graph.call_function(torch.where, (_wide(graph, mask, x), whole[value], x))
        put = graph.call_method("copy_", (x, out))
    out.meta = _without_value(write)
    put.meta = dict(write.meta)
    write.replace_all_uses_with(put)
    graph.erase_node(write)
    for node in sorted(computed, key=order.__getitem__, reverse=True):
        if not node.users:
            graph.erase_node(node)


def _wide(graph: torch.fx.Graph, mask: torch.fx.Node, x: torch.fx.Node) -> torch.fx.Node:
    """A mask with a dim of one for each dim of a tensor that it does not have."""
    wide = mask
    for _ in range(_value(x).dim() - _value(mask).dim()):
        wide = graph.call_method("unsqueeze", (wide, -1))
        wide.meta = _without_value(mask)
    return wide


def _computed_from(write: torch.fx.Node, order: dict[torch.fx.Node, int]) -> set[torch.fx.Node]:
    """The nodes that compute what is written, if they are selections by the mask and elementwise
    ops of these. Empty otherwise.
    """
    x, _, value = args_of(write)
    computed: set[torch.fx.Node] = set()
    pending: list[torch.fx.Node] = [value]
    while pending:
        node = pending.pop()
        if node in computed:
            continue
        computed.add(node)
        if _is_selection(node):
            dims = [_value(y).dim() for y in (node.args[0], x) if _value(y) is not None]
            if len(dims) < 2 or dims[0] != dims[1] or not _is_of_mask(node, write, order):
                return set()
        elif name_of(node).removesuffix("_") in ELEMENTWISE and node.all_input_nodes:
            pending.extend(node.all_input_nodes)
        else:
            return set()
        pending.extend(user for user in node.users if node in written_by(user))
    return computed


def _is_selection(node: torch.fx.Node) -> bool:
    """Whether a node is `x[mask]`."""
    return node.target is operator.getitem and _is_mask(node.args[1])


def _is_mask(x: Any) -> bool:
    value = _value(x)
    return value is not None and value.dtype == torch.bool and value.dim() > 0


def _value(x: Any) -> Any:
    """The tensor that Dynamo has computed for a node. None if it is none."""
    value = x.meta.get("example_value") if isinstance(x, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _is_of_mask(
    selection: torch.fx.Node, write: torch.fx.Node, order: dict[torch.fx.Node, int]
) -> bool:
    """Whether a selection is by the mask of a write: by the same node, or by one that computes the
    same. Nothing writes to what they read in between.
    """
    a, b = selection.args[1], write.args[1]
    read: set[torch.fx.Node] = set()
    apart: set[torch.fx.Node] = {selection}
    if not _is_equal(a, b, read, apart):
        return False
    roots = {root_of(node) for node in read}
    first = min(order[node] for node in apart)
    between = [node for node, place in order.items() if first < place < order[write]]
    return not any(root_of(x) in roots for node in between for x in written_by(node))


def _is_equal(a: Any, b: Any, read: set[torch.fx.Node], apart: set[torch.fx.Node]) -> bool:
    """Whether two arguments are equal. Notes the nodes that they read, and those that differ."""
    if not isinstance(a, torch.fx.Node) or not isinstance(b, torch.fx.Node):
        return type(a) is type(b) and a == b
    read.update((a, b))
    if a is b:
        return True
    apart.update((a, b))
    is_pure = name_of(a) in PURE
    if not is_pure or a.target != b.target or len(a.args) != len(b.args) or a.kwargs != b.kwargs:
        return False
    return all(_is_equal(m, n, read, apart) for m, n in zip(a.args, b.args, strict=True))


def _without_value(node: torch.fx.Node) -> dict[str, Any]:
    """The metadata of a node, without the value that Dynamo has computed."""
    return {key: value for key, value in node.meta.items() if key != "example_value"}
