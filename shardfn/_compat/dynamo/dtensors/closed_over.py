"""DTensors that a captured function closes over, as Dynamo meets them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ...tracing import neutral
from .calls import DTensors, node_of, read_ours


def closed_over(dtensors: DTensors, wrap: Callable[..., Any], builder: Any, x: Any) -> Any:
    """Patch Dynamo's wrapping of a new tensor, which may be a DTensor that the function closes
    over.
    """
    if not isinstance(x, DTensor):
        return wrap(builder, x)
    tag, text = dtensors.closed_over(x)
    like = dtensors.stand_in(x)
    output = builder.tx.output
    # Dynamo holds it weakly until the graph is done (torch 2.11)
    output.__dict__.setdefault("stand_ins", []).append(like)
    tensor = wrap(builder, like)
    with _beside_the_inputs(output):
        placed = read_ours(builder.tx, tag, [tensor, text], {})
    # Dynamo writes to it where it meets x again as a parameter of a module (torch 2.13)
    node_of(placed).meta.setdefault("tensor_dict", {})
    return placed


@contextlib.contextmanager
def _beside_the_inputs(output: Any) -> Iterator[None]:
    """Insert new nodes right after the graph inputs. Dynamo reads a DTensor once for all its
    readers: bodies of control flow, transforms, and code under torch.no_grad.
    """
    tracers = output.tracers
    root = output.root_tracer
    inputs = root.graph.find_nodes(op="placeholder")
    first = inputs[-1].next
    output.tracers = [root]
    try:
        with root.graph.inserting_before(first), neutral(), torch.enable_grad():
            yield
    finally:
        output.tracers = tracers
