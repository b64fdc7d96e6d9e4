"""Keys that a program uses twice, which gives two draws the same random numbers.

Every value of the program gets a number. Values that are computed alike, such as `keys[0]` twice,
have the same one. A draw and a split use their key. `fold_in` does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import ShardError
from ..ops.loops import Branch, Loop, Scan, While
from ..ops.nodes import returned_by
from ..ops.random_bits import DRAW, SPLIT
from .drawing import use_of

aten = torch.ops.aten
Lines = list[str | None]  # where a key is used


def used_keys(graph: torch.fx.Graph, name: str, constants: Sequence[torch.Tensor]) -> list[int]:
    """The inputs of a program that it uses as keys, each once.

    Args:
        graph: the program, whose nodes know their lines and phases.
        name: of the function.
        constants: the values of its last inputs.

    Raises:
        ShardError: it uses a key twice; names both lines.
    """
    inputs = graph.find_nodes(op="placeholder")
    numbers = _Numbers()
    input_numbers = [numbers.fresh() for _ in inputs[: len(inputs) - len(constants)]]
    input_numbers += [numbers.of("constant", *_content(x)) for x in constants]
    uses = numbers.uses(graph, input_numbers)[0]
    for lines in uses.values():
        if len(lines) > 1:
            first, second = lines[:2]
            raise ShardError.of(
                name,
                f"a key is used twice: at {first} and at {second}",
                needed="one draw, or one split, for each key",
                fix="first, second = sf.random.split(key)",
                source=second,
                arg_path="key",
            )
    return [i for i, number in enumerate(input_numbers) if number in uses]


def _content(x: torch.Tensor) -> tuple[Any, ...]:
    """What identifies a constant: the values of a random key, else the tensor itself."""
    is_key = x.dtype == torch.int64 and tuple(x.shape) == (2,)
    return tuple(x.tolist()) if is_key else (id(x),)


class _Numbers:
    """Numbers of values: values that are computed in the same way have the same number."""

    def __init__(self) -> None:
        self.counter = itertools.count()
        self.known: dict[tuple[Any, ...], int] = {}

    def fresh(self) -> int:
        """A new number, of a value that equals no other."""
        return next(self.counter)

    def of(self, *computed: Any) -> int:
        """The number of the values that are computed by this op from these inputs."""
        return self.known.setdefault(computed, next(self.counter))

    def uses(
        self, graph: torch.fx.Graph, input_numbers: Sequence[int]
    ) -> tuple[dict[int, Lines], list[int]]:
        """The lines where each random key is used, by its number, and the numbers of the results.

        Args:
            graph: to look through.
            input_numbers: the numbers of its inputs.
        """
        inputs = iter(input_numbers)
        numbers = dict[torch.fx.Node, int]()
        uses: dict[int, Lines] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                numbers[node] = next(inputs)
            elif isinstance(node.target, Loop):
                numbers[node] = self.fresh()
                if node.meta.get("phase") != "backward":
                    args = [numbers[x] for x in node.args]
                    _add(uses, self._inside(node.target, args))
            elif node.op == "get_attr":  # a graph of a higher-order op
                numbers[node] = self.fresh()
            elif node.op == "call_function":
                numbers[node] = self._value(node, numbers)
                if _is_use(node):
                    key = numbers[node.args[0]]
                    uses.setdefault(key, []).append(node.meta.get("source"))
        return uses, [numbers.get(x, -1) for x in returned_by(graph)]  # one may be there twice

    def _value(self, node: torch.fx.Node, numbers: dict[torch.fx.Node, int]) -> int:
        """The number of the value that a call computes."""
        if _is_identity(node):
            return numbers[node.args[0]]  # type: ignore[index]
        numbered = torch.fx.map_arg((node.args, node.kwargs), lambda x: f"%{numbers[x]}")
        try:
            return self.of(node.target, repr(numbered))
        except TypeError:  # a target without a hash
            return self.fresh()

    def _inside(self, loop: Loop, args: Sequence[int]) -> dict[int, Lines]:
        """Where a loop or a branch uses keys. A key that is the same for all runs counts twice."""
        if isinstance(loop, Branch):
            either = [self.uses(graph, args[:-1])[0] for graph in loop.graphs]
            return {k: max((e.get(k, []) for e in either), key=len) for k in _keys(either)}
        if isinstance(loop, Scan) and (loop.transposes or not loop.length):
            return {}
        is_repeated = not isinstance(loop, Scan) or loop.length > 1
        carries = loop.carries if isinstance(loop, Scan | While) else 0
        uses: dict[int, Lines] = {}
        for graph in loop.graphs:
            inputs = graph.find_nodes(op="placeholder")
            changing = [self.fresh() for _ in inputs[loop.consts :]]
            inside, results = self.uses(graph, [*args[: loop.consts], *changing])
            before = changing[:carries]
            kept = {a for a, b in zip(before, results, strict=False) if a == b}
            same = kept.union(args[: loop.consts])
            for key, lines in inside.items():
                times = 2 if is_repeated and key in same else 1
                _add(uses, {key: lines * times})
        return uses


def _is_identity(node: torch.fx.Node) -> bool:
    """Whether a call returns the values of its input unchanged."""
    if node.target is aten.permute.default:
        dims: Any = node.args[1]
        return list(dims) == list(range(len(dims)))
    return node.target in (aten.clone.default, aten.alias.default, aten.detach.default)


def _is_use(node: torch.fx.Node) -> bool:
    return use_of(node) in (DRAW, SPLIT) and node.meta.get("phase") != "backward"


def _keys(uses: Sequence[dict[int, Lines]]) -> set[int]:
    return {key for one in uses for key in one}


def _add(uses: dict[int, Lines], more: dict[int, Lines]) -> None:
    for key, lines in more.items():
        uses.setdefault(key, []).extend(lines)
