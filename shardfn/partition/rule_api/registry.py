"""The registry of users' rules. The last rule of an op applies, before any table."""

from __future__ import annotations

from typing import Any

import attrs

from .strategy import Rule


@attrs.frozen(eq=False)
class Registered:
    """A rule that a user registered for an op."""

    op: Any
    rule: Rule


_rules: dict[Any, list[Registered]] = {}


def add(entry: Registered) -> None:
    """Register a user's rule."""
    _rules[entry.op] = [*_rules.get(entry.op, ()), entry]


def remove(entry: Registered) -> None:
    """Unregister a user's rule; the one before it applies again."""
    left = [other for other in _rules.get(entry.op, ()) if other is not entry]
    if left:
        _rules[entry.op] = left
    else:
        _rules.pop(entry.op, None)


def active() -> tuple[Registered, ...]:
    """Return the active user rules, as part of the key of partitioned programs."""
    return tuple(entries[-1] for entries in list(_rules.values()))


def find(op: object) -> Rule | None:
    """Return the user's rule of an op; None if there is none."""
    return _rules[op][-1].rule if op in _rules else None


def ops() -> frozenset[Any]:
    """Return the ops with a user's rule."""
    return frozenset(_rules)


def clear() -> None:
    """Forget all user rules."""
    _rules.clear()
