"""A call that autograd follows to tensors that the function closes over has torch's gradients,
whatever dtypes its ops have: complex numbers, and integer results.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf

Function = Callable[[torch.Tensor], torch.Tensor]
WEIGHT = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _weighted(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return (x * (index + 1)).sum()


ROWS = torch.tensor([[1, 2, 0], [5, 1, 3]])
bag = torch.nn.functional.embedding_bag
FUNCTIONS: dict[str, Function] = {
    "bags": lambda w: bag(ROWS, w).sin().sum(),
    "bags by offsets": lambda w: bag(ROWS[0], w, torch.tensor([0, 2]), mode="sum").sin().sum(),
    "bags of weighted rows": lambda w: (
        bag(ROWS, w, per_sample_weights=w[:2, :3], mode="sum", padding_idx=-1).sin().sum()
    ),
    "largest of bags": lambda w: bag(ROWS, w, mode="max", padding_idx=1).sin().sum(),
    "rfft": lambda w: torch.fft.rfft(w).abs().sum(),
    "rfft2": lambda w: torch.fft.rfft2(w).abs().sum(),
    "irfft": lambda w: torch.fft.irfft(torch.complex(w, w.cos())).sin().sum(),
    "hfft": lambda w: torch.fft.hfft(torch.complex(w, w.cos())).sin().sum(),
    "rfft of another size": lambda w: torch.fft.rfft(w, n=8, norm="ortho").real.sin().sum(),
    "sort": lambda w: _weighted(*w.sort(0)),
    "topk": lambda w: _weighted(*w.topk(2, 0)),
    "max": lambda w: _weighted(*w.max(0)),
    "max pool": lambda w: torch.nn.functional.max_pool1d(w, 2).sin().sum(),
    "lu": lambda w: torch.linalg.lu_factor(w.T @ w).LU.sin().sum(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_what_is_closed_over_are_torchs(name: str) -> None:
    _check(FUNCTIONS[name], WEIGHT, is_sharded=False)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_on_a_mesh_too(name: str) -> None:
    _check(FUNCTIONS[name], WEIGHT, is_sharded=True)


def _check(fn: Function, start: torch.Tensor, is_sharded: bool) -> None:
    w = torch.nn.Parameter(start.clone())
    x = torch.tensor(0.7, dtype=torch.float64)
    (expected,) = torch.autograd.grad(fn(w * x), w)
    call = lambda x: fn(w * x)
    if is_sharded:
        with simulated(dp=2) as mesh, sf.use_mesh(mesh):
            sf.shard(call)(x).backward()
    else:
        sf.jit(call, backend="aten")(x).backward()
    assert_close(w.grad, expected)


WRONG = {  # bags that torch refuses
    "offsets of rows of equal length": lambda w: bag(ROWS, w, torch.tensor([0, 1])),
    "no offsets": lambda w: bag(ROWS[0], w),
    "a row that is no padding": lambda w: bag(ROWS, w, padding_idx=9),
    "weights of a mean": lambda w: bag(ROWS, w, per_sample_weights=w[:2, :3]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_bag_that_torch_refuses_is_refused_in_its_words(name: str) -> None:
    with pytest.raises(Exception) as plain:
        WRONG[name](WEIGHT)
    with pytest.raises(type(plain.value)) as captured:
        sf.jit(WRONG[name], backend="aten")(WEIGHT)
    assert str(captured.value) == str(plain.value)
