"""clear_cache forgets what was captured and compiled, and on request what is stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardfn as sf
from shardfn.errors import ShardError
from shardfn.runtime import cache
from shardfn.stored import own_folder
from shardfn.stored.folder import PLACE

X = torch.ones(3)


def test_the_next_call_captures_again() -> None:
    step = sf.jit(lambda x: x * 2, backend="aten")
    step(X)
    sf.clear_cache()
    assert torch.equal(step(X), X * 2) and cache.counts["captures"] == 1


def test_what_is_stored_stays_unless_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLACE, str(tmp_path))
    where = own_folder()
    assert where is not None
    where.write("a", b"text")
    sf.clear_cache()
    assert where.read("a") == b"text"
    sf.clear_cache(stored=True)
    assert where.read("a") is None
    monkeypatch.setenv(PLACE, "")
    sf.clear_cache(stored=True)


def test_a_flag_that_is_none_is_named() -> None:
    with pytest.raises(ShardError, match="clear_cache, stored: stored is 'all'"):
        sf.clear_cache(stored="all")  # type: ignore[arg-type]
