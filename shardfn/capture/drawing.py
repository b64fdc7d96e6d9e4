"""Which nodes draw random numbers, and for which use."""

from __future__ import annotations

import torch

from ..errors import ShardError
from ..ops.nodes import origin_of
from ..ops.random_bits import AMBIENT, AMBIENT_KEY, RANDOM_BITS


def draws(node: torch.fx.Node) -> bool:
    """Whether a node gives different values each time it runs.

    Attention is tagged random for its dropout, which is usually zero.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    schema = getattr(node.target, "_schema", None)
    names = [a.name for a in schema.arguments] if schema else []
    if "dropout_p" not in names:
        return True
    position = names.index("dropout_p")
    return bool(
        node.args[position] if len(node.args) > position else node.kwargs.get("dropout_p", 0.0)
    )


def use_of(node: torch.fx.Node) -> int | None:
    """The use of a node's random bits, such as DRAW; None of a node that makes none."""
    return node.args[4] if node.target is RANDOM_BITS else None  # type: ignore[return-value]


def refuse_state(graph: torch.fx.Graph, name: str) -> None:
    """Refuse the random calls that draw from the state.

    Raises:
        ShardError: there is one.
    """
    for node in graph.nodes:
        if use_of(node) in (AMBIENT, AMBIENT_KEY):
            raise ShardError.of(
                name,
                'torch draws random numbers from sf.random.state, but seed="required" was set',
                needed="a key for every draw",
                fix="draw with sf.random and a key that is an argument",
                **origin_of(node),
            )
