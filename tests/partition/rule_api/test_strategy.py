"""The call that a sharding rule is asked about: its arguments by name, and shared strategies."""

from __future__ import annotations

import pieces
import pytest
import torch

from shardfn.partition.rule_api.strategy import replicated, together

aten = torch.ops.aten
X = torch.ones(5, 3)


def test_an_argument_is_found_by_name_wherever_it_is_passed() -> None:
    call = pieces.OneOp(aten.sum.dim_IntList, (X, [1]), {"keepdim": True}).call
    assert (call["dim"], call["keepdim"], call["dtype"]) == ([1], True, None)
    assert call.arg(1, "dim") == [1] and call.arg(2, "keepdim", False) is True
    assert call.arg(3, "dtype", "none") == "none"


def test_a_tensor_argument_is_its_fake_value() -> None:
    call = pieces.OneOp(aten.mm.default, (X, torch.ones(3, 2)), {}).call
    assert call["mat2"].shape == (3, 2)
    assert (call.shapes, call.out_shapes) == (((5, 3), (3, 2)), ((5, 2),))


def test_an_unknown_argument_is_refused_with_those_that_exist() -> None:
    call = pieces.OneOp(aten.mm.default, (X, torch.ones(3, 2)), {}).call
    with pytest.raises(KeyError) as caught:
        call["other"]
    (text,) = caught.value.args
    assert text == "aten.mm.default has no argument 'other', only self, mat2"


def test_strategies_that_every_op_of_a_kind_has() -> None:
    call = pieces.OneOp(aten.add.Tensor, (X, X), {}).call
    assert replicated(call) == (("R", "R"), ("R",))
    assert together(call, [1, 0]) == [((1, 1), (1,)), ((0, 0), (0,))]
