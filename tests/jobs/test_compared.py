"""Texts of all processes, compared over a store."""

from __future__ import annotations

import pytest

import shardfn as sf
from shardfn import _compat
from shardfn.jobs import compared


def test_a_comparison_names_who_does_not_come_and_what_differs() -> None:
    store = _compat.own_store()
    with pytest.raises(sf.RendezvousError) as late:
        compared.compare("f", store, "a", (0, 3), "x", 0.05)
    assert "f: rank 0 waited 0.05 s for the others\n  missing: ranks 1, 2" in str(late.value)
    for rank, text in enumerate("xxy"):
        store.set(f"a/{rank}", text)
    with pytest.raises(sf.DivergenceError) as other:
        compared.compare("f", store, "a", (1, 3), "x", 0.05)
    differ = "f: ranks differ\n  rank 0: x\n  rank 2: y"
    assert differ in str(other.value)
    with pytest.raises(sf.DivergenceError) as same:
        compared.compare("f", store, "a", (2, 3), "y", 0.05)
    assert differ in str(same.value), "the rank that differs quotes the same"


def test_equal_texts_pass_and_each_comparison_has_its_keys() -> None:
    store = _compat.own_store()
    store.set("a/1", "x")
    compared.compare("f", store, "a", (0, 2), "x", 0.05)
    assert store.get("a/0") == b"x"
    store.set("b/1", "y")
    with pytest.raises(sf.DivergenceError, match="the same arguments on every rank"):
        compared.compare("f", store, "b", (0, 2), "x", 0.05)
