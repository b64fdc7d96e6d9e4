"""How the prims of per-rank code vary: over which axes the result of each does, and over which
its argument has to.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ...errors import CaptureError, PlacementError
from ...ops import shard_map
from ...ops.prims import CALLS, Axes, constants_of, implement
from ...ops.text_formats import parse_shards
from .. import annotations as sources
from .gradients import Facts, of_prim


class Arguments(Protocol):
    """Says how the arguments of nodes vary."""

    def flat(self, x: Any) -> Axes:
        """All axes over which something in an argument varies."""
        ...


def result(kinds: Arguments, node: torch.fx.Node) -> Facts:
    """The facts of the result of a prim."""
    prim = CALLS[node.target]
    before = kinds.flat(node.args)
    if prim.check is not None:
        prim.check(before, node)
    return of_prim(node, before)


def _check_invariant(before: Axes, node: torch.fx.Node) -> None:
    """Check that a result of a shard_map is the same on all ranks of the axes that do not shard
    it.
    """
    x, (text, *_) = node.args[0], constants_of(node)
    assert isinstance(x, torch.fx.Node)
    every = frozenset(name for name, _, _ in parse_shards(text))
    wrong = sorted((every - CALLS[node.target].axes_of(node)) & before)
    if wrong:
        said = " and ".join(wrong)
        source = sources.line_of(x.meta.get("stack_trace")) or sources.line_of(
            node.meta.get("stack_trace")
        )
        fix = f"psum or pmean it over {said}, or name {said} in its out_placements"
        head, path = str(node.kwargs["where"]).split(": ")
        got = (
            f"{path} varies over {said}, and its out_placements require it to be invariant over "
            f"{'it' if len(wrong) == 1 else 'them'}"
        )
        raise PlacementError.of(head, got, fix=fix, source=source, arg_path=path)


def _check_one_rank(before: Axes, node: torch.fx.Node) -> None:
    """Check that all ranks of a group name the same rank to a collective."""
    where = str(node.kwargs.get("where", ""))
    wrong = sorted(CALLS[node.target].axes_of(node) & before)
    if where and wrong:
        said = " and ".join(wrong)
        raise CaptureError.of(
            where,
            f"ranks of one group name different ranks: src or dst varies over {said}",
            needed="the same rank from all ranks of the group",
            fix="dist.get_global_rank(group, 0), or group_src= or group_dst= with a number",
            source=sources.line_of(node.meta.get("stack_trace")),
        )


def _check_is_invariant(before: Axes, node: torch.fx.Node) -> None:
    """Check that a value that a user's call makes vary does not vary yet: its transpose would sum
    what is each rank's own.
    """
    where = str(node.kwargs.get("where", ""))
    wrong = sorted(CALLS[node.target].axes_of(node) & before)
    if where and wrong:
        said = " and ".join(wrong)
        raise CaptureError.of(
            where,
            f"x varies over {said} already",
            needed="a value that all ranks have",
            fix=f"x without {where}",
            source=sources.line_of(node.meta.get("stack_trace")),
        )


implement(shard_map.vary, check=_check_is_invariant)
implement(shard_map.from_local, check=_check_invariant)
implement(shard_map.as_invariant, check=_check_one_rank)
