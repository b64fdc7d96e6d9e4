"""Constants that a function stores in attributes: stored once, or taken back."""

from __future__ import annotations

from types import SimpleNamespace

from shardfn._compat.dynamo.restored import SIDE_EFFECTS, Memo

EFFECTS = RuntimeError(f"... {SIDE_EFFECTS} ...")


def test_writes_are_done_if_they_are_the_only_reason_of_a_refusal() -> None:
    owner = SimpleNamespace(k=None, other=1)
    memo = Memo()
    memo.note(owner, {"k": 3})
    assert not memo.write(RuntimeError("something else")) and owner.k is None
    assert memo.write(EFFECTS) and owner.k == 3
    memo.undo()
    assert owner.k is None and owner.other == 1


def test_a_function_that_writes_more_than_constants_is_not_excused() -> None:
    owner = SimpleNamespace(k=None)
    memo = Memo()
    assert not memo.write(EFFECTS), "it stored nothing"
    memo.note(owner, {"k": 3})
    memo.is_all = False
    assert not memo.write(EFFECTS) and owner.k is None


def test_the_last_write_to_an_attribute_counts_and_one_that_stays_is_a_read() -> None:
    owner = SimpleNamespace(k=None)
    memo = Memo()
    memo.note(owner, {"k": 3})
    memo.note(owner, {"k": 4})
    memo.note_read(owner, ["k"])
    assert memo.write(EFFECTS) and owner.k == 4
    assert [read.path[-1] for read in memo.reads] == [("attr", "k")]
