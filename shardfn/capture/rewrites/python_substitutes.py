"""Substitutes for functions of torch that Dynamo cannot trace, or traces wrongly.

torch raises an error for a negative variance, for weights that are negative or sum to zero, and
for gaps between windows. Here too this is an error if it is known during the capture. A graph
cannot raise for a value, so then the result and its gradient are NaN.

Dynamo reads this.
"""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F

from ... import _compat
from ...errors import CaptureError
from ...random.torch_ops import truncated_normal_
from ..dtensors import replaced_calls

GAP = 1e-11  # the smallest sum of windows that torch.istft accepts


class Misuse(CaptureError):
    """The error for a call that torch refuses too."""


@_compat.constant_in_graph
def misused(function: str, got: str) -> None:
    """Raise Misuse, the error for arguments that torch refuses.

    Raises:
        Misuse: always.
    """
    raise Misuse.of(function, got)


def cov(
    input: torch.Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None
) -> torch.Tensor:
    """torch.cov, which checks the values of weights."""
    if input.dim() > 2:
        misused("torch.cov", f"input must have at most 2 dims; got {input.dim()}")
    x = input.reshape(1, -1) if input.dim() < 2 else input  # (variables, samples)
    _refuse_weighting(fweights, aweights, x.shape[1])
    weights = (
        fweights if aweights is None else aweights if fweights is None else fweights * aweights
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
    if weights is not None:  # where torch stops
        wrong = (total == 0) | _has_negative(fweights) | _has_negative(aweights)
        norm = torch.where(wrong, math.nan, norm.to(x.real.dtype))
    product = x @ (x if weights is None else x * weights).t().conj()
    return (product / norm).squeeze()


def _has_negative(weights: Any) -> Any:
    return False if weights is None else (weights < 0).any()


def _refuse_weighting(fweights: Any, aweights: Any, samples: int) -> None:
    if fweights is not None:
        _refuse_weights("fweights", fweights, samples)
        if fweights.is_floating_point() or fweights.is_complex():
            misused("torch.cov", f"fweights are {fweights.dtype}; they count")
    if aweights is not None:
        _refuse_weights("aweights", aweights, samples)
        if not aweights.is_floating_point():
            misused("torch.cov", f"aweights must be real; got {aweights.dtype}")


def _refuse_weights(name: str, weights: torch.Tensor, samples: int) -> None:
    if weights.dim() > 1 or weights.numel() != samples:
        shape = tuple(weights.shape)
        misused("torch.cov", f"{name} have shape {shape}, of {samples} samples")


def corrcoef(input: torch.Tensor) -> torch.Tensor:
    """torch.corrcoef, by `cov`."""
    if input.dim() > 2:
        misused("torch.corrcoef", f"input must have at most 2 dims; got {input.dim()}")
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


def combinations(input: torch.Tensor, r: int = 2, with_replacement: bool = False) -> torch.Tensor:
    """torch.combinations, which uses a boolean mask although the result size depends on the
    input size alone.
    """
    if input.dim() != 1 or r < 0:
        misused(
            "torch.combinations",
            f"input must have 1 dim and r must be 0 or more; got {input.dim()} dims and r={r}",
        )
    if r == 0:
        return input.new_empty(0)
    follows = (lambda a, b: a <= b) if with_replacement else (lambda a, b: a < b)
    tuples = itertools.product(
        range(input.shape[0]), repeat=r
    )  # Dynamo does not know itertools' combinations
    rows = [list(row) for row in tuples if all(follows(row[k], row[k + 1]) for k in range(r - 1))]
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
    """F.gaussian_nll_loss, which checks for a negative variance."""
    where = "F.gaussian_nll_loss"
    if isinstance(var, float):
        if var < 0:
            misused(where, "var is negative")
        var = var * torch.ones_like(input)
    if var.shape != input.shape:
        if input.shape[:-1] == var.shape:
            var = var.unsqueeze(-1)
        elif not _is_one_short(tuple(input.shape), tuple(var.shape)):
            shapes = f"{tuple(var.shape)}, of an input of shape {tuple(input.shape)}"
            misused(where, f"var is of incorrect size: {shapes}")
    _refuse_reduction(where, reduction)
    var = torch.where(var < 0, math.nan, var)  # where torch stops
    var = var + (var.clamp(min=eps) - var).detach()  # the gradient passes through the clamp at eps
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def l1_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    weight: Any = None,
) -> torch.Tensor:
    """F.l1_loss, which drops its weight under a mode of torch functions."""
    if size_average is not None or reduce is not None:
        is_mean = size_average is None or size_average
        reduction = "none" if reduce is False else "mean" if is_mean else "sum"
    _refuse_reduction("F.l1_loss", reduction)
    if target.shape != input.shape:
        shapes = f"{tuple(target.shape)}, but the input has shape {tuple(input.shape)}"
        warnings.warn(f"F.l1_loss: the target has shape {shapes}: they are broadcast", stacklevel=2)
    loss = torch.abs(input - target)
    if weight is not None:
        if weight.shape != input.shape:
            shapes = f"{tuple(weight.shape)}, of an input of shape {tuple(input.shape)}"
            misused("F.l1_loss", f"weight has shape {shapes}")
        loss = loss * weight
    if reduction == "none":
        return loss
    if reduction == "sum" or weight is None:
        return loss.mean() if reduction == "mean" else loss.sum()
    return loss.sum() / weight.sum()


def _is_one_short(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether a shape is another one with one dim of size 1."""
    if len(shape) != len(other):
        return False
    return sum(o for n, o in zip(shape, other, strict=True) if n != o) == 1


def _refuse_reduction(function: str, reduction: str) -> None:
    if reduction not in ("none", "mean", "sum"):
        misused(function, f"reduction {reduction!r} is not valid")


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
    """F.linear_cross_entropy, unchunked: the chunked form only saves memory, and has no
    gradient under torch.func (2.13).
    """
    if input.dim() not in (1, 2) or linear_weight.dim() < 2:
        got = f"input has {input.dim()} dims, linear_weight {linear_weight.dim()}"
        misused("F.linear_cross_entropy", got + "; 1 or 2, and at least 2")
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
    """torch.istft, which checks for gaps between the windows."""
    x = input if input.dim() == 3 else input.unsqueeze(0)  # (batch, freqs, frames)
    width = n_fft if win_length is None else win_length
    step = width // 4 if hop_length is None else hop_length
    _refuse_frames(x, n_fft, width, step, onesided)
    if window is not None and tuple(window.shape) != (width,):
        shape = tuple(window.shape)
        misused("torch.istft", f"window has shape {shape}; win_length is {width}")
    if window is None:
        window = torch.ones(width, dtype=x.real.dtype, device=x.device)
    window = _padded(window, width, n_fft)  # (n_fft,)
    norm = "ortho" if normalized else "backward"
    spectra = x.transpose(1, 2)  # (batch, frames, freqs)
    frames = _frames(spectra, n_fft, norm, return_complex) * window
    signal, weight = _overlap_added(frames, window, step)
    start = n_fft // 2 if center else 0
    end = weight.shape[0] - start if length is None else start + length
    out = _trimmed(signal, weight, start, end)  # (batch, length)
    return out if input.dim() == 3 else out.squeeze(0)


def _trimmed(signal: torch.Tensor, weight: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """The signal from start to end over the weight of its windows, NaN in a gap between them."""
    total = weight.shape[0]
    inside = slice(start, min(end, total))
    weight = weight[inside]
    weight = torch.where(weight.abs() < GAP, math.nan, weight)  # where torch stops
    return F.pad(signal[:, inside] / weight, (0, max(end - total, 0)))


def _padded(window: torch.Tensor, width: int, n_fft: int) -> torch.Tensor:
    """A window of this width in the middle of a frame, zeros on both sides."""
    margin = (n_fft - width) // 2
    return F.pad(window, (margin, n_fft - width - margin))


def _frames(spectra: torch.Tensor, n_fft: int, norm: str, is_complex: bool) -> torch.Tensor:
    """The signal of each frame, (batch, frames, n_fft), from its spectrum."""
    if is_complex:
        return torch.fft.ifft(spectra, dim=2, norm=norm)
    half = spectra[..., : n_fft // 2 + 1]
    return torch.fft.irfft(half, n=n_fft, dim=2, norm=norm)


def _overlap_added(
    frames: torch.Tensor, window: torch.Tensor, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The overlap-add of windowed frames, each `step` after the one before: the signal (batch,
    total) and the sum of squared windows (total,).
    """
    batch, count, n_fft = frames.shape
    total = n_fft + step * (count - 1)
    starts = torch.arange(count, device=frames.device)[:, None] * step
    positions = (starts + torch.arange(n_fft, device=frames.device)).flatten()
    signal = frames.new_zeros(batch, total)
    signal = signal.index_add(1, positions, frames.flatten(1))
    weight = window.new_zeros(total)
    weight = weight.index_add(0, positions, (window * window).repeat(count))
    return signal, weight


def _refuse_frames(
    x: torch.Tensor, n_fft: int, width: int, step: int, onesided: bool | None
) -> None:
    """Refuse sizes that torch.istft refuses."""
    if not x.is_complex() or x.dim() != 3:
        got = f"input must be complex with 2 or 3 dims; got {x.dtype} with {x.dim()}"
        misused("torch.istft", got)
    if not 0 < step <= width <= n_fft:
        got = f"hop_length is {step}, win_length {width}, n_fft {n_fft}"
        misused("torch.istft", got + "; 0 < hop_length <= win_length <= n_fft")
    half = n_fft // 2 + 1
    counts = {None: (n_fft, half), True: (half,), False: (n_fft,)}[onesided]
    if x.shape[1] not in counts:
        got = f"{x.shape[1]} frequencies for n_fft {n_fft} and onesided {onesided}"
        misused("torch.istft", got)


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """F.ctc_loss, which makes a tensor of lengths that a tracer cannot see."""
    _refuse_reduction("F.ctc_loss", reduction)
    by_tensors = isinstance(input_lengths, torch.Tensor) and isinstance(
        target_lengths, torch.Tensor
    )
    if by_tensors:
        losses = _ctc_of_tensors(
            log_probs, targets, input_lengths, target_lengths, blank, zero_infinity
        )
    else:
        losses = torch.ctc_loss(
            log_probs, targets, input_lengths, target_lengths, blank, 0, zero_infinity
        )
    if reduction != "mean":
        return losses.sum() if reduction == "sum" else losses
    lengths = (
        target_lengths.to(losses.device).reshape(losses.shape)
        if isinstance(target_lengths, torch.Tensor)
        else torch.tensor(target_lengths, device=losses.device)
    )
    return (losses / lengths.clamp(min=1)).mean()


def _ctc_of_tensors(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    lengths: torch.Tensor,
    labels: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    """The losses, where tensors give the lengths. All samples become equally long, with the same
    probability: a class more pads the targets, and frames that follow those of a sample have the
    class for each of its paddings, and a blank after each. Lengths that do not fit give NaN.
    """
    x = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)  # (frames, batch, classes)
    frames, batch, classes = x.shape
    _refuse_lengths(x, targets, lengths, labels)
    lengths = lengths.to(x.device, torch.int64).reshape(batch)
    counts = labels.to(x.device, torch.int64).reshape(batch)
    widest = targets.shape[-1]
    most = min(widest, frames + 1)  # no longer target has a probability
    places = torch.arange(most, device=x.device).expand(batch, most)
    if targets.dim() == 1:  # one after another
        starts = counts.cumsum(0) - counts
        places = (starts.unsqueeze(1) + places).clamp(max=max(widest - 1, 0))
        rows = targets.to(x.device)[places]
        fits = counts.sum() == widest
    else:
        rows = targets.to(x.device)[:, :most]
        fits = counts <= widest
    fits = fits & (counts >= 0) & (lengths >= 0) & (lengths <= frames)
    is_label = torch.arange(most, device=x.device) < counts.unsqueeze(1)
    rows = torch.where(is_label, rows, classes)  # (batch, most)
    x = F.pad(
        x, (0, 1, 0, 0, 0, 2 * most), value=-math.inf
    )  # (frames + 2 most, batch, classes + 1)
    after = torch.arange(frames + 2 * most, device=x.device).unsqueeze(1) - lengths
    is_padding = (after % 2 == 0) & (after < 2 * (most - counts.clamp(max=most)))
    shown = torch.where(is_padding, classes, blank).unsqueeze(-1)
    is_shown = torch.arange(classes + 1, device=x.device) == shown
    given = torch.where(is_shown, 0.0, -math.inf).to(x.dtype)
    x = torch.where((after < 0).unsqueeze(-1), x, given)
    sizes = (frames + 2 * most,) * batch, (most,) * batch
    losses = torch.ctc_loss(x, rows, *sizes, blank, 0, zero_infinity)
    losses = losses * torch.where(fits, 1.0, math.nan).to(x.dtype)
    return losses if log_probs.dim() == 3 else losses.squeeze(0)


def _refuse_lengths(x: torch.Tensor, targets: torch.Tensor, lengths: Any, labels: Any) -> None:
    """Refuse shapes and dtypes of lengths that torch.ctc_loss refuses."""
    for name, n in (("input_lengths", lengths), ("target_lengths", labels)):
        if n.is_floating_point() or n.is_complex() or n.numel() != x.shape[1]:
            got = f"{name} are {n.dtype} of shape {tuple(n.shape)}"
            misused("F.ctc_loss", f"{got}; they are integers, one for each of {x.shape[1]} samples")
    if targets.dim() not in (1, 2) or (targets.dim() == 2 and targets.shape[0] != x.shape[1]):
        shape = tuple(targets.shape)
        misused("F.ctc_loss", f"targets have shape {shape}, for {x.shape[1]} samples")


def dropped_by_torch(func: Any, caller: Any) -> dict[str, Any]:
    """The arguments that a function of torch does not pass on to a mode of torch functions.

    Args:
        func: the function.
        caller: the frame that calls the mode, inside the frame of the function.
    """
    if func is not F.l1_loss or caller.f_back.f_code is not F.l1_loss.__code__:
        return {}
    return {"weight": caller.f_back.f_locals["weight"]}


def get_default_device() -> torch.device:
    """torch.get_default_device, a constant of the program: another device is captured anew."""
    return _default_device()


@_compat.constant_in_graph
def _default_device() -> torch.device:
    return torch.get_default_device()


def formatted(value: Any, format_spec: str = "", /) -> str:
    """Python's format, of which Dynamo drops the specification (torch 2.13)."""
    return f"{value:{format_spec}}"


TABLE = {
    format: formatted,
    torch.get_default_device: get_default_device,
    F.ctc_loss: ctc_loss,
    F.l1_loss: l1_loss,
    torch.istft: istft,
    torch.cov: cov,
    torch.corrcoef: corrcoef,
    torch.combinations: combinations,
    F.gaussian_nll_loss: gaussian_nll_loss,
    torch.nn.init.trunc_normal_: truncated_normal_,
    _compat.CAUSAL_MASK: _compat.causal_mask,
    **(
        {F.linear_cross_entropy: linear_cross_entropy} if hasattr(F, "linear_cross_entropy") else {}
    ),
}
replaced_calls.FUNCTIONS[_compat.BATCH_NORM] = _compat.batch_norm
replaced_calls.FUNCTIONS[_compat.SYNC_BATCH_NORM] = _compat.sync_batch_norm
replaced_calls.FUNCTIONS[_compat.ENCODER] = _compat.encoder
