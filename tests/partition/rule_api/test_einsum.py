"""Rules as text: one strategy for each factor, and what a text cannot say."""

from __future__ import annotations

import pieces
import pytest
import torch

import shardfn as sf
from shardfn.partition.rule_api.einsum import parsed

aten = torch.ops.aten


def call(target: object, *args: object) -> object:
    return pieces.OneOp(target, args, {}).call


def test_a_factor_is_sharded_wherever_it_stands_and_partial_where_it_is_summed() -> None:
    mapping = parsed("b i k, b k j -> b i j", ())
    bmm = call(aten.bmm.default, torch.ones(2, 5, 3), torch.ones(2, 3, 7))
    assert mapping.choices(bmm) == [
        (("R", "R"), ("R",)),
        ((0, 0), (0,)),
        ((1, "R"), (1,)),
        (("R", 2), (2,)),
        ((2, 1), ("sum",)),
    ]
    assert mapping.contracted == ["k"]


def test_a_factor_that_needs_whole_rows_and_dims_of_size_one_are_not_sharded() -> None:
    mapping = parsed("i k, k 1 -> i 1", ("k",))
    mm = call(aten.mm.default, torch.ones(5, 3), torch.ones(3, 1))
    assert mapping.choices(mm) == [(("R", "R"), ("R",)), ((0, "R"), (0,))]
    assert mapping.contracted == []


def test_leading_dims_are_counted_from_the_right() -> None:
    mapping = parsed("... i, ... i -> ... i", ())
    add = call(aten.add.Tensor, torch.ones(2, 5, 3), torch.ones(5, 3))
    assert mapping.choices(add)[1:] == [((0, "R"), (0,)), ((1, 0), (1,)), ((2, 1), (2,))]


def test_a_list_of_tensors_is_one_input() -> None:
    mapping = parsed("i j -> i j", ())
    cat = call(aten.cat.default, [torch.ones(5, 3), torch.ones(5, 3)], 1)
    with pytest.raises(sf.RuleError, match="factor j has two sizes: 3 in input 0"):
        mapping.choices(cat)


def test_every_mismatch_of_a_call_is_named() -> None:
    mapping = parsed("i k, k j -> i j", ())
    add = call(aten.add.Tensor, torch.ones(5, 3, 2), torch.ones(3, 2))
    with pytest.raises(sf.RuleError) as caught:
        mapping.choices(add)
    text = str(caught.value)
    assert "input 0 has 3 dims, shape (5, 3, 2); the rule names 'i k'" in text
    assert "result 0 has 3 dims, shape (5, 3, 2); the rule names 'i j'" in text


def test_an_op_with_other_tensors_is_a_stranger() -> None:
    assert parsed("i j -> i j", ()).strangers(aten.mm.default) == [
        "the rule names 1 inputs, but the op takes 2 tensor arguments"
    ]
    assert parsed("i -> i, i", ()).strangers(aten.relu.default) == [
        "the rule names 2 results, but the op returns 1"
    ]


UNREADABLE = {
    "i j": "the rule must have exactly one arrow (->) between inputs and results",
    "i -> i -> i": "the rule must have exactly one arrow (->) between inputs and results",
    "2 -> 2": "input '2': '2' is not a name",
    "i i -> i": "input 'i i': it names i twice",
    "i ... -> i": "input 'i ...': ... stands for leading dims and must come first",
    "i -> j": "the dim name j is in a result of the rule, but in none of its inputs",
}


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_text_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        parsed(text, ())
    assert UNREADABLE[text] in caught.value.args


def test_all_problems_of_a_text_are_listed_once() -> None:
    with pytest.raises(ValueError) as caught:
        parsed("i i, 3 -> j", ("z",))
    assert caught.value.args == (
        "input 'i i': it names i twice",
        "input '3': '3' is not a name",
        "the dim name j is in a result of the rule, but in none of its inputs",
        "need_whole names z, which is not a dim name in the rule",
    )
