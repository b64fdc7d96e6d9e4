"""Errors for patterns without a parameter and parameters without a pattern, with similar names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set

from ...patterns import compiled, general, near, parent
from ...placement_table import Leaf
from .rules import Choice, Rule, winner


def unmatched(rules: Sequence[Rule], used: Set[Rule], leaves: Sequence[Leaf]) -> list[str]:
    """A line for each rule that matches nothing, with names that are near. Names of Hugging Face
    count together: their plans name layers that only some configurations have.
    """
    is_of_model = any(isinstance(rule.value, str) for rule in used)
    return [
        f"{rule} matches nothing; {_hint(rule, leaves)}"
        for rule in rules
        if rule not in used and not (is_of_model and isinstance(rule.value, str))
    ]


def _hint(rule: Rule, leaves: Sequence[Leaf]) -> str:
    """A suggestion for a pattern that matches nothing."""
    paths = [name for leaf in leaves for name in leaf.names]
    for path in paths:
        if looser := _looser(rule, path):
            return looser
    names = [general(path) for path in paths]
    if rule.is_style:
        names = [*map(parent, names), *names]
    text = rule.key if isinstance(rule.key, str) else rule.key.pattern
    return f"near it: {', '.join(near(text, names))}"


def _looser(rule: Rule, path: str) -> str | None:
    """A suggestion, where a looser pattern would match a path."""
    if isinstance(rule.key, re.Pattern):
        if rule.key.search(path) is None:
            return None
        return f"a regular expression must match a full path, such as {path}"
    loose = rule.key.replace("**", "*").replace("*", "**")
    if loose == rule.key or compiled(loose).fullmatch(path) is None:
        return None
    return f"* matches within one name only; {loose!r} matches {path}"


def unreachable(chosen: Mapping[str, Sequence[Choice]]) -> list[str]:
    """A line for each rule that never counts, since earlier ones give all that it matches
    another placement.
    """
    wins = {winner(choices).rule for choices in chosen.values() if choices}
    lines: dict[Rule, str] = {}
    for path, choices in chosen.items():
        for i, choice in enumerate(choices):
            taker = winner(choices)
            is_earlier = any(taker is before for before in choices[:i])
            if choice.rule in wins or choice.rule in lines or not is_earlier:
                continue
            if choice.spec != taker.spec:
                lines[choice.rule] = (
                    f"{choice.rule} has no effect: {taker.rule} comes first and matches the "
                    f"same parameters; {path} is {taker.spec!r} there, but {choice.spec!r} here"
                )
    return list(lines.values())


def gaps(chosen: Mapping[str, Sequence[Choice]], rules: Sequence[Rule]) -> list[str]:
    """A line for each kind of parameter that nothing matches, with patterns that are near."""
    lost = [path for path, choices in chosen.items() if not choices]
    kinds = {general(path): path for path in reversed(lost)}
    return [
        f"nothing matches {kind}; {_pattern_hint(path, rules)}"
        for kind, path in reversed(kinds.items())
    ]


def _pattern_hint(path: str, rules: Sequence[Rule]) -> str:
    """A suggestion for a parameter that no pattern matches."""
    if not rules:
        return "the plan is empty"
    looser = (_looser(rule, path) for rule in rules)
    found = next((hint for hint in looser if hint), None)
    return found or f"near it: {', '.join(near(path, map(str, rules)))}"
