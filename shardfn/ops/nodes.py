"""Reading and cleaning fx nodes: typed arguments, and removal of unread nodes."""

from __future__ import annotations

from typing import Any

import torch

from ..source_text import Origin
from .debug import has_effect


def args_of(node: torch.fx.Node) -> tuple[Any, ...]:
    """Return the arguments of a node as `Any`: torch's annotation only says that a node may have
    any argument that fx can hold.
    """
    return node.args


def origin_of(node: torch.fx.Node) -> Origin:
    """Return the line and the module that the op of a node comes from."""
    return {"source": node.meta.get("source"), "module": node.meta.get("module")}


def returned_by(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The nodes whose values a graph returns."""
    results: Any = graph.output_node().args[0]
    return results


def remove_unread(graph: torch.fx.Graph) -> None:
    """Remove the nodes that nothing reads and that have no effect. The users are looked at first,
    as torch's `is_impure` takes longer than all else here.
    """
    graph.eliminate_dead_code(lambda node: bool(node.users) or node.is_impure() or has_effect(node))
