"""Rules of a plan: what a pattern matches, which rule counts, and what is no plan."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P
from shardfn.plans.leaves import Leaf
from shardfn.plans.rules import (
    Choice,
    Reader,
    Rule,
    is_of_styles,
    notes_of,
    of_base_model,
    rules_of,
    winner,
)


def leaf(*names: str, shape: tuple[int, ...] = (4, 6)) -> Leaf:
    return Leaf(names[0], shape, torch.float32, names)


def test_a_pattern_matches_full_paths_and_every_name_of_a_tied_parameter() -> None:
    rule = Rule("*.weight", P("tp"))
    assert rule.matches("a.weight") and not rule.matches("a.b.weight")
    assert Rule("**.weight", P()).matches("a.b.weight")
    assert rule.way_to(leaf("x.y.z", "a.weight")) == ("a.weight", False)
    assert Rule(re.compile(r"a\d+\.w"), P()).matches("a12.w")


def test_a_style_may_name_the_module_that_holds_the_parameter() -> None:
    style = Rule("layers.*.q", "colwise")
    assert style.way_to(leaf("layers.0.q.weight")) == ("layers.0.q.weight", True)
    assert Rule("layers.*.q", P()).way_to(leaf("layers.0.q.weight")) is None


def test_a_rule_of_the_base_model_stands_under_its_name() -> None:
    rule = Rule("w", "colwise", under="model")
    assert rule.matches("model.w") and not rule.matches("w")
    (moved,) = of_base_model(
        [Rule("h.*.q", "colwise")], [leaf("transformer.h.0.q.weight"), leaf("head.weight")]
    )
    assert moved.under == "transformer"


def test_a_plan_that_fits_in_two_places_is_refused() -> None:
    leaves = [leaf("a.h.0.q.weight"), leaf("b.h.0.q.weight")]
    with pytest.raises(sf.TreeError, match="its names stand in a, b"):
        of_base_model([Rule("h.*.q", "colwise")], leaves)


def test_the_first_choice_counts_unless_a_style_names_the_parameter_itself() -> None:
    module = Choice(Rule("q", "colwise"), 1, of_module=True)
    closer = Choice(Rule("q.weight", "rowwise"), 2, of_module=False)
    placed = Choice(Rule("q.weight", P()), 3, of_module=False)
    assert winner([module, closer]) is closer
    assert winner([module, placed]) is module
    assert winner([placed, closer]) is placed


def test_a_style_places_a_layer_by_its_class() -> None:
    reader = Reader("tp", {"q": torch.nn.Linear}, frozenset({"q.weight", "q.bias"}))
    rule = Rule("q", "colwise")
    weight, bias = (
        reader.choice(rule, leaf("q.weight")),
        reader.choice(rule, leaf("q.bias", shape=(4,))),
    )
    assert weight.spec == P("tp")
    assert bias.spec == P("tp")
    assert reader.choice(rule, leaf("k.weight")) is None


WRONG: list[tuple[Any, str]] = [
    ([1], "placements, plan: a list"),
    ({3: P()}, "3 is not a pattern"),
    ({"w": 5}, "'w': 5 is not a placement"),
    ({"w": "colwize"}, "the style 'colwize' has no reading as placements of parameters; near it: "),
]


@pytest.mark.parametrize(("plan", "text"), WRONG, ids=str)
def test_what_is_no_plan_is_refused(plan: Any, text: str) -> None:
    with pytest.raises(sf.ShardError) as caught:
        rules_of(plan)
    assert text in str(caught.value)


def test_notes_name_the_rules_that_gave_nothing() -> None:
    used, unused = Rule("a", P(), under=""), Rule("b", P())
    assert notes_of([used, unused], {used}) == ["names no parameter here: 'b'"]
    assert is_of_styles([used, Rule("c", "colwise")]) and not is_of_styles([used])
