"""Rules of users: the last registration of an op counts, until it is removed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardfn.partition.rule_api import registry
from shardfn.partition.rule_api.registry import Registered


@pytest.fixture(autouse=True)
def _others_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_rules", {})
    yield


def rule(name: str) -> Registered:
    return Registered(name, lambda call: [])


def test_the_last_rule_counts_and_removing_it_brings_back_the_one_before() -> None:
    first, second = rule("op"), rule("op")
    registry.add(first)
    registry.add(second)
    assert registry.find("op") is second.rule
    registry.remove(second)
    assert registry.find("op") is first.rule
    registry.remove(first)
    assert registry.find("op") is None and registry.ops() == frozenset()


def test_an_earlier_rule_can_be_removed_and_removing_twice_does_nothing() -> None:
    first, second = rule("op"), rule("op")
    registry.add(first)
    registry.add(second)
    for _ in range(2):
        registry.remove(first)
    assert registry.active() == (second,)


def test_the_active_rules_are_a_key() -> None:
    a, b = rule("a"), rule("b")
    registry.add(a)
    before = registry.active()
    registry.add(b)
    assert registry.active() == (a, b)
    registry.remove(b)
    assert registry.active() == before and hash(before) == hash(registry.active())


def test_clear_forgets_all() -> None:
    registry.add(rule("a"))
    registry.clear()
    assert registry.active() == ()
