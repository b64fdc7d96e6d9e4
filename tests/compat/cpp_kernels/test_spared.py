"""Loops for which Inductor writes no code: the program stays the same to the letter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch._inductor import config as inductor_config
from torch._inductor.codegen.cpp import CppKernelProxy
from torch._inductor.scheduler import SchedulerNode

import shardfn as sf
from shardfn._compat import patches
from shardfn._compat.cpp_kernels import units
from shardfn._compat.cpp_kernels.patches import WRITTEN
from shardfn._compat.cpp_kernels.spared import is_empty

X = torch.linspace(-2, 2, 32 * 48).reshape(32, 48)
LONG = torch.linspace(-2, 2, 2 * 1024).reshape(2, 1024)  # no outer loop is shared
ODD = torch.linspace(-2, 2, 7 * 35, dtype=torch.float64).reshape(7, 35)
SHAPES = {"full vectors": X, "rests": ODD, "long rows": LONG}


def normed(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[1:]).relu() + x


def softmax_and_loss(x: torch.Tensor) -> torch.Tensor:
    target = torch.arange(len(x)) % x.shape[1]
    return torch.nn.functional.cross_entropy((x * 2).softmax(1).cumsum(0), target)


def transposed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x.mT.contiguous() * 2, (x.mT + x.mT.sin()).contiguous(), x.std(0))


def two_halves(x: torch.Tensor) -> torch.Tensor:
    y = normed(normed(x).bfloat16().float() @ x.T)
    return (y.softmax(1) * y.amax(0)).sum()


def many_norms(x: torch.Tensor) -> torch.Tensor:
    return normed(normed(x) @ normed(x).T).sum()


PROGRAMS: dict[str, Callable[..., Any]] = {
    "a norm and its gradient": sf.value_and_grad(lambda x: normed(x).square().sum()),
    "a loss and its gradient": sf.value_and_grad(softmax_and_loss),
    "transposed tiles": transposed,
    "half precision": sf.value_and_grad(two_halves),
    "several norms": sf.value_and_grad(many_norms),
    "integers": lambda x: ((x * 10).long().cumsum(0) % 7, x.argmax(1), x > x.mean()),
}


@pytest.fixture(autouse=True)
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """The loops and the bodies that Inductor writes. No compiler runs."""
    counts: Counter[str] = Counter()

    def counted(owner: type, name: str) -> None:
        torchs = getattr(owner, name)

        def noted(*args: Any) -> Any:
            counts[name] += 1
            return torchs(*args)

        monkeypatch.setattr(owner, name, noted)

    counted(CppKernelProxy, "codegen_functions")
    counted(SchedulerNode, "codegen")
    nothing = lambda batch: [lambda *_: None] * len(batch.kernels)
    monkeypatch.setattr(units.Batch, "functions", nothing)
    with inductor_config.patch(fx_graph_cache=False):
        yield counts


def code_of(f: Callable[..., Any], x: torch.Tensor) -> str:
    sf.clear_cache()
    return sf.jit(f, backend="inductor").lower(x).compile().code


@pytest.fixture
def as_torch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Have Inductor write what it writes by itself."""
    own = tuple(x for x in patches.PATCHES["compilation"] if x not in WRITTEN)
    return lambda: monkeypatch.setitem(patches.PATCHES, "compilation", own)


@pytest.mark.parametrize("x", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_code_is_inductors_to_the_letter(
    name: str, x: torch.Tensor, as_torch: Callable[[], None]
) -> None:
    ours = code_of(PROGRAMS[name], x)
    assert "cpp_fused" in ours
    as_torch()
    assert code_of(PROGRAMS[name], x) == ours


def test_a_third_of_the_bodies_is_spared_where_vectors_leave_no_rest(
    written: Counter[str], as_torch: Callable[[], None]
) -> None:
    code_of(PROGRAMS["a norm and its gradient"], X)
    ours = written.copy()
    written.clear()
    as_torch()
    code_of(PROGRAMS["a norm and its gradient"], X)
    assert ours["codegen"] < 0.7 * written["codegen"]
    assert ours["codegen_functions"] < written["codegen_functions"]


@pytest.mark.parametrize(
    ("rests", "wanted"),
    [
        ({}, False),
        ({"tail_size": None}, False),
        ({"tail_size": 0}, True),
        ({"tail_size": 3}, False),
        ({"tail_size": None, "outer_tail_size": 0}, True),
        ({"tail_size": 5, "outer_tail_size": 2}, False),
        ({"tail_size": sympy.Integer(0)}, True),
        ({"tail_size": sympy.Symbol("s0") % 16}, False),
    ],
)
def test_a_kernel_is_empty_for_a_rest_of_no_elements(rests: dict[str, Any], wanted: bool) -> None:
    assert is_empty(SimpleNamespace(**rests)) is wanted
