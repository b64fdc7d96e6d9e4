"""`outline`: a program in which blocks that repeat are calls of one function for each kind."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from operator import getitem
from typing import Any

import attrs
import torch

from ...capture.aten_views import memory_of, viewed
from ...capture.checkpoint.recompute import is_view
from ..text import Unwritable
from .calls import CALL, Kind
from .kinds import (
    Block,
    Node,
    block_of,
    graph_of_block,
    may_be_in_block,
    text_of_op,
    text_of_value,
    without_torn_end,
)
from .windows import Span, Windows, repeated

aten = torch.ops.aten
LEAST_OPS = 8  # of a block: a call costs about as much as a small kernel
LEAST_SAVING = 32  # ops that need not be compiled
Writes = tuple[tuple[int, int], ...]  # (number of an operand, number of what is written to it)


@attrs.frozen(eq=False)
class Copies:
    """Blocks of one kind."""

    blocks: tuple[Block, ...]
    writes: Writes

    def results(self) -> list[int]:
        """Return the numbers of the values that some copy's surroundings read."""
        written = {value for _, value in self.writes}
        numbers = set[int]().union(*(block.results() for block in self.blocks))
        return sorted(numbers - written)


def outline(graph: torch.fx.Graph) -> tuple[torch.fx.Graph, dict[int, Kind]]:
    """Write repeated blocks of a program as calls.

    Args:
        graph: one rank's program, functional ATen, whose results may be written into donated
            inputs at its end.

    Returns:
        The program with calls, and the kinds of blocks by number. The graph itself and no kind
        where nothing repeats.
    """
    found = _Repeats(graph)
    groups = found.groups()
    if not groups:
        return graph, {}
    rewriting = _Rewriting(graph)
    for copies in groups:
        rewriting.add(copies)
    return rewriting.run(), rewriting.kinds


class _Repeats:
    """The repeated blocks of a program."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.position = {node: k for k, node in enumerate(self.nodes)}
        self.value_texts: dict[Node, Any] = {}
        self.numbers: dict[str, int] = {}  # of the texts of types and of ops, in order
        self.copies: list[Copies] = []

    def groups(self) -> list[Copies]:
        """Return the blocks to call, each kind's together."""
        repeated(self.tokens(), LEAST_SAVING, self.take)
        return self.copies

    def tokens(self) -> list[int]:
        """Return a number for each node: equal for equal ops on equal types, negative for a node
        that no block may hold.
        """
        types: dict[Node, int] = {}
        return [self.token(node, types) for node in self.nodes]

    def token(self, node: Node, types: dict[Node, int]) -> int:
        """Return the number of a node. Note the text of its value, and the number of its type."""
        try:
            if "val" in node.meta and node.op != "output":
                self.value_texts[node] = text_of_value(node)
                types[node] = self.number(self.value_texts[node])
            if not may_be_in_block(node):
                return -1
            return self.number(text_of_op(node, types[node], types.__getitem__))
        except (Unwritable, KeyError):
            return -1

    def number(self, text: Any) -> int:
        """Return a number for a text: equal for equal texts."""
        return self.numbers.setdefault(repr(text), len(self.numbers))

    def take(self, windows: Windows) -> Sequence[Span]:
        """Take the windows whose blocks are equal in all that their ops read."""
        start = windows.starts[0]
        length = len(without_torn_end(self.nodes[start : start + windows.length]))
        kinds: dict[Any, list[Block]] = {}
        for start in windows.starts if length else ():
            nodes = self.nodes[start : start + length]
            is_torn = len(without_torn_end(nodes)) < length
            block = None if is_torn else block_of(nodes, self.value_texts)
            if block is not None and block.operands:  # one of constants is made once
                kinds.setdefault((block.key, self.writes(block)), []).append(block)
        spans: list[Span] = []
        for (_, writes), blocks in kinds.items():
            if len(blocks) > 1 and _is_worthwhile(blocks):
                self.copies.append(Copies(tuple(blocks), writes))
                starts = [self.position[block.nodes[0]] for block in blocks]
                spans += [(start, start + length) for start in starts]
        return spans

    def writes(self, block: Block) -> Writes:
        """Return the values of a block that its end may write into donated operands."""
        operands = {block.values[k]: k for k in block.operands}
        memories = [memory_of(node) for node in operands]
        inside = set(block.nodes)
        end = self.position[block.nodes[-1]]
        found = []
        for k, node in enumerate(block.values):
            outside = [user for user in node.users if user not in inside]
            if k in block.operands or len(outside) != 1:
                continue
            (copy,) = outside
            if copy.target is not aten.copy_.default or copy.args[1] is not node:
                continue
            into: Any = copy.args[0]
            is_alone = into in operands and memories.count(into) == 1
            if is_alone and self._last_read(into, copy) <= end:
                found.append((operands[into], k))
        return tuple(found)

    def _last_read(self, node: Node, copy: Node) -> int:
        """Return the position of the last op that reads a value or a view of it."""
        readers = [user for user in node.users if user is not copy]
        return max(
            (
                self._last_read(user, copy) if viewed(user) is not None else self.position[user]
                for user in readers
            ),
            default=-1,
        )


def _is_worthwhile(blocks: Sequence[Block]) -> bool:
    """Return whether calls of a block are worth their cost: it computes enough."""
    ops = sum(not is_view(node) and node.target is not getitem for node in blocks[0].nodes)
    return ops >= LEAST_OPS


class _Rewriting:
    """A program being written with calls in the place of blocks.

    Args:
        graph: the program. It stays as it is.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.old = graph
        self.new = torch.fx.Graph()
        self.made: dict[Node, Node] = {}
        self.kinds: dict[int, Kind] = {}
        self.calls: dict[Node, tuple[Block, Kind, list[int], Writes]] = {}  # by its last node
        self.skipped: set[Node] = set()

    def add(self, copies: Copies) -> None:
        """Let the blocks of a kind be calls."""
        results, block = copies.results(), copies.blocks[0]
        text = json.dumps([block.key, results, copies.writes])
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
        shapes = tuple(block.values[k].meta["val"] for k in results)
        kind = Kind(number, graph_of_block(block, results, copies.writes), shapes)
        self.kinds[number] = kind
        for each in copies.blocks:
            self.calls[each.nodes[-1]] = (each, kind, results, copies.writes)
            self.skipped.update(each.nodes)

    def run(self) -> torch.fx.Graph:
        """Write the program."""
        for node in self.old.nodes:
            if node in self.calls:
                self.call(*self.calls[node])
            if node not in self.skipped and node not in self.made:
                self.made[node] = self.new.node_copy(node, self.value)
        self.new.lint()
        return self.new

    def value(self, node: Node) -> Node:
        """Return the new node of an old one. A view inside of a block is made again outside."""
        if node not in self.made:
            self.made[node] = self.new.node_copy(node, self.value)
        return self.made[node]

    def call(self, block: Block, kind: Kind, results: Sequence[int], writes: Writes) -> None:
        """Write the call of a block, and take its results out."""
        into = [operand for operand, _ in writes]
        read = [self.value(block.values[k]) for k in block.operands if k not in into]
        written = [self.value(block.values[k]) for k in into]
        call = self.new.call_function(CALL, (read, written, kind.number))
        call.meta["val"] = list(kind.results)
        for k, number in enumerate(results):
            node = block.values[number]
            self.made[node] = self.new.call_function(getitem, (call, k))
            self.made[node].meta = dict(node.meta)
        for operand, number in writes:
            copy = next(x for x in block.values[number].users if x.target is aten.copy_.default)
            self.made[copy] = self.value(block.values[operand])
