"""Ops that a compiled program runs by torch's own kernels, since Inductor's code for them is wrong
(torch 2.11 to 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
BYTES = {torch.uint8, torch.int8, torch.bool}


def mark(graph: torch.fx.Graph) -> None:
    """Mark the nodes of an fx graph that Inductor must run by torch's kernels.

    Args:
        graph: as Inductor lowers it. Its nodes have their fake values.
    """
    for node in graph.nodes:
        is_wrong = WRONG.get(node.target)
        if is_wrong is not None and is_wrong(node):
            node.meta["should_fallback"] = True  # Inductor's own word
            if (
                is_wrong is _is_rounded
                and node.target is not aten.upsample_nearest2d_backward.default
            ):
                _read_contiguous(graph, node)


def _read_contiguous(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Copy the input of an interpolation whose elements are in another order than its dims: the
    strides that Inductor predicts for the result are not those of torch's kernel (torch 2.13).
    """
    from torch._inductor.inductor_prims import force_stride_order

    x: Any = node.args[0]
    value = x.meta["val"]
    channels_last = {4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(value.dim(), [])
    formats = [torch.contiguous_format, *channels_last]
    if any(value.is_contiguous(memory_format=layout) for layout in formats):
        return
    contiguous = value.contiguous()
    with graph.inserting_before(node):
        copy = graph.call_function(force_stride_order, (x, contiguous.stride()))
    copy.meta["val"] = contiguous
    node.replace_input_with(x, copy)


def _of_bytes(node: Any) -> bool:
    """Check whether a max, min or argmax node is of 8-bit integers: Inductor's vectors of 16 or
    more elements give wrong values and indices.
    """
    return node.args[0].meta["val"].dtype in BYTES


def _by_zero(node: Any) -> bool:
    """Check whether a division of integers may be by zero: torch raises an error, and compiled code
    would end the process.
    """
    divisor = node.args[1]
    is_integer = not (node.meta["val"].is_floating_point() or node.meta["val"].is_complex())
    return is_integer and (isinstance(divisor, torch.fx.Node) or divisor == 0)


def _to_negative_power(node: Any) -> bool:
    """Check for a negative power of integers: torch raises an error, and compiled code gives 0."""
    is_integer = not (node.meta["val"].is_floating_point() or node.meta["val"].is_complex())
    return is_integer and node.args[1] < 0


def _is_padded_pool(node: Any) -> bool:
    """Check for a pool with padding: Inductor takes a place in the padding where all of a large
    window is the smallest value of its dtype. Small windows have a decomposition.
    """
    padding = node.args[3] if len(node.args) > 3 else node.kwargs.get("padding", 0)
    return any(padding) if isinstance(padding, (list, tuple)) else padding != 0


def _is_of_clipped_windows(node: Any) -> bool:
    """Check for the gradient of an average pool whose last windows may be clipped: Inductor divides
    by the size of a whole window.
    """
    ceil_mode, divisor = node.args[5], node.args[7] if len(node.args) > 7 else None
    return ceil_mode and divisor is None


def _is_rounded(node: Any) -> bool:
    """Check for an interpolation to the nearest element whose places are rounded: by a factor that
    is no power of two. Inductor rounds in another dtype, and its gradient not at all.
    """
    is_gradient = node.target is aten.upsample_nearest2d_backward.default
    after = node.args[1]
    before = node.args[2][2:] if is_gradient else node.args[0].meta["val"].shape[2:]
    factors = node.args[3:] if is_gradient else node.args[2:]
    scales = [*factors, *[None] * (len(after) - len(factors))]
    rows = zip(before, after, scales, strict=True)
    return not all(_is_power_of_two(a, b) and scale in (None, b / a) for a, b, scale in rows)


def _is_power_of_two(before: int, after: int) -> bool:
    """Check whether the ratio of two sizes is a power of two."""
    less, more = sorted((before, after))
    return less > 0 and more % less == 0 and (more // less).bit_count() == 1


def _is_of_nothing(node: Any) -> bool:
    """Check for a mean of no element: Inductor gives 0."""
    return not node.args[0].meta["val"].numel()


def _has_bound_outside(node: Any) -> bool:
    """Check for a clamp of integers whose bound their dtype cannot hold: Inductor wraps the bound,
    as torch 2.13 does. Torch 2.15 does not.
    """
    dtype = node.args[0].meta["val"].dtype
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return False
    ends = torch.iinfo(dtype)
    bounds = [x for x in (*node.args[1:], *node.kwargs.values()) if isinstance(x, int)]
    return any(not ends.min <= x <= ends.max for x in bounds)


def _always(node: torch.fx.Node) -> bool:
    """Check nothing: the op of any such node runs by torch's kernel."""
    return True


WRONG: dict[Any, Callable[[torch.fx.Node], bool]] = {
    aten.amax.default: _of_bytes,
    aten.amin.default: _of_bytes,
    aten.argmax.default: _of_bytes,
    aten.argmin.default: _of_bytes,
    aten.max.dim: _of_bytes,
    aten.min.dim: _of_bytes,
    aten.div.Scalar_mode: _by_zero,
    aten.div.Tensor_mode: _by_zero,
    aten.fmod.Scalar: _by_zero,
    aten.fmod.Tensor: _by_zero,
    aten.remainder.Scalar: _by_zero,
    aten.remainder.Scalar_Tensor: _by_zero,
    aten.remainder.Tensor: _by_zero,
    aten.avg_pool2d_backward.default: _is_of_clipped_windows,
    aten.avg_pool3d_backward.default: _is_of_clipped_windows,
    aten.upsample_nearest1d.default: _is_rounded,
    aten.upsample_nearest2d.default: _is_rounded,
    aten.upsample_nearest3d.default: _is_rounded,
    aten.upsample_nearest2d_backward.default: _is_rounded,
    aten.var_mean.correction: _is_of_nothing,
    aten.max_pool2d_with_indices.default: _is_padded_pool,
    aten.max_pool3d_with_indices.default: _is_padded_pool,
    aten.pow.Tensor_Scalar: _to_negative_power,
    aten.erfinv.default: _always,  # half of the digits, near one
    aten.clamp.default: _has_bound_outside,
    aten.clamp_max.default: _has_bound_outside,
    aten.clamp_min.default: _has_bound_outside,
    aten.ldexp.Tensor: _always,  # another dtype
    aten.frexp.Tensor: _always,  # vectors of float64 do not compile
}
