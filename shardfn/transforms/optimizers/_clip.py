"""clip_by_global_norm: gradients scaled down to a norm.

Dynamo reads this.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import _tree


def clip_by_global_norm(grads: Any, max_norm: Any) -> tuple[Any, torch.Tensor]:
    """Scale gradients so that the norm of all of them together is at most `max_norm`.

    The values are those of torch.nn.utils.clip_grad_norm_ with the 2-norm: every gradient times
    min(1, max_norm / (norm + 1e-6)). Where the norm is not finite, so are the results.

    Args:
        grads: a pytree of floating or complex tensors.
        max_norm: a number or a 0-d tensor.

    Returns:
        (the scaled gradients, the norm before, 0-d).

    Source: torch.nn.utils.clip_grad_norm_; optax.clip_by_global_norm, which adds no 1e-6.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.clip_by_global_norm({"w": torch.tensor([3.0, 4.0])}, 2.5)
        ({'w': tensor([1.5000, 2.0000])}, tensor(5.))
    """
    leaves = _tree.tensors(grads)
    if not leaves:
        return grads, torch.zeros(())
    norms = [torch.linalg.vector_norm(x) for x in leaves]
    stacked = torch.stack(norms)
    norm = torch.linalg.vector_norm(stacked)
    ratio = max_norm / (norm + 1e-6)
    scale = ratio.clamp(max=1.0)
    scaled = [x * scale.to(x.dtype) for x in leaves]
    return _tree.with_tensors(grads, scaled), norm
