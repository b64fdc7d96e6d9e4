"""Sample calls of ops on batches of matrices, on images, on windows and segments; the kinds of
rules/batch.py and their like.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sample_values import Sample, call, f, i

from shardfn import _compat

aten = torch.ops.aten


def spd(*batch: int, n: int = 3) -> torch.Tensor:
    """Symmetric positive definite matrices."""
    x = f(*batch, n, n)
    return x @ x.mT + n * torch.eye(n, dtype=torch.float64)


def regular(*batch: int, n: int = 3) -> torch.Tensor:
    """Matrices far from singular."""
    return f(*batch, n, n) + 4 * torch.eye(n, dtype=torch.float64)


def lower(*batch: int, n: int = 3) -> torch.Tensor:
    return torch.linalg.cholesky(spd(*batch, n=n))


def cplx(*shape: int) -> torch.Tensor:
    return torch.complex(f(*shape), f(*shape))


def _solved_by_lu(*batch: int) -> Sample:
    lu, pivots = torch.linalg.lu_factor(regular(*batch))
    return call(lu, pivots, f(*batch, 3, 2))


def _solved_by_ldl(*batch: int) -> Sample:
    factors, pivots = torch.linalg.ldl_factor(spd(*batch))
    return call(factors, pivots, f(*batch, 3, 2))


def _reflectors(*batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.geqrf(f(*batch, 3, 2))


def _distances_back(*batch: int) -> Sample:
    x, y = f(*batch, 4, 2), f(*batch, 3, 2)
    return call(
        f(*batch, 4, 3), x, y, 2.0, torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")
    )


def _segments_back() -> Sample:
    data, lengths = f(5, 3), torch.tensor([2, 3])
    out = torch.segment_reduce(data, "sum", lengths=lengths, unsafe=True)
    return call(f(2, 3), out, data, "sum", lengths=lengths)


def _resized(*rest: Any) -> list[Callable[[], Sample]]:
    return [lambda: call(f(3, 5, *(4 for _ in rest[0])), list(rest[0]), *rest[1:])]


def _resized_back(*rest: Any) -> list[Callable[[], Sample]]:
    size = list(rest[0])
    return [lambda: call(f(3, 5, *size), size, [3, 5, *(4 for _ in size)], *rest[1:])]


def _nearest(n: int, back: str) -> list[Callable[[], Sample]]:
    """Images of 4 x 4 that become 3 x 7, or gradients of these."""
    size = [3, 7, 2][:n]
    return _resized_back(size) if back else _resized(size)


def _matrices(make: Callable[..., torch.Tensor], *rest: Any) -> list[Callable[[], Sample]]:
    return [
        lambda: call(make(5), *rest),
        lambda: call(make(3, 2), *rest),
        lambda: call(make(), *rest),
    ]


MATRICES: dict[str, list[Callable[[], Sample]]] = {
    **dict.fromkeys(map(str, _compat.aten_ops("cholesky.default")), _matrices(spd)),
    "aten.cholesky_inverse.default": _matrices(lower),
    "aten.cholesky_solve.default": [
        lambda: call(f(5, 3, 2), lower(5)),
        lambda: call(f(5, 3, 2), lower(1)),
    ],
    "aten.geqrf.default": _matrices(regular),
    "aten.linalg_cholesky_ex.default": _matrices(spd),
    "aten.linalg_eig.default": _matrices(regular),
    "aten.linalg_eigvals.default": _matrices(regular),
    "aten._linalg_eigh.default": [*_matrices(spd), lambda: call(spd(5), "L", False)],
    "aten._linalg_det.default": _matrices(regular),
    "aten._linalg_slogdet.default": _matrices(regular),
    "aten._linalg_svd.default": [*_matrices(regular), lambda: call(f(5, 3, 2), False, False)],
    "aten._linalg_solve_ex.default": [
        lambda: call(regular(5), f(5, 3, 2)),
        lambda: call(regular(5), f(5, 3)),
        lambda: call(regular(3, 2), f(3, 2, 3, 1)),
    ],
    "aten._linalg_check_errors.default": [
        lambda: call(torch.zeros(5, dtype=torch.int32), "inv", is_matrix=False)
    ],
    "aten.linalg_householder_product.default": [lambda: call(*_reflectors(5))],
    "aten.linalg_inv_ex.default": _matrices(regular),
    "aten.linalg_ldl_factor_ex.default": _matrices(spd),
    "aten.linalg_ldl_solve.default": [lambda: _solved_by_ldl(5)],
    "aten.linalg_lu.default": _matrices(regular),
    "aten.linalg_lu_factor_ex.default": _matrices(regular),
    "aten.linalg_lu_solve.default": [lambda: _solved_by_lu(5), lambda: _solved_by_lu(3, 2)],
    "aten.linalg_matrix_exp.default": _matrices(regular),
    "aten.linalg_pinv.atol_rtol_tensor": [
        lambda: call(f(5, 3, 2), atol=f() * 0, rtol=f() * 0 + 1e-9)
    ],
    "aten.linalg_qr.default": _matrices(regular),
    "aten.linalg_solve_triangular.default": [
        lambda: call(lower(5), f(5, 3, 2), upper=False),
        lambda: call(lower(1), f(5, 3, 2), upper=False),
    ],
    "aten.lu_unpack.default": [lambda: call(*torch.linalg.lu_factor(regular(5)))],
    "aten.ormqr.default": [lambda: call(*_reflectors(5), f(5, 3, 2))],
    "aten.triangular_solve.default": [lambda: call(f(5, 3, 2), lower(5), False)],
    "aten._cdist_forward.default": [
        lambda: call(f(5, 4, 2), f(5, 3, 2), 2.0, 2),
        lambda: call(f(4, 2), f(3, 2), 1.0, None),
    ],
    "aten._cdist_backward.default": [lambda: _distances_back(5), _distances_back],
}
IMAGES: dict[str, list[Callable[[], Sample]]] = {
    "aten.grid_sampler_2d.default": [lambda: call(f(3, 5, 4, 4), f(3, 2, 3, 2), 0, 0, False)],
    "aten.grid_sampler_2d_backward.default": [
        lambda: call(f(3, 5, 2, 3), f(3, 5, 4, 4), f(3, 2, 3, 2), 0, 0, False, [True, True])
    ],
    "aten.grid_sampler_3d.default": [lambda: call(f(3, 5, 2, 2, 2), f(3, 2, 1, 2, 3), 0, 0, False)],
    "aten.grid_sampler_3d_backward.default": [
        lambda: call(
            f(3, 5, 2, 1, 2), f(3, 5, 2, 2, 2), f(3, 2, 1, 2, 3), 0, 0, False, [True, True]
        )
    ],
    "aten._upsample_bilinear2d_aa.default": _resized((3, 7), False),
    "aten._upsample_bilinear2d_aa_backward.default": _resized_back((3, 7), False),
    "aten._upsample_bicubic2d_aa.default": _resized((3, 7), False),
    "aten._upsample_bicubic2d_aa_backward.default": _resized_back((3, 7), False),
    "aten.upsample_bilinear2d.default": _resized((3, 7), True),
    "aten.upsample_bilinear2d_backward.default": _resized_back((3, 7), True),
    "aten.upsample_bicubic2d.default": _resized((3, 7), True),
    "aten.upsample_bicubic2d_backward.default": _resized_back((3, 7), True),
    "aten.upsample_trilinear3d.default": _resized((3, 7, 2), True),
    "aten.upsample_trilinear3d_backward.default": _resized_back((3, 7, 2), True),
    "aten.upsample_linear1d.default": _resized((7,), True),
    "aten.upsample_linear1d_backward.default": _resized_back((7,), True),
    **{
        f"aten.{name}{n}d{back}.default": _nearest(n, back)
        for back in ("", "_backward")
        for name in ("upsample_nearest", "_upsample_nearest_exact")
        for n in (1, 2, 3)
    },
}
REST: dict[str, list[Callable[[], Sample]]] = {
    "aten._fft_c2c.default": [
        lambda: call(cplx(5, 3, 4), [1], 0, True),
        lambda: call(cplx(5, 3), [0, 1], 0, False),
    ],
    "aten._fft_r2c.default": [
        lambda: call(f(5, 3, 4), [2], 0, True),
        lambda: call(f(5, 3), [0], 0, False),
    ],
    "aten._fft_c2r.default": [
        lambda: call(cplx(5, 3, 4), [2], 0, 6),
        lambda: call(cplx(4, 3), [0], 0, 7),
    ],
    "aten.segment_reduce.default": [
        lambda: call(f(5, 3), "sum", lengths=torch.tensor([2, 3]), unsafe=True)
    ],
    "aten._segment_reduce_backward.default": [_segments_back],
    "aten.as_strided.default": [
        lambda: call(f(5, 6), [5, 3, 2], [6, 2, 1]),
        lambda: call(f(5, 8), [5, 3, 4], [8, 2, 1]),
        lambda: call(f(6), [3, 2], [2, 1]),
    ],
    "aten.as_strided_scatter.default": [lambda: call(f(5, 6), f(5, 3), [5, 3], [6, 2])],
    "aten.bucketize.Tensor": [lambda: call(f(5, 3), f(4).sort().values)],
    "aten.searchsorted.Tensor": [
        lambda: call(f(4).sort().values, f(5, 3)),
        lambda: call(f(5, 4).sort().values, f(5, 3)),
        lambda: call(f(4), f(5), sorter=torch.arange(4)),
    ],
    "aten.cummax.default": [lambda: call(f(5, 3), 1), lambda: call(f(5, 3), 0)],
    "aten.cummin.default": [lambda: call(f(5, 3), 1), lambda: call(f(5, 3), -2)],
    "shardfn.reverse_cumsum.default": [lambda: call(f(5, 3), 1), lambda: call(f(5, 3), 0)],
    "shardfn.reverse_logcumsumexp.default": [lambda: call(f(5, 3), 1), lambda: call(f(5, 3), -2)],
    "aten.logcumsumexp.default": [lambda: call(f(5, 3), 1), lambda: call(f(5, 3), 0)],
    "aten.sort.stable": [
        lambda: call(f(5, 3), stable=True, dim=1),
        lambda: call(f(5, 3), stable=True, dim=0),
    ],
    "aten.kthvalue.default": [
        lambda: call(f(5, 3), 2, 1),
        lambda: call(f(5, 3), 2, 0, True),
        lambda: call(f(3, 5), 2),
    ],
    "aten.median.dim": [lambda: call(f(5, 3), 1), lambda: call(f(5, 3), 0, True)],
    "aten.nanmedian.dim": [lambda: call(f(5, 3), 1), lambda: call(f(5, 3), 0, True)],
    "aten.mode.default": [lambda: call(i(3, 5, 3).double(), 1), lambda: call(i(3, 3, 5).double())],
    "aten.histc.default": [lambda: call(f(5, 3), 4, -2, 2), lambda: call(f(5, 3), 4)],
    "aten.diagonal.default": [
        lambda: call(f(5, 3, 4), 0, 1, 2),
        lambda: call(f(5, 3, 4), 1, 0, 2),
        lambda: call(f(3, 4)),
    ],
    "aten.diagonal_scatter.default": [
        lambda: call(f(5, 3, 4), f(5, 3), 0, 1, 2),
        lambda: call(f(3, 5, 4), f(5, 3), 0, 0, 2),
    ],
    "aten.slice_scatter.default": [
        lambda: call(f(5, 6), f(5, 2), 1, 1, 5, 2),
        lambda: call(f(6, 3), f(2, 3), 0, 1, 3),
    ],
    "aten.select_scatter.default": [
        lambda: call(f(5, 3, 2), f(5, 2), 1, 2),
        lambda: call(f(3, 5), f(5), 0, -1),
    ],
    "aten.unfold.default": [lambda: call(f(5, 7, 3), 1, 3, 2), lambda: call(f(7, 3), 0, 2, 1)],
    "aten.repeat.default": [
        lambda: call(f(5, 3), [1, 2]),
        lambda: call(f(5, 3), [2, 1, 1]),
        lambda: call(f(3), [2, 2]),
    ],
    "aten.view_as_real.default": [lambda: call(cplx(5, 3))],
    "aten.view_as_complex.default": [lambda: call(f(5, 3, 2))],
    "aten.index_reduce.default": [
        lambda: call(f(5, 3), 1, i(3, 4), f(5, 4), "amax"),
        lambda: call(f(3, 5), 0, i(3, 4), f(4, 5), "mean"),
    ],
    "aten.scatter_reduce.two": [
        lambda: call(f(5, 3), 1, i(3, 5, 4), f(5, 4), "sum"),
        lambda: call(f(3, 5), 0, i(3, 4, 5), f(4, 5), "amax", include_self=False),
    ],
}
