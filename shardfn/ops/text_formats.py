"""The text formats of op arguments, each with a printer and a parser. Dynamo accepts only
constants, so an op's mesh axes, shards, pairs of ranks, specs and records are texts.

| format | text | value |
|---|---|---|
| axes | `dp,tp` | `("dp", "tp")` |
| shards | `dp:2=0,tp:4=` | `[("dp", 2, 0), ("tp", 4, None)]`: axis, size, sharded dim |
| sized_shards | `dp:2=0@3/5` | `[("dp", 2, 0, (3, 5))]`: also the size on one rank and before |
| placed | `dp=S0,tp=R` | `(("dp", "S0"), ("tp", "R"))`: the DTensor placement on each axis |
| placed_list | `dp=S0;dp=R` | `("dp=S0", "dp=R")`: `placed` of each DTensor that a tensor holds |
| part | `tp=S0|4,6` | `("tp=S0", (4, 6))`: `placed` of a DTensor on a part, its shape |
| pairs | `0>1,1>2` | `((0, 1), (1, 2))`: source rank, destination rank |
| spec | `*;dp,tp;` | `(("*",), ("dp", "tp"), ())`: mesh axes of each dim; `*` keeps its placement |
| | `;tp|pp=@1` | `((), ("tp",))`, and `(("pp", "@1"),)`: the stages on other axes |
| record | `["w", 1024, null]` | the fields of a record, as JSON |

Policies of `checkpoint` are texts too, in the syntax of Python: `capture/checkpoint/policies.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from .. import _compat

KEEP = "*"  # of a spec: the dim keeps its placement
STAGE_AXIS = ""  # of a spec: the mesh axis that has stages

Shard = tuple[str, int, int | None]  # mesh axis, its size, the dim that is sharded
Sizes = tuple[int, int]  # the size of one rank's chunk, and the size before
SizedShard = tuple[str, int, int | None, Sizes | None]


@_compat.read_by_dynamo
def print_axes(names: Iterable[str]) -> str:
    """Print mesh axes as text.

    Example:
        >>> print_axes(("dp", "tp"))
        'dp,tp'
    """
    return ",".join(list(names))


def parse_axes(text: str) -> tuple[str, ...]:
    """Parse the mesh axes of a text.

    Example:
        >>> parse_axes("dp,tp"), parse_axes("")
        (('dp', 'tp'), ())
    """
    return tuple(text.split(",")) if text else ()


@_compat.read_by_dynamo
def print_shards(shards: Iterable[Shard]) -> str:
    """Print how mesh axes shard a tensor.

    Example:
        >>> print_shards([("dp", 2, 0), ("tp", 4, None)])
        'dp:2=0,tp:4='
    """
    return ",".join([f"{name}:{size}={'' if dim is None else dim}" for name, size, dim in shards])


def parse_shards(text: str) -> list[Shard]:
    """Parse how mesh axes shard a tensor: (axis, size, sharded dim) for each axis.

    Example:
        >>> parse_shards("dp:2=0,tp:4=")
        [('dp', 2, 0), ('tp', 4, None)]
    """
    return [(name, n, dim) for name, n, dim, _ in parse_sized_shards(text)]


def print_sized_shards(shards: Iterable[SizedShard]) -> str:
    """Print how mesh axes shard a tensor, with the sizes on one rank where chunks are uneven.

    Example:
        >>> print_sized_shards([("dp", 2, 0, (3, 5)), ("tp", 4, None, None)])
        'dp:2=0@3/5,tp:4='
    """
    return ",".join(
        [
            print_shards([(name, n, dim)]) + ("" if sizes is None else f"@{sizes[0]}/{sizes[1]}")
            for name, n, dim, sizes in shards
        ]
    )


def parse_sized_shards(text: str) -> list[SizedShard]:
    """Parse how mesh axes shard a tensor, with the sizes on one rank where chunks are uneven.

    Example:
        >>> parse_sized_shards("dp:2=0@3/5,tp:4=")
        [('dp', 2, 0, (3, 5)), ('tp', 4, None, None)]
    """
    return [_parse_sized_shard(entry) for entry in text.split(",") if entry]


def _parse_sized_shard(entry: str) -> SizedShard:
    """Parse one entry `dp:2=0@3/5`: axis, size, sharded dim, local and previous size."""
    shard, _, sizes = entry.partition("@")
    name, n, dim = shard.replace(":", "=").split("=")
    local, _, total = sizes.partition("/")
    uneven = (int(local), int(total)) if sizes else None
    return name, int(n), int(dim) if dim else None, uneven


@_compat.read_by_dynamo
def print_placed(rows: Iterable[tuple[str, str]]) -> str:
    """Print the DTensor placement on each mesh axis.

    Example:
        >>> print_placed([("dp", "S0"), ("tp", "R"), ("pp", "Psum")])
        'dp=S0,tp=R,pp=Psum'
    """
    return ",".join([f"{axis}={placement}" for axis, placement in rows])


def parse_placed(text: str) -> tuple[tuple[str, str], ...]:
    """Parse the DTensor placement on each mesh axis.

    Example:
        >>> parse_placed("dp=S0,tp=R,pp=Psum")
        (('dp', 'S0'), ('tp', 'R'), ('pp', 'Psum'))
    """
    rows = [entry.split("=") for entry in text.split(",") if entry]
    return tuple((axis, placement) for axis, placement in rows)


def print_placed_list(texts: Iterable[str]) -> str:
    """Join the `placed` texts of each DTensor that a tensor subclass holds.

    Example:
        >>> print_placed_list(["dp=S0", "dp=R"])
        'dp=S0;dp=R'
    """
    return ";".join(texts)


def parse_placed_list(text: str) -> tuple[str, ...]:
    """Split the text of several DTensors into the `placed` text of each.

    Example:
        >>> parse_placed_list("dp=S0;dp=R")
        ('dp=S0', 'dp=R')
    """
    return tuple(text.split(";")) if text else ()


@_compat.read_by_dynamo
def print_part(placed: str, shape: Iterable[int]) -> str:
    """Print the placements of a DTensor on a part of the mesh, and its shape.

    Example:
        >>> print_part("tp=S0", (4, 6))
        'tp=S0|4,6'
    """
    return placed + "|" + ",".join([str(n) for n in shape])


def parse_part(text: str) -> tuple[str, tuple[int, ...]]:
    """Parse the text of a DTensor on a part of the mesh: its `placed` text and its shape.

    Example:
        >>> parse_part("tp=S0|4,6")
        ('tp=S0', (4, 6))
    """
    placed, sizes = text.split("|")
    return placed, tuple(int(n) for n in sizes.split(",") if n)


def is_part(text: str) -> bool:
    """Return whether a text describes a DTensor on a part of the mesh.

    Example:
        >>> is_part("tp=S0|4,6"), is_part(" tp=Psum")
        (True, False)
    """
    return "|" in text


@_compat.read_by_dynamo
def print_pairs(pairs: Iterable[Sequence[int]]) -> str:
    """Print pairs (source rank, destination rank) as text.

    Example:
        >>> print_pairs([(0, 1), (1, 2)])
        '0>1,1>2'
    """
    return ",".join([f"{source}>{destination}" for source, destination in pairs])


def parse_pairs(text: str) -> tuple[tuple[int, int], ...]:
    """Parse the pairs (source rank, destination rank) of a text.

    Example:
        >>> parse_pairs("0>1,1>2")
        ((0, 1), (1, 2))
    """
    rows = [pair.split(">") for pair in text.split(",") if pair]
    return tuple((int(source), int(destination)) for source, destination in rows)


@_compat.read_by_dynamo
def print_spec(dims: Iterable[Sequence[str]], stages: Iterable[tuple[str, str]] = ()) -> str:
    """Print the mesh axes of each tensor dim as text, and the stages on other axes.

    Example:
        >>> print_spec([("*",), ("dp", "tp"), ()]), print_spec([(), ("tp",)], [("pp", "@1")])
        ('*;dp,tp;', ';tp|pp=@1')
    """
    text = ";".join([",".join(axes) for axes in dims]) or ";"
    on_stages = print_placed(stages)
    return f"{text}|{on_stages}" if on_stages else text


def parse_spec(text: str) -> tuple[tuple[str, ...], ...]:
    """Parse the mesh axes of each tensor dim.

    Example:
        >>> parse_spec("*;dp,tp;"), parse_spec(";tp|pp=@1")
        ((('*',), ('dp', 'tp'), ()), ((), ('tp',)))
    """
    return tuple(parse_axes(entry) for entry in text.partition("|")[0].split(";"))


def parse_stages(text: str) -> tuple[tuple[str, str], ...]:
    """Parse the stages of a spec: the placement on each axis that has one.

    Example:
        >>> parse_stages(";tp|pp=@1"), parse_stages(";tp")
        ((('pp', '@1'),), ())
    """
    return parse_placed(text.partition("|")[2])


def print_record(fields: Sequence[Any]) -> str:
    """Print the fields of a record as JSON: numbers, strings, None, and sequences of these.

    Example:
        >>> print_record(("w", 1024, None, ((0, 1),)))
        '["w", 1024, null, [[0, 1]]]'
    """
    return json.dumps(fields)


def parse_record(text: str) -> tuple[Any, ...]:
    """Parse the fields of a record from JSON; sequences become tuples.

    Example:
        >>> parse_record('["w", 1024, null, [[0, 1]]]')
        ('w', 1024, None, ((0, 1),))
    """
    return _as_tuples(json.loads(text))


def _as_tuples(x: Any) -> Any:
    """Convert nested lists to nested tuples."""
    return tuple(_as_tuples(y) for y in x) if isinstance(x, list) else x
