"""Inductor: formulas of ours in its code, the graph that it is given, and what it returns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import compile_fx
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import V

import shardfn as sf
from shardfn import _compat
from shardfn._compat.inductor import Integer, Loader, _number, generated_code
from shardfn.compile import backends
from shardfn.ops.pack import pack
from tests.support.stages.graphs import calls

X = torch.arange(6.0).view(2, 3)


class Python:
    """Inductor's operations, of numbers of Python."""

    constant = staticmethod(lambda value, dtype: value)
    add = staticmethod(lambda a, b: a + b)
    sub = staticmethod(lambda a, b: a - b)
    mul = staticmethod(lambda a, b: a * b)
    bitwise_and = staticmethod(lambda a, b: a & b)
    bitwise_or = staticmethod(lambda a, b: a | b)
    bitwise_xor = staticmethod(lambda a, b: a ^ b)
    bitwise_left_shift = staticmethod(lambda a, b: a << b)
    bitwise_right_shift = staticmethod(lambda a, b: a >> b)


def number(x: Integer) -> int:
    return getattr(x.value, "value", x.value)


def test_integers_have_the_operators_of_a_tensor() -> None:
    fns = [
        lambda a, b: a + b,
        lambda a, b: a - b,
        lambda a, b: a * b,
        lambda a, b: a & b,
        lambda a, b: a | b,
        lambda a, b: a ^ b,
        lambda a, b: a << b,
        lambda a, b: a >> b,
    ]
    with V.set_ops_handler(Python()):
        for fn in fns:
            assert number(fn(Integer(13), Integer(3))) == fn(13, 3)
            assert number(fn(Integer(13), 3)) == fn(13, 3)
        assert number(3 + Integer(13)) == 16 and number(3 ^ Integer(13)) == 14


def test_a_loader_has_sizes_as_ints_and_reads_elements() -> None:
    held: Any = SimpleNamespace(get_size=lambda: [torch.tensor(2), 3], make_loader=lambda: sum)
    loader = Loader(held)
    assert loader.sizes == [2, 3] and type(loader.sizes[0]) is int
    assert loader.at([1, 2]) == 3
    symbol = SimpleNamespace(free_symbols={"s0"})
    assert _number(symbol) is symbol


def test_code_that_was_not_kept_is_an_empty_text() -> None:
    assert generated_code(SimpleNamespace(source_code="text")) == "text"
    assert generated_code(SimpleNamespace(source_code=None)) == ""
    assert generated_code(len) == ""


def test_what_inductor_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    record = lambda graph, inputs, **options: given.append((graph, inputs, options))
    monkeypatch.setattr(compile_fx, "compile_fx_inner", record)

    def run(x: torch.Tensor) -> Any:
        return [pack([x, x * 2]), None, torch.nn.functional.silu(x)]

    mode = _compat.fake_mode()
    finished: list[Any] = []
    x = mode.from_tensor(X)
    _compat.inductor(run, [x], finished.append, backends.our_ops())
    ((graph, inputs, options),) = given
    assert finished == [graph] and inputs == [x]
    assert options == {"static_input_idxs": [], "is_inference": True}
    assert len(calls(graph.graph, "pack")) == 1 and not calls(graph.graph, "silu")
    (output,) = graph.graph.find_nodes(op="output")
    assert output.meta["user_visible_output_idxs"] == [0, 2], "None is no tensor"


def test_a_factor_of_a_sum_stays_where_the_other_term_is_a_product() -> None:
    def sums(w: Any, b: Any, x: Any, y: Any) -> Any:
        return (
            torch.add(w, x @ y, alpha=-0.25),
            torch.add(x @ (2 * y), w, alpha=3),
            torch.add(b, x @ (3 * y), alpha=0.5),
        )

    shapes = (3, 5), (5,), (3, 7), (7, 5)
    args = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    for value, expected in zip(sf.jit(sums)(*args), sums(*args), strict=True):
        torch.testing.assert_close(value, expected)


def test_a_compiled_step_of_sgd_goes_down_the_gradient_of_a_product() -> None:
    opt = sf.optim(torch.optim.SGD, lr=0.5)
    loss = lambda w, x: (x @ w).square().sum()

    def step(w: Any, state: Any, x: Any) -> Any:
        return opt.update(w, sf.grad(loss)(w, x), state)[0]

    w, x = torch.randn(5, 3, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    found = sf.jit(step)(w, opt.init(w), x)
    torch.testing.assert_close(found, w - x.T @ (x @ w))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, None])
@pytest.mark.parametrize("value", [1.5, 3])
def test_a_cumulative_sum_of_one_number_has_the_dtype_that_is_asked_for(
    value: float, dtype: torch.dtype | None
) -> None:
    fn = lambda: torch.cumsum(torch.full((2, 5), value), 1, dtype=dtype)
    found = sf.jit(fn)()
    assert found.dtype == fn().dtype
    assert torch.equal(found, fn())


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "trilinear"])
def test_ops_without_a_lowering_compile_where_the_environment_has_the_variable_ci(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    for op in (
        torch.ops.aten.upsample_bilinear2d.default,
        torch.ops.aten.upsample_bicubic2d.default,
        torch.ops.aten.upsample_trilinear3d.default,
    ):
        monkeypatch.delitem(lowerings, op, raising=False)
    image = torch.randn(1, 2, 3, 5, dtype=torch.float64)
    x, size = (image[:, :, None], (2, 4, 7)) if mode == "trilinear" else (image, (4, 7))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(x, size=size, mode=mode).square().sum()

    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    torch.testing.assert_close(sf.jit(sf.grad(loss))(x), leaf.grad)
