"""Keys that calls of a program use, noted under SHARDFN_CHECK=1."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.random import uniform
from shardfn.runtime.key_use import keys_noted
from shardfn.runtime.options import Request
from tests.support.stages.plans import program_of

KEY, X = torch.tensor([7, 0]), torch.ones(3)
REQUEST = Request("f", print, print)
PLACED: Any = SimpleNamespace(tensors=(0, 1))


def captured(fn: Any) -> Any:
    return SimpleNamespace(program=program_of(fn, KEY, X), closed_over=())


def run(leaves: list[Any]) -> str:
    return "ran"


def test_without_the_setting_a_run_is_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDFN_CHECK", raising=False)
    draws = captured(lambda key, x: [x + uniform(key, (3,))])
    assert keys_noted(run, REQUEST, PLACED, draws) is run


def test_a_key_of_an_earlier_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDFN_CHECK", "1")
    draws = captured(lambda key, x: [x + uniform(key, (3,))])
    noted = keys_noted(run, REQUEST, PLACED, draws)
    key = torch.tensor([9, 0])
    assert noted([key, X]) == "ran"
    with pytest.raises(sf.ShardError, match="f: a key is used twice"):
        noted([key, X])
    assert noted([torch.tensor([9, 0]), X]) == "ran", "another key of equal words"


def test_a_program_that_draws_nothing_notes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDFN_CHECK", "1")
    assert keys_noted(run, REQUEST, PLACED, captured(lambda key, x: [x + 1])) is run
