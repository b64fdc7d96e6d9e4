"""One record per op: all that partition knows of it. A new op is a row in the table of a family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from ...types import MeshPlacements
from .strategy import Choice, OpCall, Rule


@attrs.frozen
class Op:
    """All that partition knows of one op: its rule, its lowering, and facts about it.

    Args:
        rule: its strategies. None: it runs on global values.
        lower: how a rank computes it, where that is not the op itself on shards.
        lower_at: the same, of an op that must know where its result lies.
        local_args: the arguments of a rank, from the global ones and the shapes of its shards.
        size_arg: the position of the argument that is the shape of the result.
        as_view: whether a rank runs it as a view to its local shape, as a dim of local size 1
            need not have global size 1.
        decided_by_first: whether a rank runs it if its shard of the first input is not empty.
        run_empty: whether a rank with empty shards runs it, too.
        strided: whether a strategy for a chunk of a dim is one for any elements of it. Other ops
            read where a shard is, or neighbours.
        numbered_dims: the dims of the first input of which it reads elements by number: it is
            strided on the others.
        strided_by: whether it is strided by a strategy, where strategies differ.
        fits: whether strategies of several axes go together, given the placements of its inputs.
        in_steps: writes its step as several, where ranks communicate inside of it, given the mesh
            and a function that makes slots.
        way_of: the name of a strategy that a user may ask for (`attention={"cp": "ring"}`).
        sends: the bytes that a rank sends inside of it over one axis, and in how many collectives:
            from the placements of its inputs, the axis and the sizes of the mesh.
        gradients_of: for each result the position of the input whose gradient it is, and to
            whose placement it is reduced if it is Partial; None for another.
        of_sizes: whether its rule reads the sizes, dtypes and numbers of a call alone, neither
            where its arguments come from nor who reads its result.
        rearranges: whether it only rearranges: its results from a program's inputs are available
            from the start.
        constant_of: the position of the argument whose constant it keeps, if that has its dtype.
    """

    rule: Rule | None = None
    lower: Callable[..., Any] | None = None
    lower_at: Callable[..., Any] | None = None
    local_args: Callable[[list[Any], list[tuple[int, ...]]], list[Any]] | None = None
    size_arg: int | None = None
    as_view: bool = False
    decided_by_first: bool = False
    run_empty: bool = False
    strided: bool = False
    numbered_dims: Callable[[OpCall], list[int]] | None = None
    strided_by: Callable[[OpCall, Choice], bool] | None = None
    fits: Callable[[OpCall, Sequence[MeshPlacements]], bool] | None = None
    in_steps: Callable[..., Sequence[Any]] | None = None
    way_of: Callable[[OpCall, Choice], str | None] | None = None
    sends: Callable[..., tuple[float, int]] | None = None
    gradients_of: Callable[[OpCall], Sequence[int | None]] | None = None
    of_sizes: bool = False
    rearranges: bool = False
    constant_of: int | None = None


Rows = dict[object, Op]
