"""Buffers that several kernels write: parts that are joined, and elements that are scattered."""

from __future__ import annotations

import torch
from torch.fx import Node

from ...ops.nodes import args_of
from . import op_kinds
from .formulas import Kernels
from .spaces import flat


def joined(known: Kernels, node: Node) -> None:
    """Add parts that are written into one buffer."""
    is_packed = node.target is torch.ops.shardfn.pack.default
    known.home[node] = node
    for x in node.all_input_nodes:
        value = known.base(x)
        is_own = value is x or _is_turned(x)
        is_free = is_own and known.home.get(value, value) is value
        is_given = value.op == "placeholder" or _is_fixed(known, value, node)
        is_shared = is_packed and len(x.users) > 1
        if is_free and not is_given and not is_shared:
            known.home[value] = node
            known.store(value)
            known.makers.setdefault(node, []).extend(known.makers[value])
        else:
            reads = known.values_of([x])
            known.add(node, reads, [node], flat(x), inputs=[x])
    known.makers.setdefault(node, [])


def _is_turned(node: Node) -> bool:
    """Whether a node is the only view of a product: that of the transposed factors."""
    product = op_kinds.turned(node)
    return op_kinds.name(product) in op_kinds.PRODUCTS


def _is_fixed(known: Kernels, value: Node, reader: Node) -> bool:
    """Whether the kernel of a value allocates it, or an earlier reader needs its strides."""
    makers = known.makers.get(value, [])
    is_product = op_kinds.name(value) in op_kinds.PRODUCTS
    is_product = is_product and not op_kinds.allocates(value)
    is_called = any(x.space is None for x in makers)
    is_own = is_called and not is_product
    is_joined = value.target in op_kinds.JOINED
    is_read = _is_read_as_laid_out(known, value, reader)
    return is_own or is_joined or is_read


def _is_read_as_laid_out(known: Kernels, value: Node, reader: Node) -> bool:
    """Whether an op that comes before another one reads a stored value's strides."""
    queue = [value] if value in known.home else []
    while queue:
        now = queue.pop()
        end = known.place[reader]
        earlier = [x for x in now.users if known.place[x] < end]
        is_read = any(x.target in op_kinds.FIXED for x in earlier)
        if is_read:
            return True
        views = [x for x in earlier if op_kinds.is_view_or_item(x)]
        queue += views
    return False


def scattered(known: Kernels, node: Node) -> None:
    """Add a copy of the first argument, and a kernel that writes elements into it."""
    first, *_ = args_of(node)
    others = [x for x in node.all_input_nodes if x is not first]
    if _is_scattered_in_place(known, node):
        _scattered_in_place(known, node, others)
        return
    values = known.values_of([first])
    copy = known.add(node, values, [node], flat(node), inputs=[first])
    if op_kinds.is_scattered_by_call(node):
        stored = [known.store(x) for x in others]
        known.add(node, stored, [node], after=[copy])
        return
    values = known.values_of(others)
    space = flat(op_kinds.source_of(node))
    known.add(node, values, [node], space, [copy], others)


def _is_scattered_in_place(known: Kernels, node: Node) -> bool:
    """Whether elements are written into a stored value itself, since nothing reads it later."""
    value = known.base(args_of(node)[0])
    is_known = op_kinds.name(node) in op_kinds.REPLACED
    is_stored = value in known.home
    return is_known and is_stored and known.is_last(node, value)


def _scattered_in_place(known: Kernels, node: Node, others: list[Node]) -> None:
    value = known.base(args_of(node)[0])
    for x, formula in list(known.formulas.items()):
        if value in formula.values:
            known.store(x)
    before = known.readers.get(value, [])
    known.home[node] = known.home[value]
    if op_kinds.is_scattered_by_call(node):
        stored = [known.store(x) for x in others]
        known.add(node, [value, *stored], [node], after=[*before])
        return
    values = known.values_of(others)
    space = flat(op_kinds.source_of(node))
    known.add(node, [value, *values], [node], space, list(before), others)
