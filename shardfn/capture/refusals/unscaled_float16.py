"""Gradients in float16 of a loss that is not scaled: small ones would become 0."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import CaptureError
from ...ops.loops import inner_nodes
from ...ops.placement import COTANGENT
from ..annotations import IN_FLOAT16, SCALES


def refuse_unscaled(graph: torch.fx.GraphModule, name: str) -> None:
    """Refuse gradients through casts of `mixed_precision` to float16 where no loss is scaled.
    Where cotangents are given from outside, the caller may scale the loss.

    Raises:
        CaptureError: there are such gradients.
    """
    nodes = [*inner_nodes(graph.graph, once=True)]
    notes = [*map(_notes, nodes)]
    is_scaled = any(SCALES in noted for noted in notes)
    if is_scaled or any(node.target is COTANGENT for node in nodes):
        return
    if any(IN_FLOAT16 in noted and _is_backward(noted) for noted in notes):
        raise CaptureError.of(
            name,
            "float16 gradients of an unscaled loss: small gradients become 0",
            needed="a loss that scaler.scale (of sf.loss_scale) has scaled",
            fix="scaler = sf.loss_scale(), and return scaler.scale(loss, state); or use "
            "mixed_precision(compute=torch.bfloat16)",
        )


def _notes(node: torch.fx.Node) -> dict[str, Any]:
    return node.meta.get("custom") or {}


def _is_backward(noted: dict[str, Any]) -> bool:
    return noted.get("phase") == "backward"
