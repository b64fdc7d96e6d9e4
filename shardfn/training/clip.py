"""`clip_by_global_norm`: scale gradients down to a norm.

Dynamo reads this.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import _compat, _tree
from ..accepted import accept
from ..errors import TreeError
from .optim.checks import check_one_mesh


def clip_by_global_norm(grads: Any, max_norm: Any) -> tuple[Any, torch.Tensor]:
    """Scale gradients so that their global norm is at most `max_norm`.

    `clip_by_global_norm` computes the same values as torch.nn.utils.clip_grad_norm_ with the
    2-norm: every gradient is multiplied by min(1, max_norm / (norm + 1e-6)). If the norm is not
    finite, the scaled gradients are not finite either.

    Args:
        grads: a pytree of floating-point or complex tensors.
        max_norm: the largest allowed norm, a number or a 0-d tensor.

    Returns:
        A tuple of the scaled gradients and the norm before scaling, a 0-d tensor.

    Raises:
        TreeError: a gradient is an integer tensor.
        PlacementError: the gradients are on different meshes.

    Source: torch.nn.utils.clip_grad_norm_; optax.clip_by_global_norm, which adds no 1e-6.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.clip_by_global_norm({"w": torch.tensor([3.0, 4.0])}, 2.5)
        ({'w': tensor([1.5000, 2.0000])}, tensor(5.))
    """
    if not _compat.is_tracing():
        accept("clip_by_global_norm", max_norm=max_norm)
        _refuse_integers(grads)
        check_one_mesh(_tree.paths(grads), _tree.leaves(grads))
    leaves = _tree.tensors(grads)
    if not leaves:
        return grads, torch.zeros(())
    norm = torch.linalg.vector_norm(_norms(leaves))
    ratio = max_norm / (norm + 1e-6)
    scale = ratio.clamp(max=1.0)
    scaled = [x * scale.to(x.dtype) for x in leaves]
    return _tree.with_tensors(grads, scaled), norm


def _norms(leaves: list[torch.Tensor]) -> torch.Tensor:
    """The norm of each gradient, (n,).

    Where all gradients are sharded, one all-reduce has the sums of their squares.
    """
    sizes = [x.abs() if x.is_complex() else x for x in leaves]
    squares = [_square_sum(x) for x in sizes]
    totals = torch.stack(squares)  # (n,)
    is_zero = totals == 0
    roots = torch.where(is_zero, 1.0, totals).sqrt()  # whose derivative is finite
    norms = torch.where(is_zero, 0.0, roots)
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in sizes])
    return norms.to(dtype)


def _square_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum of the squares, half precision in single precision, as torch's norms are."""
    is_half = x.dtype in (torch.float16, torch.bfloat16)
    wide = x.float() if is_half else x
    return (wide * wide).sum()


def _refuse_integers(grads: Any) -> None:
    """Refuse tensors of integers, which are not gradients.

    Raises:
        TreeError: names each.
    """
    rows = zip(_tree.paths(grads), _tree.leaves(grads), strict=True)
    wrong = [
        f"{path or 'the tensor'} is {x.dtype}"
        for path, x in rows
        if isinstance(x, torch.Tensor) and not (x.is_floating_point() or x.is_complex())
    ]
    if wrong:
        needed = "floating or complex tensors"
        raise TreeError.of("clip_by_global_norm, grads", *wrong, needed=needed)
