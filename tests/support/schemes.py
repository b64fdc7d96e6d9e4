"""Ways to place the models of models.py, by parameter name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import shardfn as sf
from shardfn import P

COLUMN = {"q", "k", "v", "up", "gate", "head", "fc"}
ROW = {"o", "down", "tok"}
CHANNEL = {"c1", "c2"}


def by_name(params: Any, place: Callable[[str, Any], Any], name: str = "") -> Any:
    """A tree of placements from each parameter's name and value."""
    if isinstance(params, dict):
        return {key: by_name(value, place, key) for key, value in params.items()}
    if isinstance(params, list):
        return [by_name(value, place, name) for value in params]
    return place(name, params)


def replicated(params: Any) -> Any:
    return sf.tree_map(lambda p: P(), params)


def fully_sharded(params: Any, axes: Any = "dp") -> Any:
    return sf.tree_map(lambda p: P(axes), params)


def tensor_parallel(params: Any) -> Any:
    def place(name: str, p: Any) -> P:
        if name in COLUMN:
            return P(None, "tp")
        return P("tp") if name in ROW or name in CHANNEL else P()

    return by_name(params, place)


def mixed(params: Any) -> Any:
    """Tensor parallel, and what is left of each weight fully sharded."""

    def place(name: str, p: Any) -> P:
        if name in COLUMN:
            return P("dp", "tp")
        return P("tp", "dp") if name in ROW or name in CHANNEL else P("dp")

    return by_name(params, place)
