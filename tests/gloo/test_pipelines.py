"""Pipelines on real gloo processes: the bits of the simulator, and the values of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks

import shardfn as sf
from shardfn import P

LAYERS, WIDTH, ROWS, MICROBATCHES = 4, 6, 12, 3
CASES = [
    ("1f1b", {"pp": 2}),
    ("zero_bubble", {"pp": 4}),
    ("interleaved", {"dp": 2, "pp": 2}),
    ("gpipe", {"pp": 2, "tp": 2}),
]


def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = x
    for layer in params:
        h = h + torch.nn.functional.dropout(torch.tanh(h @ layer["up"]), 0.1) @ layer["down"]
    return (h + x - y).square().mean()  # x is read by the first and the last stage


def arguments() -> tuple[Any, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, dtype=torch.float64) / 3
    params = [{"up": randn(WIDTH, 8), "down": randn(8, WIDTH)} for _ in range(LAYERS)]
    return params, randn(ROWS, WIDTH), randn(ROWS, WIDTH)


def run(schedule: str, axes: dict[str, int], backend: str) -> list[torch.Tensor]:
    """The loss and the local gradients of a step, in the world of the caller."""
    size = axes["pp"]
    chunks = 2 if schedule == "interleaved" else 1
    specs = []
    for k in range(LAYERS):
        chunk, at = divmod(k * size * chunks // LAYERS, size)
        up, down = ((None, "tp"), ("tp",)) if "tp" in axes else ((), ())
        stage = sf.Stage(at, chunk=chunk)
        specs.append({"up": P(*up, pp=stage), "down": P(*down, pp=stage)})
    batch = P("dp") if "dp" in axes else None
    step = sf.shard(
        sf.pipelined_grad(loss, MICROBATCHES, schedule=schedule),
        sf.make_mesh(tuple(axes.values()), tuple(axes)),
        in_placements=(specs, batch, batch),
        backend=backend,
    )
    values = []
    for _ in range(2):
        sf.random.state.seed(5)
        value, grads = step(*arguments())
        values = [value, *(layer[name] for layer in grads for name in ("up", "down"))]
    return [x.to_local() for x in values]


@pytest.mark.parametrize(("schedule", "axes"), CASES)
def test_real_ranks_have_the_bits_of_the_simulator(schedule: str, axes: dict[str, int]) -> None:
    ranks = torch.Size(axes.values()).numel()
    real = run_ranks(ranks, run, schedule, axes, "aten")
    with sf.fake_world(ranks):
        simulated = run(schedule, axes, "aten")
    for rank, values in enumerate(real):
        for x, y in zip(values, simulated, strict=True):
            assert torch.equal(x, y.shards[rank])


def test_compiled_stages_have_the_values_of_one_device() -> None:
    real = run_ranks(2, run, "1f1b", {"pp": 2}, "inductor")
    sf.random.state.seed(5)
    value, grads = sf.accumulate(sf.value_and_grad(loss), MICROBATCHES)(*arguments())
    wanted = [value, *(layer[name] for layer in grads for name in ("up", "down"))]
    for values in real:
        for x, y in zip(values, wanted, strict=True):
            if x.numel():
                torch.testing.assert_close(x, y, rtol=0, atol=1e-10)


def other_schedules() -> str:
    """The error of ranks that run other schedules."""
    schedule = "gpipe" if torch.distributed.get_rank() == 0 else "1f1b"
    try:
        run(schedule, {"pp": 2}, "aten")
    except sf.DivergenceError as error:
        return str(error)
    return ""


def test_ranks_with_other_schedules_are_named_before_they_wait() -> None:
    for text in run_ranks(2, other_schedules):
        assert "ranks hold different programs" in text
        assert "rank 0: coordinate 0 runs F0.0 F0.1 F0.2 BW0.0" in text
        assert "rank 1: coordinate 0 runs F0.0 F0.1 BW0.0" in text
