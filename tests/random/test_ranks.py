"""Draws of two processes, op by op and compiled, next to those of one device run eagerly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import run_ranks
from torch.testing import assert_close

import shardfn as sf
from shardfn import P, random

KEY = random.key(4)
N, M = 7, 6  # uneven on two ranks
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)
Draw = Callable[..., torch.Tensor]
EXACT: dict[str, Draw] = {  # bit for bit
    **{f"uniform {d}": lambda k, w, d=d: random.uniform(k, (N, M), d) for d in DTYPES},
    **{f"bits {d}": lambda k, w, d=d: random.bits(k, (N, M), d) for d in INTEGERS},
    "bernoulli": lambda k, w: random.bernoulli(k, w / 4),
    "randint": lambda k, w: random.randint(k, (N, M), -3, 9),
    "permutation": lambda k, w: random.permutation(k, w),
    "choice": lambda k, w: random.choice(k, w, (3,)),
    "categorical": lambda k, w: random.categorical(k, w),
    "dropout": lambda k, w: random.dropout(k, w, 0.3) != 0,
    "split": lambda k, w: random.split(k, N),
    "fold_in": lambda k, w: random.fold_in(k, 5),
}
ROUNDED: dict[str, Draw] = {  # to two units in the last place
    **{
        f"{fn.__name__} {d}": lambda k, w, fn=fn, d=d: fn(k, (N, M), d)
        for fn in (random.normal, random.exponential, random.gumbel)
        for d in DTYPES
    },
    "truncated_normal": lambda k, w: random.truncated_normal(k, -w, w, (N, M), w.dtype),
}
COMPOSED: dict[str, Draw] = {  # several rounded steps
    "gamma": lambda k, w: random.gamma(k, w, dtype=w.dtype),
    "beta": lambda k, w: random.beta(k, w, 2 * w, dtype=w.dtype),
}
ALL = EXACT | ROUNDED | COMPOSED


COMPILED = (  # one of each formula that Inductor writes
    "uniform torch.float32",
    "uniform torch.bfloat16",
    "bits torch.int64",
    "bits torch.uint8",
    "dropout",
    "normal torch.float32",
    "normal torch.float64",
    "exponential torch.float32",
    "gumbel torch.float32",
    "truncated_normal",
)
GROUPS = {"exact": EXACT, "rounded": ROUNDED, "composed": COMPOSED}


def every(key: torch.Tensor, w: torch.Tensor, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Draws of some kinds, each from a key of its own."""
    keys = random.split(key, len(names))
    return {name: ALL[name](keys[i], w) for i, name in enumerate(names)}


def _weights() -> torch.Tensor:
    return torch.linspace(0.5, 3, N * M, dtype=torch.float64).view(N, M)


def ulps(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, in units in the last place of the wanted number."""
    wide = wanted.double()
    spacing = wide.abs().clamp_min(torch.finfo(wanted.dtype).tiny).log2().floor()
    unit = torch.exp2(spacing) * torch.finfo(wanted.dtype).eps
    return float(((got.double() - wide).abs() / unit).max())


def _assert_same(
    got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], backend: str
) -> None:
    """Equal, to the rounding of functions that compiled code computes by another library."""
    rounded = 8 if backend == "inductor" else 2
    assert got.keys() == wanted.keys()
    for name, x in got.items():
        if name in EXACT:
            assert torch.equal(x, wanted[name]), name
        else:
            most = rounded if name in ROUNDED else 16
            assert ulps(x, wanted[name]) <= most, name


def _on_ranks(names: tuple[str, ...], backend: str) -> dict[str, torch.Tensor]:
    mesh = sf.make_mesh((2,), ("dp",))
    fn = lambda key, w: every(key, w, names)
    draw = sf.shard(fn, mesh, (P(), P("dp")), backend=backend)
    return {name: sf.full(x) for name, x in draw(KEY, _weights()).items()}


def _draws_are_those_of_one_device(names: tuple[str, ...], backend: str) -> None:
    wanted = every(KEY, _weights(), names)
    for got in run_ranks(2, _on_ranks, names, backend):
        _assert_same(got, wanted, backend)


@pytest.mark.parametrize("group", GROUPS)
def test_two_processes_draw_what_one_device_draws(group: str) -> None:
    _draws_are_those_of_one_device(tuple(GROUPS[group]), "aten")


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_draws_of_two_processes_are_those_of_one_device(name: str) -> None:
    _draws_are_those_of_one_device((name,), "inductor")


def _state_on_ranks() -> list[torch.Tensor]:
    """torch's own random calls, in a step that both ranks run twice."""
    mesh = sf.make_mesh((2,), ("dp",))
    random.state.seed(8)
    step = sf.shard(_noisy, mesh, (P("dp"),))
    return [sf.full(step(_weights())) for _ in range(2)]


def _noisy(x: torch.Tensor) -> torch.Tensor:
    return torch.dropout(x, 0.4, True) + torch.rand_like(x)


def test_calls_of_torch_on_two_processes_are_those_of_one_device() -> None:
    random.state.seed(8)
    with random.plain():
        wanted = [_noisy(_weights()) for _ in range(2)]
    for got in run_ranks(2, _state_on_ranks):
        for a, b in zip(got, wanted, strict=True):
            assert_close(a, b, rtol=1e-15, atol=0)
