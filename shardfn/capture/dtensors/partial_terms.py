"""`to_local` of a Partial DTensor that `from_local` made: the tensor that it was made of."""

from __future__ import annotations

from typing import Any

import torch

from ...ops import placement, shard_map
from ...ops.nodes import args_of
from ...ops.text_formats import parse_sized_shards
from ..dynamo_nodes import graphs_of

REDUCED = shard_map.psum, shard_map.extremum


def read_local_tensors(python: torch.fx.GraphModule) -> None:
    """Replace each `own_term` by the local tensor that `from_local` was given, which has a
    derivative. Changes the graph in place.
    """
    for graph in graphs_of(python):
        for node in graph.find_nodes(op="call_function", target=shard_map.own_term):
            _replace_term(node)


def _replace_term(node: torch.fx.Node) -> None:
    """Replace the last of the terms over several axes, if that is all."""
    axes: dict[str, str] = {}
    x: Any = node
    while x.target is shard_map.own_term:
        axes[x.args[1]] = x.args[2]
        x = x.args[0]
    if any(user.target is shard_map.own_term for user in node.users):
        return
    local = _local_tensor(x, axes)
    if local is not None:
        node.replace_all_uses_with(local)


def _local_tensor(x: Any, axes: dict[str, str]) -> torch.fx.Node | None:
    """The local tensors that a Partial DTensor was made of. None if ops made it."""
    while x.target in placement.PLACING_CALLS:
        x = args_of(x)[0]
    if x.target is not shard_map.from_local:
        return None
    x, text, *_ = x.args
    if any(dim is not None for _, _, dim, _ in parse_sized_shards(text)):
        return None
    left = dict(axes)
    while x.target in REDUCED and left.pop(x.args[1], None) is not None:
        kind = axes[x.args[1]]
        x = x.args[0]
        if kind == "avg":
            x = args_of(x)[0]  # of the division
    return None if left else x
