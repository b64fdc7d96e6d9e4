"""Keys that are used twice outside of captured functions, under SHARDFN_CHECK=1."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn.random.used import note_use


@pytest.fixture(autouse=True)
def _checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDFN_CHECK", "1")


def test_a_second_use_is_refused_with_both_lines() -> None:
    key = torch.tensor([7, 0])
    note_use("random.split", key)
    with pytest.raises(sf.ShardError) as caught:
        note_use("random.normal", key)
    text = str(caught.value)
    assert text.startswith(f"random.normal: a key is used twice: at {__file__}:")
    assert text.count(__file__) >= 2 and caught.value.arg_path == "key"
    assert "first, second = sf.random.split(key)" in text


def test_views_of_one_row_are_one_key_and_other_rows_are_others() -> None:
    keys = torch.tensor([[7, 0], [8, 0]])
    note_use("f", keys[0])
    note_use("f", keys[1])
    with pytest.raises(sf.ShardError, match="a key is used twice"):
        note_use("f", keys[0])


def test_a_key_that_was_written_to_is_a_new_one() -> None:
    key = torch.tensor([7, 0])
    note_use("f", key)
    key.add_(1)
    note_use("f", key)


def test_equal_keys_are_told_by_identity_and_nothing_is_noted_unasked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    note_use("f", torch.tensor([7, 0]))
    note_use("f", torch.tensor([7, 0]))
    monkeypatch.delenv("SHARDFN_CHECK")
    key = torch.tensor([7, 0])
    note_use("f", key)
    note_use("f", key)
