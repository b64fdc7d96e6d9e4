"""Which nodes draw random numbers."""

from __future__ import annotations

import torch


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
        node.args[position]
        if len(node.args) > position
        else node.kwargs.get("dropout_p", 0.0)
    )
