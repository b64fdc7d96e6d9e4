"""`Skeleton`: a local graph without its ints, which graphs that differ in sizes alone share; and
the sizes as formulas of a few symbols.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import attrs
import torch

from .. import _compat

DIVISORS = (2, 3, 4, 8)  # of sizes, as in x[: n // 2]
Row = tuple[int, ...]  # the ints of one graph, in order
CALLS = (_compat.OpOverload, type(operator.getitem))


class Skeleton(NamedTuple):
    """A graph without its ints.

    Args:
        key: equal for graphs that differ in ints alone.
        ints: the ints, in order.
        places: the first of them that are shape and strides of inputs: for each input the
            number of its dims.
    """

    key: tuple[Any, ...]
    ints: Row
    places: tuple[int, ...]


def skeleton_of(graph: torch.fx.Graph) -> Skeleton | None:
    """Split a graph of ATen ops into its skeleton and its ints. None for a graph with loops or
    other graphs inside.
    """
    ints: list[int] = []
    key: list[Any] = []
    numbers: dict[torch.fx.Node, int] = {}
    placeholders = graph.find_nodes(op="placeholder")
    for node in placeholders:
        x = node.meta["val"]
        key.append((x.dtype, str(x.device), x.dim()))
        ints += [*x.shape, *x.stride()]
    for number, node in enumerate(graph.nodes):
        numbers[node] = number
        if node.op == "placeholder":
            continue
        if node.op != "output" and not isinstance(node.target, CALLS):
            return None
        args = _strip_ints((node.args, dict(node.kwargs)), ints, numbers)
        key.append((node.op, node.target, args))
    places = tuple(node.meta["val"].dim() for node in placeholders)
    return Skeleton(tuple(key), tuple(ints), places)


def _strip_ints(x: Any, ints: list[int], numbers: dict[torch.fx.Node, int]) -> Any:
    """Return arguments without their ints, which are appended to a list. Equal only if the rest is
    equal.
    """
    if isinstance(x, torch.fx.Node):
        return "node", numbers[x]
    if type(x) is int:
        ints.append(x)
        return "int"
    if isinstance(x, (tuple, list)):
        return "row", *(_strip_ints(child, ints, numbers) for child in x)
    if isinstance(x, dict):
        named = ((name, _strip_ints(child, ints, numbers)) for name, child in x.items())
        return "dict", *named
    return type(x), repr(x)


def replace_ints(x: Any, feed: Iterator[Any]) -> Any:
    """Return arguments with other ints, in the order of `skeleton_of`."""
    if type(x) is int:
        return next(feed)
    if isinstance(x, (tuple, list)):
        children = [replace_ints(child, feed) for child in x]
        return tuple(children) if isinstance(x, tuple) else children
    if isinstance(x, dict):
        return {name: replace_ints(child, feed) for name, child in x.items()}
    return x


@attrs.frozen
class Formula:
    """A product of symbols times a factor, plus a term, divided and rounded down."""

    symbols: tuple[int, ...]
    factor: int
    term: int = 0
    divisor: int = 1

    def at(self, sizes: Sequence[Any]) -> Any:
        """Evaluate the formula for sizes, which may be symbols themselves."""
        value: Any = self.factor
        for k in self.symbols:
            value = value * sizes[k]
        value = value + self.term if self.term else value
        return value // self.divisor if self.divisor > 1 else value


class Formulas(NamedTuple):
    """The ints of all graphs with one skeleton, each as a formula of symbols.

    Args:
        bases: for each symbol, the place of its value among the ints.
        of: a formula for each int.
    """

    bases: tuple[int, ...]
    of: tuple[Formula, ...]

    def at(self, sizes: Sequence[Any]) -> list[Any]:
        """Evaluate all formulas for some sizes."""
        return [formula.at(sizes) for formula in self.of]

    def fits(self, row: Row) -> bool:
        """Return whether the ints of a graph are these formulas of its own sizes."""
        return self.at([row[i] for i in self.bases]) == list(row)


def formulas(rows: Sequence[Row], places: Sequence[int]) -> Formulas | None:
    """Find formulas that give all ints of some graphs. None if there are none of a simple form, or
    the graphs do not differ in sizes of inputs, each 2 or more.

    Args:
        rows: the ints of each graph.
        places: for each input the number of its dims.
    """
    columns = list(zip(*rows, strict=True))
    bases: dict[Row, int] = {}
    for i in _sizes(places):
        column = columns[i]
        if len(set(column)) > 1:
            bases.setdefault(column, i)
    symbols = list(bases)
    if any(min(column) < 2 for column in symbols):
        return None
    fitted = [_formula(column, symbols) for column in columns]
    if None in fitted or not symbols:
        return None
    return Formulas(tuple(bases.values()), tuple(f for f in fitted if f is not None))


def _sizes(places: Sequence[int]) -> Iterator[int]:
    """Yield the positions of the sizes of inputs among the ints; strides come between them."""
    start = 0
    for dims in places:
        yield from range(start, start + dims)
        start += 2 * dims


def _formula(column: Row, symbols: Sequence[Row]) -> Formula | None:
    """Find the simplest formula for the values of one int in all graphs."""
    if len(set(column)) == 1:
        return Formula((), column[0])
    for find in (_as_multiple, _as_shifted_multiple, _as_quotient):
        for k in _products(symbols):
            values = [_product(symbols, k, i) for i in range(len(column))]
            if (found := find(column, values)) is not None:
                return Formula(k, *found)
    return None


def _products(symbols: Sequence[Row]) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of each symbol, and of each product of two."""
    numbers = range(len(symbols))
    yield from ((k,) for k in numbers)
    yield from itertools.combinations_with_replacement(numbers, 2)


def _product(symbols: Sequence[Row], numbers: Sequence[int], i: int) -> int:
    """Multiply the values of some symbols in the i-th graph."""
    value = 1
    for k in numbers:
        value *= symbols[k][i]
    return value


def _as_quotient(column: Row, values: Sequence[int]) -> tuple[int, int, int] | None:
    """Fit a column as (product + term) // divisor; return factor 1, term and divisor."""
    for divisor in DIVISORS:
        for term in range(divisor):
            pairs = zip(column, values, strict=True)
            if all(x == (y + term) // divisor for x, y in pairs):
                return 1, term, divisor
    return None


def _as_multiple(column: Row, values: Sequence[int]) -> tuple[int, int] | None:
    """Fit a column as factor * product; return the factor and no term."""
    factor = column[0] // values[0]
    pairs = zip(column, values, strict=True)
    return (factor, 0) if all(x == factor * y for x, y in pairs) else None


def _as_shifted_multiple(column: Row, values: Sequence[int]) -> tuple[int, int] | None:
    """Fit a column as factor * product + term; return both."""
    other = next((i for i, y in enumerate(values) if y != values[0]), None)
    if other is None:
        return None
    factor = (column[other] - column[0]) // (values[other] - values[0])
    term = column[0] - factor * values[0]
    pairs = zip(column, values, strict=True)
    is_right = all(x == factor * y + term for x, y in pairs)
    return (factor, term) if is_right else None


ArgumentsOf = Callable[[torch.fx.Node], tuple[Any, Any]]


def arguments_with(graph: torch.fx.Graph, skeleton: Skeleton, ints: Sequence[Any]) -> ArgumentsOf:
    """Return a function from each node of a graph to its arguments with other ints."""
    feed = iter(ints)
    for _ in range(2 * sum(skeleton.places)):
        next(feed)
    arguments = {
        node: replace_ints((node.args, dict(node.kwargs)), feed)
        for node in graph.nodes
        if node.op != "placeholder"
    }
    return lambda node: arguments.get(node, (node.args, node.kwargs))
