"""`refuse_sparse_gradient`: embeddings whose gradient would be a sparse tensor."""

from __future__ import annotations

from typing import Any

import torch

from ... import _compat
from ...errors import CaptureError
from .. import annotations as sources
from ..dynamo_nodes import name_of

SPARSE = {"embedding": 4, "_embedding_bag": 5}  # the place of the argument `sparse` of torch's op


def refuse_sparse_gradient(
    node: torch.fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse an embedding with sparse=True if its weight is differentiated.

    Raises:
        CaptureError: names the op and the line.
    """
    name = name_of(node)
    place = SPARSE.get(name)
    if place is None or not (args[place] if len(args) > place else kwargs.get("sparse")):
        return
    weight = next(x for x in args if isinstance(x, torch.Tensor) and x.is_floating_point())
    if (weight.requires_grad and torch.is_grad_enabled()) or _compat.followed([weight]):
        raise CaptureError.of(
            f"op {name.strip('_')}",
            "with sparse=True, the gradient of the weight is a sparse tensor",
            needed="dense gradients",
            fix="sparse=False, which gives the same gradient as a dense tensor",
            source=sources.user_line(node),
        )
