"""torch's settings as one tuple: each that changes a program changes it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch

from shardfn._compat.settings import SETTINGS, settings, without_autocast


@contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


CHANGES: dict[str, Callable[[], AbstractContextManager]] = {
    "a default dtype": default_dtype,
    "determinism": deterministic,
    "autocast": lambda: torch.autocast("cpu"),
    "autocast to another dtype": lambda: torch.autocast("cpu", torch.float16),
    "a default device": lambda: torch.device("meta"),
    "attention": lambda: torch.nn.attention.sdpa_kernel(
        torch.nn.attention.SDPBackend.MATH
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_is_another_tuple_and_the_old_one_comes_back(name: str) -> None:
    before = settings()
    with CHANGES[name]():
        assert settings() != before
    assert settings() == before and len(before) == len(SETTINGS)


def test_what_is_on_counts_in_full() -> None:
    with torch.autocast("cpu"):
        one = settings()
    with torch.autocast("cpu", torch.float16):
        two = settings()
    assert one != two
    with torch.device("meta"):
        meta = settings()
    with torch.device("cpu"):
        assert settings() != meta


def test_a_program_that_has_its_casts_runs_without_autocast() -> None:
    x = torch.ones(2, 2)
    run = lambda leaves: x @ x
    assert without_autocast(run, settings()) is run
    with torch.autocast("cpu"):
        assert run([]).dtype == torch.bfloat16
        assert without_autocast(run, settings())([]).dtype == torch.float32
