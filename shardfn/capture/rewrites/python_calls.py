"""Functions of torch that Dynamo cannot read, or reads wrongly, written so that it can: it
takes these in their place.

What they leave out are checks of values (a negative variance, weights that add up to zero),
which a graph cannot stop at.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F


def cov(
    input: torch.Tensor,
    *,
    correction: int = 1,
    fweights: Any = None,
    aweights: Any = None,
) -> torch.Tensor:
    """torch.cov, which compares weights on the way."""
    x = input.reshape(1, -1) if input.dim() < 2 else input
    weights = (
        fweights
        if aweights is None
        else aweights
        if fweights is None
        else fweights * aweights
    )
    total = x.shape[1] if weights is None else weights.sum()
    mean = (x if weights is None else x * weights).sum(1) / total
    norm = (
        total - correction
        if aweights is None or not correction
        else total - correction * (weights * aweights).sum() / total
    )
    norm = norm.clamp(min=0) if isinstance(norm, torch.Tensor) else max(norm, 0)
    x = x - mean.unsqueeze(1)
    product = x @ (x if weights is None else x * weights).t().conj()
    return (product / norm).squeeze()


def corrcoef(input: torch.Tensor) -> torch.Tensor:
    """torch.corrcoef, by `cov`."""
    c = cov(input)
    if c.dim() == 0:
        return c / c
    variance = c.diag()
    deviation = torch.sqrt(variance.real if c.is_complex() else variance)
    c = c / deviation.unsqueeze(1) / deviation.unsqueeze(0)
    return (
        torch.complex(c.real.clamp(-1, 1), c.imag.clamp(-1, 1))
        if c.is_complex()
        else c.clamp(-1, 1)
    )


def combinations(
    input: torch.Tensor, r: int = 2, with_replacement: bool = False
) -> torch.Tensor:
    """torch.combinations, which selects by a mask that depends on the size alone."""
    if r == 0:
        return input.new_empty(0)
    follows = (lambda a, b: a <= b) if with_replacement else (lambda a, b: a < b)
    tuples = itertools.product(
        range(input.shape[0]), repeat=r
    )  # Dynamo does not know itertools' combinations
    rows = [
        list(row)
        for row in tuples
        if all(follows(row[k], row[k + 1]) for k in range(r - 1))
    ]
    if not rows:
        return input.new_empty(0, r)
    return input[torch.tensor(rows, device=input.device)]


def gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: Any,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """F.gaussian_nll_loss, which looks for a negative variance."""
    if isinstance(var, float):
        var = var * torch.ones_like(input)
    if var.shape != input.shape and input.shape[:-1] == var.shape:
        var = var.unsqueeze(-1)
    var = (
        var + (var.clamp(min=eps) - var).detach()
    )  # the gradient passes where it is held at eps
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return (
        loss.mean()
        if reduction == "mean"
        else loss.sum()
        if reduction == "sum"
        else loss
    )


def linear_cross_entropy(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    linear_bias: Any = None,
    weight: Any = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
) -> torch.Tensor:
    """F.linear_cross_entropy, whose chunked form has no gradient under torch.func (2.13), and
    is there to save memory only.
    """
    classes, *outer, features = linear_weight.shape
    bias = None if linear_bias is None else linear_bias.reshape(-1)
    logits = F.linear(input, linear_weight.reshape(-1, features), bias).reshape(
        *input.shape[:-1], classes, *outer
    )
    ignored = -100 if ignore_index is None else ignore_index
    return F.cross_entropy(
        logits,
        target,
        weight,
        reduction=reduction,
        ignore_index=ignored,
        label_smoothing=label_smoothing,
    )


def istft(
    input: torch.Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: torch.Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> torch.Tensor:
    """torch.istft, which looks for gaps between the windows."""
    x = (
        input if input.dim() == 3 else input.unsqueeze(0)
    )  # (batch, frequencies, frames)
    width = n_fft if win_length is None else win_length
    step = width // 4 if hop_length is None else hop_length
    w = (
        torch.ones(width, dtype=x.real.dtype, device=x.device)
        if window is None
        else window
    )
    w = F.pad(w, ((n_fft - width) // 2, n_fft - width - (n_fft - width) // 2))
    norm, x = "ortho" if normalized else "backward", x.transpose(1, 2)
    half = n_fft // 2 + 1
    y = (
        torch.fft.ifft(x, dim=2, norm=norm)
        if return_complex
        else torch.fft.irfft(x[..., :half], n=n_fft, dim=2, norm=norm)
    )
    y, frames = y * w, x.shape[1]
    total = n_fft + step * (frames - 1)
    at = (
        torch.arange(frames, device=x.device)[:, None] * step
        + torch.arange(n_fft, device=x.device)
    ).flatten()
    signal = y.new_zeros(y.shape[0], total).index_add(1, at, y.flatten(1))
    weight = w.new_zeros(total).index_add(0, at, (w * w).repeat(frames))
    start = n_fft // 2 if center else 0
    end = start + length if length is not None else total - start
    out = signal[:, start : min(end, total)] / weight[start : min(end, total)]
    out = F.pad(out, (0, max(end - total, 0)))
    return out if input.dim() == 3 else out.squeeze(0)


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """F.ctc_loss, which makes a tensor of lengths behind the back of whoever traces."""
    losses = torch.ctc_loss(
        log_probs, targets, input_lengths, target_lengths, blank, 0, zero_infinity
    )
    if reduction != "mean":
        return losses.sum() if reduction == "sum" else losses
    lengths = (
        target_lengths
        if isinstance(target_lengths, torch.Tensor)
        else torch.tensor(target_lengths, device=losses.device)
    )
    return (losses / lengths.clamp(min=1)).mean()


TABLE = {
    F.ctc_loss: ctc_loss,
    torch.istft: istft,
    torch.cov: cov,
    torch.corrcoef: corrcoef,
    torch.combinations: combinations,
    F.gaussian_nll_loss: gaussian_nll_loss,
    **(
        {F.linear_cross_entropy: linear_cross_entropy}
        if hasattr(F, "linear_cross_entropy")
        else {}
    ),
}
