"""The strategies of a rule, checked: what a rule may answer, and how a wrong answer is named."""

from __future__ import annotations

from typing import Any

import pieces
import pytest
import torch

import shardfn as sf
from shardfn.errors import ShardError
from shardfn.partition.rule_api.check_strategies import strategies_of

OP = pieces.OneOp(torch.ops.aten.mm.default, (torch.ones(5, 3), torch.ones(3, 2)), {})
OP.node.meta["source"] = "model.py:7"


def ask(rule: Any) -> Any:
    return strategies_of(rule, OP.call, "step", OP.node)


def test_without_a_rule_all_is_replicated() -> None:
    assert ask(None) == [(("R", "R"), ("R",))]


def test_equal_strategies_count_once_in_their_order() -> None:
    a, b = ((0, "R"), (0,)), ((1, 0), ("sum",))
    assert ask(lambda call: [b, a, b]) == [b, a]


WRONG = {
    "it gives no strategy": [],
    "the rule returns 1 placements for arguments and 1 for results, but the call has 2 and 1: "
    "((0,), (0,))": [((0,), (0,))],
    "the rule returns placements that do not fit [(5, 3), (3, 2)] -> [(5, 2)]: ((2, 'R'), (0,))": [
        ((2, "R"), (0,))
    ],
    "the rule returns placements that do not fit [(5, 3), (3, 2)] -> [(5, 2)]: "
    "(('S', 'R'), (0,))": [(("S", "R"), (0,))],
    "the rule returns placements that do not fit [(5, 3), (3, 2)] -> [(5, 2)]: ((-1, 'R'), (0,))": [
        ((-1, "R"), (0,))
    ],
}


@pytest.mark.parametrize("cause", WRONG)
def test_a_wrong_answer_is_refused_with_cause_op_and_line(cause: str) -> None:
    with pytest.raises(sf.RuleError) as caught:
        ask(lambda call: WRONG[cause])
    text = str(caught.value)
    assert text.startswith("step, op aten.mm.default: its rule ")
    assert f"fails: {cause}\n  schema aten::mm(" in text
    assert caught.value.source == "model.py:7"


def test_a_rule_that_raises_is_named_and_its_error_is_the_cause() -> None:
    def broken(call: Any) -> Any:
        raise ZeroDivisionError("by nought")

    with pytest.raises(sf.RuleError) as caught:
        ask(broken)
    assert "broken fails: it raises ZeroDivisionError: by nought" in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_error_of_ours_passes_as_it_is() -> None:
    error = ShardError("as it is")

    def refusing(call: Any) -> Any:
        raise error

    with pytest.raises(ShardError) as caught:
        ask(refusing)
    assert caught.value is error
