"""The varying axes of the prims of per-rank code: those of each result, and those that each
argument must have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ...errors import PlacementError
from ...ops import shard_map
from ...ops.nodes import args_of
from ...ops.text_formats import parse_axes, parse_shards
from .. import annotations as sources

Axes = frozenset[str]
NONE: Axes = frozenset()


class Arguments(Protocol):
    """The varying axes of the arguments of nodes."""

    def flat(self, x: Any) -> Axes:
        """All axes over which any part of an argument varies."""
        ...


def _named(text: str) -> Axes:
    return frozenset(parse_axes(text))


def _cut_axes(text: str) -> Axes:
    return frozenset(name for name, _, dim in parse_shards(text) if dim is not None)


def _left(kinds: Arguments, node: torch.fx.Node) -> Axes:
    """The varying axes of a result of a shard_map. It must be invariant over the axes that do
    not shard it.
    """
    x, text, where = args_of(node)
    every = frozenset(name for name, _, _ in parse_shards(text))
    cut = _cut_axes(text)
    wrong = sorted((every - cut) & kinds.flat(x))
    if wrong:
        said = " and ".join(wrong)
        source = sources.line_of(x.meta.get("stack_trace")) or sources.line_of(
            node.meta.get("stack_trace")
        )
        fix = f"psum or pmean it over {said}, or name {said} in its out_placements"
        head, path = where.split(": ")
        got = (
            f"{path} varies over {said}, and its out_placements require it to be invariant over "
            f"{'it' if len(wrong) == 1 else 'them'}"
        )
        raise PlacementError.of(head, got, fix=fix, source=source, arg_path=path)
    return kinds.flat(x) - every


RESULT: dict[Any, Callable[[Arguments, torch.fx.Node], Axes]] = {
    shard_map.to_local: lambda kinds, node: (
        kinds.flat(args_of(node)[0]) | _cut_axes(args_of(node)[1])
    ),
    shard_map.from_local: _left,
    shard_map.vary: lambda kinds, node: (
        kinds.flat(args_of(node)[0]) | _named(args_of(node)[1])
    ),
    shard_map.psum: lambda kinds, node: (
        kinds.flat(args_of(node)[0]) - _named(args_of(node)[1])
    ),
    shard_map.extremum: lambda kinds, node: (
        kinds.flat(args_of(node)[0]) - _named(args_of(node)[1])
    ),
    shard_map.all_gather: lambda kinds, node: (
        kinds.flat(args_of(node)[0]) - {args_of(node)[1]}
    ),
    shard_map.own_piece: lambda kinds, node: (
        kinds.flat(args_of(node)[0]) | {args_of(node)[1]}
    ),
    shard_map.all_to_all: lambda kinds, node: (
        kinds.flat(args_of(node)[0]) | {args_of(node)[1]}
    ),
    shard_map.ppermute: lambda kinds, node: (
        kinds.flat(args_of(node)[0]) | {args_of(node)[1]}
    ),
    shard_map.axis_index: lambda kinds, node: frozenset((args_of(node)[0],)),
}
NEEDED: dict[
    Any, Callable[[torch.fx.Node], Axes]
] = {  # the axes over which a prim's argument must vary
    shard_map.from_local: lambda node: _cut_axes(args_of(node)[1]),
    shard_map.psum: lambda node: _named(args_of(node)[1]),
    shard_map.extremum: lambda node: _named(args_of(node)[1]),
    shard_map.all_gather: lambda node: frozenset((args_of(node)[1],)),
    shard_map.all_to_all: lambda node: frozenset((args_of(node)[1],)),
    shard_map.ppermute: lambda node: frozenset((args_of(node)[1],)),
}
