"""Garbage: not collected while programs are made, and read once, not soon after."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from shardfn._compat.compilations import garbage


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(garbage, "_pauses", garbage.Pauses())
    was, was_frozen = gc.isenabled(), gc.get_freeze_count()
    gc.unfreeze()
    gc.enable()
    yield
    (gc.enable if was else gc.disable)()
    if was_frozen:
        gc.freeze()


class Tied:
    """An object that only the collector frees."""

    def __init__(self) -> None:
        self.own = self


@pytest.mark.parametrize("was", [True, False])
def test_the_garbage_collector_is_paused_and_as_before(was: bool) -> None:
    (gc.enable if was else gc.disable)()
    with garbage.paused_gc():
        assert not gc.isenabled()
    assert gc.isenabled() is was


def test_objects_of_a_long_pause_are_not_young_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "LEAST", 10_000)
    with garbage.paused_gc():
        made: list[Any] = [[i] for i in range(50_000)]
    young = gc.get_objects(generation=0)
    assert len(young) < len(made) / 2


def test_garbage_of_many_pauses_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "LEAST", 0)
    monkeypatch.setattr(garbage, "MOST", 100_000)
    with garbage.paused_gc():
        tied = Tied()
        gone = weakref.ref(tied)
        del tied
    assert gone() is not None
    with garbage.paused_gc():
        kept = [[i] for i in range(garbage.MOST + 1)]
    assert gone() is None
    assert kept
    assert garbage._pauses.made == 0


def test_after_a_short_pause_frozen_objects_are_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: asked.append(1) or 0)
    with garbage.paused_gc():
        pass
    assert not asked


def test_what_the_user_has_frozen_stays_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "LEAST", 0)
    gc.freeze()
    try:
        with garbage.paused_gc():
            pass
        assert gc.get_freeze_count()
        monkeypatch.setattr(gc, "get_freeze_count", lambda: pytest.fail("counted again"))
        with garbage.paused_gc():
            pass
    finally:
        gc.unfreeze()


TRIALS = """
import weakref
import torch
import shardfn as sf

def trial():
    model = torch.nn.Linear(5, 3)
    sf.jit(lambda x: model(x).sum(), backend="aten")(torch.ones(2, 5))
    return weakref.ref(model.weight)

held = [trial() for _ in range(40)]
print(sum(x() is not None for x in held))
"""


def test_what_small_programs_held_is_free_soon() -> None:
    """A capture makes cycles, and the program of a model holds its parameters."""
    ran = [sys.executable, "-c", TRIALS]
    done = subprocess.run(ran, check=True, capture_output=True, text=True)
    assert int(done.stdout) < 25, "of 40"
