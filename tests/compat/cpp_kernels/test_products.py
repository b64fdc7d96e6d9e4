"""Large products of float32 matrices by oneDNN."""

from __future__ import annotations

import pathlib

import pytest
import torch
import torch.nn.functional as F

import shardfn as sf
from shardfn._compat.cpp_kernels import products

needs_both = pytest.mark.skipif(
    not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()),
    reason="this torch has only one library of products",
)
X, W, B = torch.ones(300, 200), torch.ones(200, 150), torch.ones(150)


@pytest.mark.parametrize(
    ("operands", "large"),
    [
        ((X, W), True),
        ((X, torch.ones(150, 200).t()), True),
        ((B, X, W), True),
        ((X[:100], W), False),
        ((X.double(), W.double()), False),
        ((torch.ones(200, 300).t(), W), False),
        ((X, torch.ones(200, 300)[:, ::2]), False),
        ((torch.ones(300, 150), X, W), False),
        ((torch.ones(1), X, W), False),
    ],
)
def test_it_takes_large_operands_as_they_lie(
    operands: tuple[torch.Tensor, ...], large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert products.is_large(*operands) is large
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert not products.is_large(*operands), "each thread has half of it"


@needs_both
def test_the_processor_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    told = tmp_path / "cpuinfo"
    monkeypatch.setattr(products, "PROCESSORS", told)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    for maker, answer in ((products.AMD, True), ("GenuineIntel", False)):
        told.write_text(f"vendor_id : {maker}")
        assert products.is_faster.__wrapped__() is answer
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    told.write_text(products.AMD)
    assert not products.is_faster.__wrapped__()


@needs_both
def test_values_and_gradients_are_those_of_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "is_faster", lambda: True)
    monkeypatch.setattr(products, "LEAST", 1)

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        hidden = F.linear(x, params["in"], params["bias"]).relu()
        return (hidden @ params["out"]).square().mean()

    torch.manual_seed(0)
    shapes = {"in": (23, 17), "bias": (23,), "out": (23, 5)}
    params = {name: torch.randn(shape) for name, shape in shapes.items()}
    x = torch.randn(41, 17)
    grad = sf.jit(sf.value_and_grad(loss), backend="inductor")
    code = grad.lower(params, x).compile().code
    assert code.count(f"= {products.OP}") == 3, "two products, and one in the backward"
    with torch.backends.mkldnn.flags(enabled=False):
        other = grad.lower(params, x).compile().code
    assert products.OP not in other
    found, grads = grad(params, x)
    wanted, value = torch.func.grad_and_value(loss)(params, x)
    torch.testing.assert_close(found, value)
    torch.testing.assert_close(grads, wanted)
