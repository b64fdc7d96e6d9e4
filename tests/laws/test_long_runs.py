"""Memory, threads and open files stay as they are over many calls, functions and shapes: a
sample of `make long-runs`.
"""

from __future__ import annotations

import gc

import attrs
import pytest
import torch
from worlds import simulated

import shardfn as sf
from shardfn import P
from shardfn.runtime import cache, dispatch
from tests.faults.long_runs import Run, Used, run

SAMPLE = {"calls": 300, "functions": 30, "shapes": 30}


@pytest.fixture(scope="module", autouse=True)
def _only_new_objects_are_searched() -> None:
    """A look at the process collects garbage, among all that earlier tests have left."""
    gc.collect()
    gc.freeze()


@pytest.mark.parametrize("kind", SAMPLE)
def test_a_run_is_flat(kind: str) -> None:
    with simulated(dp=2) as mesh:
        row = run(kind, SAMPLE[kind], mesh, shares=(0.25,))
    assert row.is_flat, str(row)


@pytest.mark.parametrize("more", [{"memory": 140.0}, {"threads": 3}, {"files": 8}])
def test_growth_is_noticed(more: dict[str, float]) -> None:
    before = Used(memory=100.0, threads=2, files=7)
    assert Run("calls", 10, (before, before)).is_flat
    assert not Run("calls", 10, (before, attrs.evolve(before, **more))).is_flat


def test_the_programs_of_one_function_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "PROGRAMS", 3)
    monkeypatch.setattr(dispatch, "KEPT_SIGNATURES", 3)
    fn = lambda x: (x * 2).sum()
    with simulated(dp=2) as mesh:
        sharded = sf.shard(fn, mesh, (P("dp"),), backend="aten")
        for rows in range(2, 9):
            assert sf.full(sharded(torch.ones(rows))) == 2 * rows
        assert len(fn.__dict__[cache.CARRIED].programs) <= 3
        counted = cache.counts["captures"]
        assert sf.full(sharded(torch.ones(8))) == 16
        assert cache.counts["captures"] == counted
