"""`refuse_sparse_gradient`: embeddings whose gradient would be a sparse tensor."""

from __future__ import annotations

from typing import Any

import torch

from ... import _compat
from ...errors import CaptureError
from .. import annotations as sources
from ..dynamo_nodes import name_of

# the places of the argument `sparse` of torch's functions with a name
SPARSE = {"embedding": (4, 6), "embedding_bag": (7,), "_embedding_bag": (5,)}


def refuse_sparse_gradient(
    node: torch.fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse an embedding with sparse=True if its weight is differentiated.

    Raises:
        CaptureError: names the op and the line.
    """
    name = name_of(node)
    given = [*(args[i] for i in SPARSE.get(name, ()) if i < len(args)), kwargs.get("sparse")]
    if name not in SPARSE or True not in [x for x in given if isinstance(x, bool)]:
        return
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    weight = next(x for x in tensors if x.is_floating_point())
    if (weight.requires_grad and torch.is_grad_enabled()) or _compat.followed([weight]):
        raise CaptureError.of(
            f"op {name.strip('_')}",
            "with sparse=True, the gradient of the weight is a sparse tensor",
            needed="dense gradients",
            fix="sparse=False, which gives the same gradient as a dense tensor",
            source=sources.user_line(node),
        )
