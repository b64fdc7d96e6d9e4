"""The registry of users' rules. The last rule of an op applies, before any table."""

from __future__ import annotations

from typing import Any

import attrs

from .strategy import Rule


@attrs.frozen(eq=False)
class Registered:
    """One registration."""

    op: Any
    rule: Rule


_rules: dict[Any, list[Registered]] = {}


def add(entry: Registered) -> None:
    """Register a rule for its op."""
    _rules[entry.op] = [*_rules.get(entry.op, ()), entry]


def remove(entry: Registered) -> None:
    """Unregister a rule. The one before it applies again. Does nothing the second time."""
    left = [other for other in _rules.get(entry.op, ()) if other is not entry]
    if left:
        _rules[entry.op] = left
    else:
        _rules.pop(entry.op, None)


def active() -> tuple[Registered, ...]:
    """The active rules, as a key of partitioned programs."""
    return tuple(entries[-1] for entries in list(_rules.values()))


def find(op: object) -> Rule | None:
    """The registered rule of an op."""
    return _rules[op][-1].rule if op in _rules else None


def ops() -> frozenset[Any]:
    """The ops with a registered rule."""
    return frozenset(_rules)


def clear() -> None:
    """Forget every registration."""
    _rules.clear()
