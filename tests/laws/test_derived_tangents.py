"""A derivative of a tangent, of either mode, equals reverse over reverse, or is refused by the
name of the op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import shardfn as sf

F64 = torch.float64
G = torch.Generator().manual_seed(5)
X = torch.randn(3, 3, generator=G, dtype=F64)
V = torch.randn(3, 3, generator=G, dtype=F64)
W = torch.randn(3, 3, generator=G, dtype=F64)
linalg = torch.linalg


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_forward(x)
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * g

    jvp = backward


def scanned(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: sf.scan(lambda c, _: (f(c) * 1.0, None), x, None, length=2)[0]


REFUSED: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "det": ("op det", torch.det),
    "a method": ("op det", lambda x: x.det()),
    "in a scan": ("op det", scanned(lambda x: x.det() * x)),
    "logdet": ("op logdet", lambda x: torch.logdet(x @ x.mT)),
    "slogdet": ("op slogdet", lambda x: linalg.slogdet(x)[1]),
    "solve": ("op solve", lambda x: linalg.solve(x, W)),
    "tensorsolve": ("op tensorsolve", lambda x: linalg.tensorsolve(x, W[0])),
    "layer_norm": ("op layer_norm", lambda x: F.layer_norm(x, (3,)) ** 2),
    "batch_norm": ("op batch_norm", lambda x: F.batch_norm(x, None, None, training=True) ** 2),
    "instance_norm": ("op instance_norm", lambda x: F.instance_norm(x[None]) ** 2),
    "cumprod": ("op cumprod", lambda x: (x * (1 - torch.eye(3, dtype=F64))).cumprod(0)),
}
RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "eigvalsh": lambda x: linalg.eigvalsh(x + x.mT),
    "group_norm": lambda x: F.group_norm(x[None], 1) ** 2,
    "rms_norm": lambda x: F.rms_norm(x, (3,)) ** 2,
    "det of a constant": lambda x: x.cos() * W.det(),
}


def weighted(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def fn(x: Tensor) -> Tensor:
        y = f(x).contiguous()
        return (y * torch.linspace(0.3, 1.2, y.numel(), dtype=F64).view(y.shape)).sum()

    return fn


ORDERS: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "jvp of jvp": lambda f: lambda x: sf.jvp(lambda x: sf.jvp(f, (x,), (V,))[1], (x,), (V,))[1],
    "jacfwd of jacfwd": lambda f: (
        lambda x: ((sf.jacfwd(sf.jacfwd(f))(x) * V).sum((2, 3)) * V).sum()
    ),
    "grad of jvp": lambda f: lambda x: (sf.grad(lambda x: sf.jvp(f, (x,), (V,))[1])(x) * V).sum(),
}
HESSIAN = "jvp of grad"
ORDERS[HESSIAN] = lambda f: lambda x: sf.jvp(lambda x: (sf.grad(f)(x) * V).sum(), (x,), (V,))[1]


def second(order: str, f: Callable[[Tensor], Tensor]) -> Tensor:
    return sf.jit(ORDERS[order](weighted(f)), backend="aten")(X)


def wanted(f: Callable[[Tensor], Tensor]) -> Tensor:
    hessian = torch.func.jacrev(torch.func.jacrev(weighted(f)))(X)
    return (hessian * V * V[:, :, None, None]).sum()


@pytest.mark.parametrize("name", REFUSED)
def test_a_derivative_of_such_a_tangent_is_refused_by_name(name: str) -> None:
    where, f = REFUSED[name]
    orders = ["jvp of jvp", "grad of jvp"]
    for order in [*orders, "jacfwd of jacfwd"] if name == "det" else orders:
        with pytest.raises(
            sf.CaptureError, match=f"^{where}: the call takes a derivative of the op's tangent"
        ):
            second(order, f)
    if name != "in a scan":
        assert_close(second(HESSIAN, f), wanted(f), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", RIGHT)
def test_other_derivatives_of_tangents_equal_reverse_over_reverse(name: str) -> None:
    for order in ("jvp of jvp", "grad of jvp"):
        assert_close(second(order, RIGHT[name]), wanted(RIGHT[name]), rtol=1e-8, atol=1e-8)


def test_forward_over_forward_of_a_functions_own_jvp_is_refused() -> None:
    with pytest.raises(sf.CaptureError, match="^autograd.Function Cube: the jvp is differentiated"):
        second("jvp of jvp", Cube.apply)
    assert_close(second("grad of jvp", Cube.apply), wanted(lambda x: x**3))
    assert_close(second(HESSIAN, Cube.apply), wanted(lambda x: x**3))


@pytest.mark.parametrize("f", [torch.cholesky_inverse, lambda x: torch.triangular_solve(W, x)[0]])
def test_a_tangent_that_counts_both_triangles_is_refused(f: Any) -> None:
    for fn in (lambda x: sf.jvp(f, (x,), (V,))[1], ORDERS[HESSIAN](weighted(f))):
        with pytest.raises(sf.CaptureError, match="counts both triangles"):
            sf.jit(fn, backend="aten")(X)


PRODUCT = lambda x: linalg.eig(x @ x.mT + torch.eye(3, dtype=F64))[0].real.pow(2).prod()
TANGENT = lambda f: lambda x: sf.jvp(f, (x,), (V,))[1]
SLOPE = lambda f: lambda x: (sf.grad(f)(x) * V).sum()


@pytest.mark.parametrize("order", ["forward thrice", "forward twice over reverse"])
def test_a_third_derivative_of_eigenvalues_is_refused_in_forward_mode(order: str) -> None:
    inner = TANGENT if order == "forward thrice" else SLOPE
    third = TANGENT(TANGENT(inner(PRODUCT)))
    with pytest.raises(sf.CaptureError, match="^op eig: the call takes a third derivative"):
        sf.jit(third, backend="aten")(X)


def test_other_third_derivatives_of_eigenvalues_are_right() -> None:
    third = sf.jit(TANGENT(SLOPE(SLOPE(PRODUCT))), backend="aten")(X)
    reverse = sf.jit(SLOPE(SLOPE(SLOPE(PRODUCT))), backend="aten")(X)
    assert_close(third, reverse, rtol=1e-8, atol=1e-8)
    second = sf.jit(TANGENT(TANGENT(PRODUCT)), backend="aten")(X)
    assert_close(second, sf.jit(SLOPE(SLOPE(PRODUCT)), backend="aten")(X), rtol=1e-8, atol=1e-8)


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "inv": linalg.inv,
    "cholesky": lambda x: linalg.cholesky(x @ x.mT),
    "qr": lambda x: linalg.qr(x)[1],
    "lstsq": lambda x: linalg.lstsq(x, W).solution,
    "cholesky_solve": lambda x: torch.cholesky_solve(x, linalg.cholesky(x @ x.mT)),
}


@pytest.mark.parametrize("name", STRIDED)
def test_a_column_major_tangent_is_added_to_a_zero_tangent_in_forward_over_forward(
    name: str,
) -> None:
    f = lambda x: (STRIDED[name](x) * W).sum()
    plain = lambda f: lambda x: torch.func.jvp(f, (x,), (V,))[1]
    assert_close(sf.jit(TANGENT(TANGENT(f)), backend="aten")(X), plain(plain(f))(X))
    third = plain(plain(torch.func.grad(f)))(X)
    assert_close(sf.jit(TANGENT(TANGENT(sf.grad(f))), backend="aten")(X), third)


Z = torch.tensor([1 + 1j, 0.3 - 2j, 2j], dtype=torch.complex128)
R = torch.tensor([0.7, 1.2, 2.0], dtype=F64)
POWERS: dict[str, Callable[[Tensor], Tensor]] = {
    "base": lambda x: x**Z,
    "exponent": lambda x: Z**x,
    "of a number": lambda x: (2 + 1j) ** x,
    "to a number": lambda x: torch.pow(x, 2 - 1j),
    "by keyword": lambda x: torch.pow(x, exponent=Z),
    "reflected": lambda x: x.__rpow__(2 + 1j),
    "of a product": lambda x: (x * Z) ** x,
}


@pytest.mark.parametrize("name", POWERS)
def test_the_tangent_of_a_power_of_a_real_and_a_complex_number_is_refused(name: str) -> None:
    f = lambda x: torch.view_as_real(POWERS[name](x))
    for fn in (lambda x: sf.jvp(f, (x,), (R,))[1], sf.jacfwd(f)):
        with pytest.raises(sf.CaptureError, match="is real for a real operand beside a complex"):
            sf.jit(fn, backend="aten")(R)
    assert_close(sf.jacrev(f)(R), torch.autograd.functional.jacobian(f, R))


def test_the_tangent_of_a_complex_operand_of_a_power_is_torchs() -> None:
    for f in (lambda z: z**R, lambda z: R**z, lambda z: z**2, lambda z: 2.5**z):
        (_, got), (_, want) = (jvp(f, (Z,), (R * Z,)) for jvp in (sf.jvp, torch.func.jvp))
        assert_close(got, want)


def test_a_right_hand_side_that_torch_takes_for_vectors_is_refused() -> None:
    factors = torch.eye(3, dtype=F64) + torch.stack([X.tril(), V.tril(), W.tril()])
    tangents = torch.stack([V.tril(), W.tril(), X.tril()])
    f = lambda factors: torch.cholesky_solve(X, factors)
    with pytest.raises(sf.CaptureError, match="takes one matrix for several vectors"):
        sf.jvp(f, (factors,), (tangents,))
    whole = lambda factors: torch.cholesky_solve(X.expand(3, 3, 3), factors)
    want = (torch.autograd.functional.jacobian(f, factors) * tangents).sum((-3, -2, -1))
    assert_close(sf.jvp(whole, (factors,), (tangents,))[1], want)
