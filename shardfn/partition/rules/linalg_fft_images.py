"""Ops that treat every member of a batch alike: matrix decompositions and solves, Fourier
transforms, sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ... import _compat
from ...types import AxisPlacement
from ..rule_api.op_record import Op
from ..rule_api.strategy import Choice, OpCall, Rule, replicated

aten = torch.ops.aten


def batched(ins: Sequence[int], outs: Sequence[int], linear: Sequence[int] = ()) -> Rule:
    """Make the rule of an op on a batch of matrices or vectors, which shards batch dims.

    Args:
        ins: the number of trailing dims of each input that belong to one member.
        outs: the same for each result.
        linear: inputs in which the op is linear, one at a time.
    """

    def rule(call: OpCall) -> list[Choice]:
        cores_in = ins[: len(call.ins)] if len(ins) > 1 else tuple(ins) * len(call.ins)
        rank = max((x.dim() - n for x, n in zip(call.ins, cores_in, strict=True)), default=0)
        choices = [replicated(call)]
        for d in range(rank):
            found = [
                _batch_dims(tensors, cores, rank, d)
                for tensors, cores in ((call.ins, cores_in), (call.outs, outs))
            ]
            if found[0] is not None and found[1] is not None:
                choices.append((found[0], found[1]))
        for i in linear:
            choices.append((_only(i, "sum", len(call.ins)), ("sum",) * len(call.outs)))
        return choices

    return rule


def _batch_dims(
    tensors: Sequence[torch.Tensor], cores: Sequence[int], rank: int, d: int
) -> tuple[AxisPlacement, ...] | None:
    """Shard one batch dim of each tensor that has it; others are replicated."""
    places = [d - rank + x.dim() - n for x, n in zip(tensors, cores, strict=False)]
    sizes = {x.shape[p] for x, p in zip(tensors, places, strict=False) if p >= 0}
    size = max(sizes, default=1)
    if sizes - {1, size}:
        return None
    return tuple(
        p if p >= 0 and x.shape[p] == size else "R" for x, p in zip(tensors, places, strict=False)
    )


def _only(i: int, placement: AxisPlacement, n: int) -> tuple[AxisPlacement, ...]:
    """Place one of n tensors, and replicate the others."""
    return tuple(placement if j == i else "R" for j in range(n))


def solve(call: OpCall) -> list[Choice]:
    """Shard the batch of a linear solve A X = B."""
    a, b = call.ins
    is_vector = b.dim() == 1
    is_batch_of_vectors = b.dim() == a.dim() - 1 and b.shape == a.shape[:-1]
    core = 1 if is_vector or is_batch_of_vectors else 2
    return batched((2, core), (core, 2, 1, 0))(call)


def transform(call: OpCall) -> list[Choice]:
    """Shard the dims that a Fourier transform leaves alone."""
    (x,) = call.ins
    over = {d % max(x.dim(), 1) for d in call.args[1]}
    return [
        replicated(call),
        *(((d,), (d,)) for d in range(x.dim()) if d not in over),
        (("sum",), ("sum",)),
    ]


def distances(call: OpCall) -> list[Choice]:
    """Shard cdist over the batch or over either set of points."""
    choices, (x, y), out = (batched((2, 2), (2,))(call), call.ins, call.outs[0].dim())
    return [*choices, ((x.dim() - 2, "R"), (out - 2,)), (("R", y.dim() - 2), (out - 1,))]


def distances_backward(call: OpCall) -> list[Choice]:
    """Shard the gradient of cdist's first points; sharding the second points gives a Partial
    sum.
    """
    if len({x.shape[:-2] for x in call.ins}) > 1:
        return [replicated(call)]
    choices = batched((2, 2, 2, 2), (2,))(call)
    n = call.ins[0].dim()
    return [
        *choices,
        ((n - 2, n - 2, "R", n - 2), (n - 2,)),
        ((n - 1, "R", n - 2, n - 1), ("sum",)),
        (("sum", "R", "R", "R"), ("sum",)),
    ]


def sampled(call: OpCall) -> list[Choice]:
    """Shard grid sampling over images or channels."""
    return [replicated(call), ((0, 0), (0,)), ((1, "R"), (1,)), (("sum", "R"), ("sum",))]


def sampled_backward(call: OpCall) -> list[Choice]:
    """Shard the gradients of grid sampling; the grid's is a Partial sum over channels."""
    n = len(call.outs)
    if n != 2:
        return [replicated(call), ((0, 0, 0), (0,) * n)]
    return [
        replicated(call),
        ((0, 0, 0), (0, 0)),
        ((1, 1, "R"), (1, "sum")),
        (("sum", "R", "R"), ("sum", "sum")),
    ]


def resized(call: OpCall) -> list[Choice]:
    """Shard an image resize over images or channels."""
    return [replicated(call), ((0,), (0,)), ((1,), (1,)), (("sum",), ("sum",))]


def reduced_segments(call: OpCall) -> list[Choice]:
    """Shard a segment reduction over columns."""
    ends = sum(
        x is not None
        for x in (
            call.kwargs.get("lengths"),
            call.kwargs.get("offsets"),
            call.kwargs.get("indices"),
        )
    )
    data = len(call.ins) - ends
    if any(x.dim() != 1 for x in call.ins[data:]):
        return [replicated(call)]
    return [
        replicated(call),
        *(((d,) * data + ("R",) * ends, (d,)) for d in range(1, call.ins[0].dim())),
    ]


MATRICES: dict[object, Rule] = {
    **dict.fromkeys(_compat.aten_ops("cholesky.default"), batched((2,), (2,))),
    aten.cholesky_inverse.default: batched((2,), (2,)),
    aten.cholesky_solve.default: batched((2, 2), (2,), linear=(0,)),
    aten.geqrf.default: batched((2,), (2, 1)),
    aten.linalg_cholesky_ex.default: batched((2,), (2, 0)),
    aten.linalg_eig.default: batched((2,), (1, 2)),
    aten.linalg_eigvals.default: batched((2,), (1,)),
    aten._linalg_eigh.default: batched((2,), (1, 2)),
    aten._linalg_det.default: batched((2,), (0, 2, 1)),
    aten._linalg_slogdet.default: batched((2,), (0, 0, 2, 1)),
    aten._linalg_svd.default: batched((2,), (2, 1, 2)),
    aten._linalg_solve_ex.default: solve,
    aten._linalg_check_errors.default: batched((0,), ()),
    aten.linalg_householder_product.default: batched((2, 1), (2,)),
    aten.linalg_inv_ex.default: batched((2,), (2, 0)),
    aten.linalg_ldl_factor_ex.default: batched((2,), (2, 1, 0)),
    aten.linalg_ldl_solve.default: batched((2, 1, 2), (2,), linear=(2,)),
    aten.linalg_lu.default: batched((2,), (2, 2, 2)),
    aten.linalg_lu_factor_ex.default: batched((2,), (2, 1, 0)),
    aten.linalg_lu_solve.default: batched((2, 1, 2), (2,), linear=(2,)),
    aten.linalg_matrix_exp.default: batched((2,), (2,)),
    aten.linalg_pinv.atol_rtol_tensor: batched((2, 0, 0), (2,)),
    aten.linalg_qr.default: batched((2,), (2, 2)),
    aten.linalg_solve_triangular.default: batched((2, 2), (2,), linear=(1,)),
    aten.lu_unpack.default: batched((2, 1), (2, 2, 2)),
    aten.ormqr.default: batched((2, 1, 2), (2,), linear=(2,)),
    aten.triangular_solve.default: batched((2, 2), (2, 2)),
}
IMAGES: dict[object, Rule] = {
    **dict.fromkeys((aten.grid_sampler_2d.default, aten.grid_sampler_3d.default), sampled),
    **dict.fromkeys(
        (aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default),
        sampled_backward,
    ),
    **{
        getattr(aten, name + back).default: resized
        for back in ("", "_backward")
        for name in (
            "_upsample_bilinear2d_aa",
            "_upsample_bicubic2d_aa",
            "upsample_bilinear2d",
            "upsample_bicubic2d",
            "upsample_trilinear3d",
            "upsample_linear1d",
        )
    },
    **dict.fromkeys(
        (
            getattr(aten, f"{name}{n}d{back}").default
            for back in ("", "_backward")
            for name in ("upsample_nearest", "_upsample_nearest_exact")
            for n in (1, 2, 3)
        ),
        resized,
    ),
}


def _image_sizes(args: list[Any], shapes: list[tuple[int, ...]]) -> list[Any]:
    """Give the backward of a resize the local image size."""
    args[2] = [*shapes[0][:2], *args[2][2:]]
    return args


def _local_sizes(op: object) -> Any:
    """Return how a resize op takes local sizes; None for other ops."""
    return _image_sizes if "upsample" in str(op) and "backward" in str(op) else None


OTHERS: dict[object, Rule] = {
    **dict.fromkeys(
        (aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default), transform
    ),
    aten._cdist_forward.default: distances,
    aten._cdist_backward.default: distances_backward,
    aten.segment_reduce.default: reduced_segments,
    aten._segment_reduce_backward.default: reduced_segments,
}
TABLE: dict[object, Op] = {
    **{op: Op(rule) for op, rule in {**MATRICES, **OTHERS}.items()},
    **{op: Op(rule, local_args=_local_sizes(op)) for op, rule in IMAGES.items()},
}
