"""Patterns and parameters without a counterpart, with names that are near."""

from __future__ import annotations

import re

import torch

from shardfn import P
from shardfn.plans.leaves import Leaf
from shardfn.plans.mismatches import gaps, unmatched, unreachable
from shardfn.plans.rules import Choice, Rule


def leaf(path: str) -> Leaf:
    return Leaf(path, (4,), torch.float32, (path,))


LEAVES = [leaf("layers.0.weight"), leaf("layers.1.weight"), leaf("head.bias")]


def test_a_pattern_that_is_too_narrow_says_the_wider_one() -> None:
    (line,) = unmatched([Rule("*.weight", P())], set(), LEAVES)
    assert line == (
        "'*.weight' matches nothing; * stays within one name; '**.weight' matches layers.0.weight"
    )


def test_an_expression_has_to_match_the_full_path() -> None:
    (line,) = unmatched([Rule(re.compile("weight"), P())], set(), LEAVES)
    assert "a regular expression has to match a full path, such as layers.0.weight" in line


def test_a_misspelt_name_says_what_is_near() -> None:
    (line,) = unmatched([Rule("heads.bias", P())], set(), LEAVES)
    assert line.startswith("'heads.bias' matches nothing; near it: head.bias")


def test_names_of_a_model_plan_that_this_model_lacks_are_fine() -> None:
    used, other = Rule("q", "colwise"), Rule("gate", "rowwise")
    assert unmatched([used, other], {used}, LEAVES) == []
    assert len(unmatched([other], set(), LEAVES)) == 1


def test_a_rule_behind_another_never_counts() -> None:
    first, second = Rule("**", P("a")), Rule("**.weight", P("b"))
    choices = [Choice(first, P("a"), False), Choice(second, P("b"), False)]
    (line,) = unreachable({"x.weight": choices})
    assert line.startswith("'**.weight' never counts: '**' stands before it")
    alike = [choices[0], Choice(second, P("a"), False)]
    assert unreachable({"x.weight": alike}) == [], "it would change nothing"
    assert unreachable({"x.weight": choices, "y.weight": choices[1:]}) == []


def test_parameters_of_a_kind_are_one_gap() -> None:
    chosen = {x.path: [] for x in LEAVES}
    lines = gaps(chosen, [Rule("layers.*.wieght", P())])
    assert len(lines) == 2 and lines[0].startswith("nothing matches layers.*.weight; near it: ")
    assert gaps({"a": []}, []) == ["nothing matches a; the plan is empty"]
