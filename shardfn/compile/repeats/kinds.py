"""`Block`: a run of ops of a program, in a form in which equal runs are equal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from operator import getitem
from typing import Any

import attrs
import torch

from ...capture.checkpoint.recompute import is_view
from ...ops.pack import PACK
from ..loops import RUN_LOOP
from ..text import Unwritable, tensor_text, value_text
from ..text.ops import name_of

aten = torch.ops.aten
Node = torch.fx.Node
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}


def may_be_in_block(node: Node) -> bool:
    """Return whether a block may hold a node: an op that computes tensors from its arguments alone.

    A product that is a part of a bucket is none: it is computed in the bucket's memory.
    """
    if node.op != "call_function" or "collective" in node.meta or name_of(node.target) is None:
        return False
    if node.target is RUN_LOOP or _is_of_loop(node) or _is_mutable(node):
        return False
    namespace = getattr(node.target, "namespace", "aten")
    is_part = node.target in PRODUCTS and all(user.target is PACK for user in node.users)
    return namespace != "_c10d_functional" and not is_part


def _is_of_loop(node: Node) -> bool:
    """Return whether a value is one of the results of a loop."""
    return node.target is getitem and node.all_input_nodes[0].target is RUN_LOOP


def _is_mutable(node: Node) -> bool:
    """Return whether an op writes to an argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def text_of_value(node: Node) -> Any:
    """Write the fake value of a node.

    Raises:
        Unwritable: it has symbols for sizes, or is no tensor.
    """
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return tensor_text(value)
    if isinstance(value, (tuple, list)):
        return [None if x is None else tensor_text(x) for x in value]
    raise Unwritable(f"a value of type {type(value).__name__}")


def text_of_op(node: Node, value: Any, number: Any) -> list[Any]:
    """Write an op with its arguments.

    Args:
        node: of the op.
        value: the text of its value.
        number: what stands for an argument that is a node.
    """
    kwargs = {k: value_text(x, number) for k, x in node.kwargs.items()}
    return [name_of(node.target), [value_text(x, number) for x in node.args], kwargs, value]


@attrs.frozen(eq=False)
class Block:
    """A run of ops of a program, in a form in which equal runs are equal.

    Views and constants that it reads are a part of it, so that it reads what has memory alone.

    Args:
        nodes: of the run, in order.
        values: the nodes whose values its form numbers: what it reads, and what it computes.
        operands: the numbers of what it reads.
        key: equal for blocks that compute the same from their operands.
    """

    nodes: tuple[Node, ...]
    values: tuple[Node, ...]
    operands: tuple[int, ...]
    key: str

    @property
    def read(self) -> list[Node]:
        """Return the nodes that it reads."""
        return [self.values[k] for k in self.operands]

    def results(self) -> set[int]:
        """Return the numbers of the values that are read outside of it. Views are made again."""
        number = {node: k for k, node in enumerate(self.values)}
        operands = set(self.read)
        inside = set(self.nodes)
        found = set()
        for node in self.nodes:
            if all(user in inside for user in node.users):
                continue
            base = node
            while base in inside and is_view(base):
                base = base.all_input_nodes[0]
            if base in inside and base not in operands:
                found.add(number[base])
        return found


def without_torn_end(nodes: Sequence[Node]) -> Sequence[Node]:
    """Return a run of ops up to the first whose results, several in one, are read after it."""
    inside = set(nodes)
    for k, node in enumerate(nodes):
        is_several = not isinstance(node.meta["val"], torch.Tensor)
        if is_several and any(user not in inside for user in node.users):
            return without_torn_end(nodes[:k])
    return nodes


def block_of(nodes: Sequence[Node], value_texts: Mapping[Node, Any]) -> Block | None:
    """Write a run of ops in a form in which equal runs are equal; None if it reads what no block
    may read.

    Args:
        nodes: of the run, without a torn end.
        value_texts: of the values of all nodes that blocks may hold or read.
    """
    writing = _Writing(frozenset(nodes), value_texts)
    if not all(map(writing.add, nodes)):
        return None
    digest = hashlib.sha256(json.dumps(writing.rows).encode()).hexdigest()
    return Block(tuple(nodes), tuple(writing.number), tuple(writing.operands), digest)


@attrs.define(eq=False)
class _Writing:
    """The rows of a block's form so far."""

    inside: frozenset[Node]
    value_texts: Mapping[Node, Any]
    number: dict[Node, int] = attrs.field(factory=dict)
    operands: list[int] = attrs.field(factory=list)
    rows: list[Any] = attrs.field(factory=list)

    def add(self, node: Node) -> bool:
        """Write a node, after what it reads. Return whether it may be a part of a block."""
        if node in self.number:
            return True
        if node not in self.value_texts:
            return False
        if self.is_own(node):
            if not all(map(self.add, node.all_input_nodes)):
                return False
            row = text_of_op(node, self.value_texts[node], self.number.__getitem__)
        elif isinstance(node.meta["val"], torch.Tensor):
            self.operands.append(len(self.number))
            row = [self.value_texts[node]]
        else:
            return False
        self.number[node] = len(self.number)
        self.rows.append(row)
        return True

    def is_own(self, node: Node) -> bool:
        """Return whether a block computes a value: not if it is one of several results of an op
        outside.
        """
        if node in self.inside:
            return node.target is not getitem or node.args[0] in self.inside
        return _is_made_again(node)


def _is_made_again(node: Node) -> bool:
    """Return whether each block that reads a value makes it: a view, or a constant."""
    return may_be_in_block(node) and (is_view(node) or not node.all_input_nodes)


def graph_of_block(
    block: Block, results: Sequence[int], writes: Sequence[tuple[int, int]]
) -> torch.fx.Graph:
    """Build the graph of a block: first the operands that it reads, then those that it writes to.

    Args:
        block: one of its kind.
        results: the numbers of its results.
        writes: (number of an operand, number of the value that is written into its memory).
    """
    graph = torch.fx.Graph()
    made: dict[Node, Node] = {}
    written = [operand for operand, _ in writes]
    for k in (*(k for k in block.operands if k not in written), *written):
        node = block.values[k]
        made[node] = graph.placeholder(f"in_{k}")
        made[node].meta["val"] = node.meta["val"]
    for node in block.values:
        if node not in made:
            made[node] = graph.node_copy(node, made.__getitem__)
    for operand, value in writes:
        into, new = (made[block.values[k]] for k in (operand, value))
        copy = graph.call_function(aten.copy_.default, (into, new))
        copy.meta["val"] = into.meta["val"]
    graph.output([made[block.values[k]] for k in results])
    return graph
