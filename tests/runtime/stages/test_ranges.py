"""A profile of torch.profiler shows calls, lines, modules and collectives of a program."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.profiler import ProfilerActivity, profile

import shardfn as sf
from shardfn import P

HERE = Path(__file__).name


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(x))


def ranges_of(run: Any) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run()
    events = sorted(found.events(), key=lambda x: x.time_range.start)
    return [x.name.removeprefix("shardfn: ") for x in events if x.name.startswith("shardfn: ")]


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_a_profile_names_the_call_and_with_aten_its_lines_and_modules(backend: str) -> None:
    net, x = Net(), torch.randn(2, 3)
    step = sf.jit(lambda x: net(x).sum(), backend=backend)
    wanted = step(x)
    names = ranges_of(lambda: step(x))
    assert "call of jit(<lambda>)" in names
    lines = [name for name in names if name.startswith("up (") or HERE in name]
    assert bool(lines) == (backend == "aten")
    assert not lines or any(name.startswith("up (") for name in lines)
    torch.testing.assert_close(step(x), wanted, rtol=0, atol=0)


def test_a_loop_names_the_lines_of_each_turn() -> None:
    def run(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return sf.scan(lambda h, w: (torch.tanh(h @ w), None), x, w)[0]

    w, x = torch.randn(4, 3, 3), torch.randn(2, 3)
    step = sf.jit(run, backend="aten")
    wanted = step(w, x)
    found: list[torch.Tensor] = []
    names = Counter(ranges_of(lambda: found.append(step(w, x))))
    assert max(n for name, n in names.items() if HERE in name) >= 4
    torch.testing.assert_close(found[0], wanted, rtol=0, atol=0)


def _named(backend: str) -> tuple[list[str], bool]:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w).square().sum()

    mesh = sf.make_mesh((2,), ("dp",))
    torch.manual_seed(0)
    w, x = torch.randn(4, 6), torch.randn(2, 4)
    step = sf.shard(sf.value_and_grad(loss), mesh, (P("dp"), P("dp")), backend=backend)
    wanted = sf.full(step(w, x))
    found: list[Any] = []
    names = ranges_of(lambda: found.append(sf.full(step(w, x))))
    return names, all(torch.equal(a, b) for a, b in zip(found[0], wanted, strict=True))


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_real_ranks_name_each_collective_and_the_wait_for_it(backend: str) -> None:
    for names, is_same in run_ranks(2, _named, backend):
        assert is_same
        sent = [x for x in names if " over dp" in x and not x.startswith("wait for")]
        waits = [x.removeprefix("wait for ") for x in names if x.startswith("wait for ")]
        assert sorted(sent) == sorted(waits)
        assert {x.split(" ")[0] for x in sent} >= {"all_gather", "reduce_scatter"}
        assert any(HERE in x for x in sent)
