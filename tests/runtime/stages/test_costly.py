"""Warnings of expensive programs: once for a function, and of `shard` alone."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import shardfn as sf
from shardfn import P
from shardfn.partition import propagate
from shardfn.runtime.stages import costly
from tests.transforms.sharding.test_auto import SMALL, loss, sgd


def warned(*functions: Any) -> int:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for fn in functions:
            fn.lower(*SMALL)
    return len(seen)


def test_a_function_is_warned_of_once() -> None:
    with sf.fake_world(8, numerics=False):
        mesh = sf.make_mesh((8,), ("dp",))
        step = sgd(loss)
        first = sf.shard(step, mesh, P())
        assert warned(first, first, sf.shard(step, mesh, P())) == 1
        assert warned(sf.shard(sgd(loss), mesh, P()), sf.jit(step)) == 1


def test_a_plan_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[Any] = []
    monkeypatch.setattr(costly, "propagate", lambda *args: placed.append(args) or propagate(*args))
    with sf.fake_world(8, numerics=False):
        mesh = sf.make_mesh((8,), ("dp",))
        step = sf.shard(sgd(loss), mesh, P())
        assert warned(step) == 1
        tried = len(placed)
        assert tried > 0
        assert warned(step, step) == 0
        assert len(placed) == tried
