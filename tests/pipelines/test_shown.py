"""What a function shows is shown once, by the first rank of the stage that has the values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P

PARAMS, X = [torch.eye(4), torch.eye(4)], torch.arange(32.0).view(8, 4)


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    sf.debug.print("rows {}", x.sum())
    sf.debug.print("weight {}", params[1].sum())
    h = torch.tanh(x @ params[0])
    sf.debug.print("first {}", h.sum())
    h = torch.tanh(h @ params[1])
    sf.debug.print("last {}", h.sum())

    def scanned(c: torch.Tensor, w: torch.Tensor) -> Any:
        sf.debug.print("row {}", w.sum())
        return c + w, None

    return sf.scan(scanned, h, params[1])[0].square().mean()


def shown(step: Any, places: Any, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that a step on two ranks of data and two stages shows."""
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "pp"))
        sf.shard(step, mesh, (places, P("dp")), backend="aten")(PARAMS, X)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_all_values_of_all_microbatches_are_shown(
    schedule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = [P(pp=0), P(pp=1)]
    step = sf.pipelined_grad(loss, 2, schedule=schedule)
    expected = shown(sf.accumulate(sf.value_and_grad(loss), 2), [P(), P()], capsys)
    assert len(expected) == 2 * 8
    assert sorted(shown(step, stages, capsys)) == sorted(expected)


def test_values_on_stages_without_a_pipeline_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    step = sf.value_and_grad(loss)
    expected = shown(step, [P(), P()], capsys)
    assert len(expected) == 8
    assert sorted(shown(step, [P(pp=0), P(pp=1)], capsys)) == sorted(expected)


def test_each_rank_of_the_stage_shows_what_all_ranks_show(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def told(params: Any, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(torch.tanh(x @ params[0]) @ params[1])
        sf.debug.print("last", ranks="all")
        sf.debug.print("{}", h.numel(), ranks="all")
        sf.debug.print("h {}", (h > 2).sum(), ranks="all")
        return h.mean()

    lines = shown(sf.pipelined_grad(told, 2), [P(pp=0), P(pp=1)], capsys)
    assert sorted(x for x in lines if "h " in x) == ["rank 1: h 0"] * 2 + ["rank 3: h 0"] * 2
