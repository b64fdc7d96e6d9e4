"""Ops whose tangents torch computes from values that it takes for constants, so that a
derivative of a tangent lacks terms. torch.func is wrong in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ... import _compat
from ...errors import CaptureError
from .. import annotations as sources
from ..dynamo_nodes import name_of


class Row(NamedTuple):
    """Some ops of torch, and why the derivative of their tangent is wrong."""

    ops: tuple[str, ...]  # the names of functions, methods and ATen ops
    why: str
    until: str = "later than 2.15"  # the torch version that ends it
    at_once: bool = False  # the tangent itself is wrong already
    third: bool = False  # only a third derivative is wrong, two of them in forward mode
    of: Callable[..., bool] = lambda *_: True  # for which of its first two arguments


def _like_vectors(b: Any, factor: Any) -> bool:
    """Whether a right-hand side has the shape of one vector for each of several matrices."""
    return b.shape == factor.shape[:-1]


def _real_with_tangent(base: Any, exponent: Any) -> bool:
    """Whether one of two operands is complex, and the other, which has a tangent, is real."""
    pairs = [(x, z) for x, z in ((base, exponent), (exponent, base)) if _is_complex(z)]
    return any(not _is_complex(x) and "jvp" in _compat.followed([x]) for x, _ in pairs)


def _is_complex(x: Any) -> bool:
    return x.is_complex() if isinstance(x, torch.Tensor) else isinstance(x, complex)


FACTORS = "torch's tangent of this op treats the factors of the matrix as constants"
MOMENTS = "torch's tangent of this op treats the mean and the variance as constants"
TABLE = (
    Row(("det", "logdet", "slogdet", "_linalg_det", "_linalg_slogdet"), FACTORS),
    Row(("solve", "solve_ex", "tensorsolve", "_linalg_solve_ex"), FACTORS),
    Row(("layer_norm", "native_layer_norm"), MOMENTS),
    Row(("batch_norm", "instance_norm", "native_batch_norm"), MOMENTS),
    Row(("_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm"), MOMENTS),
    Row(
        ("householder_product", "orgqr"),
        "torch's tangent of this op treats the reflectors as constants",
    ),
    Row(
        ("eig", "eigvals", "_linalg_eig"),
        "torch's second-order tangent of this op lacks terms",
        third=True,
    ),
    Row(
        ("cumprod",),
        "torch's tangent of this op is a quotient, which has a wrong derivative at zero",
    ),
    Row(
        ("cholesky_inverse", "triangular_solve"),
        "torch's tangent of this op counts both triangles of the matrix",
        at_once=True,
    ),
    Row(
        ("cholesky_solve",),
        "torch's tangent of this op takes one matrix for several vectors, where its shape allows",
        at_once=True,
        of=_like_vectors,
    ),
    Row(
        ("pow", "__rpow"),
        "torch's tangent of this op is real for a real operand beside a complex one",
        at_once=True,
        of=_real_with_tangent,
    ),
)
ROWS = {name: row for row in TABLE for name in row.ops}
FIX = "differentiate forward over reverse: sf.hessian, or sf.jvp of sf.grad or sf.vjp"


def refuse_derived(node: torch.fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse an op of the table if a derivative of its tangent is needed.

    Raises:
        CaptureError: names the op and the line.
    """
    name = name_of(node).split(".")[0].removeprefix("linalg_").rstrip("_")
    row = ROWS.get(name)
    every = [*args, *kwargs.values()]
    if row is None or not row.of(*every[:2]):
        return
    modes = _compat.followed(every)
    if row.at_once and "jvp" in modes:
        got, fix = f"{row.why}", "use reverse mode: sf.vjp or sf.jacrev"
    elif row.third:
        if modes.count("jvp") < 2 or len(modes) < 3:
            return
        got = (
            "the call takes a third derivative, with two of the three derivatives in forward "
            f"mode, and {row.why}"
        )
        fix = "use forward mode for at most one of the derivatives"
    elif "jvp" in modes[:-1]:
        got, fix = f"the call takes a derivative of the op's tangent, and {row.why}", FIX
    else:
        return
    raise CaptureError.of(f"op {name}", got, fix=fix, source=sources.user_line(node))
