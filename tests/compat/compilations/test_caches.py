"""torch's caches have bounds, and its settings leave nothing in the context of a thread."""

from __future__ import annotations

import contextvars
import linecache

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import graph_module

import shardfn as sf
from shardfn._compat.compilations import caches
from shardfn._compat.fakes import answers


def _captured(rows: int) -> None:
    sf.jit(lambda x: (x * 2).sum(), backend="aten")(torch.ones(rows))


def test_answers_of_fake_tensors_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_ANSWERS", {})  # else torch is not asked
    FakeTensorMode.cache_clear()
    _captured(3)
    assert len(FakeTensorMode.cache) > 1
    monkeypatch.setattr(caches, "ANSWERS", len(FakeTensorMode.cache))
    for rows in range(50, 55):
        _captured(rows)
        assert len(FakeTensorMode.cache) <= caches.ANSWERS


def test_the_oldest_code_of_graphs_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = {f"<graph {k}>": "x" * 10 for k in range(5)}
    monkeypatch.setattr(graph_module._loader, "eval_cache", codes)
    monkeypatch.setattr(caches, "CHARACTERS", 25)
    monkeypatch.setattr(caches, "FEW", 9)
    monkeypatch.setitem(linecache.cache, "<graph 0>", ("",))
    with caches.bounded():
        pass
    assert len(codes) == 5
    monkeypatch.setattr(caches, "FEW", 1)
    with caches.bounded():
        pass
    assert [*codes] == ["<graph 3>", "<graph 4>"]
    assert "<graph 0>" not in linecache.cache


def test_settings_are_changed_nested_and_leave_one_variable() -> None:
    config = torch._dynamo.config
    before = config.allow_rnn
    change = lambda: caches.settings(config, allow_rnn=not before, no_such_name=1)
    with change():
        known = len(contextvars.copy_context())
    for _ in range(5):
        with change(), change():
            assert config.allow_rnn is not before
        assert config.allow_rnn is before
    assert len(contextvars.copy_context()) == known
