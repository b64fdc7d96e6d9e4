"""A sample call of an op: its fake call, its true results, and ops that do not run."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn.transforms.proofs._sample import Sample, filled, mapped, tensors_of
from shardfn.types import TENSOR

aten = torch.ops.aten
X = torch.arange(6.0).view(2, 3)


def test_a_sample_knows_its_shapes_and_its_results() -> None:
    sample = Sample(aten.cat.default, ([X, X], 1), {})
    assert sample.call.shapes == ((2, 3), (2, 3)) and sample.call.out_shapes == ((2, 6),)
    assert torch.equal(sample.results[0], torch.cat([X, X], 1))
    assert sample.choices(lambda call: [((0, 0), (0,))]) == [((0, 0), (0,))]


def test_an_op_that_does_not_run_is_refused_with_its_own_words() -> None:
    with pytest.raises(sf.RuleError) as caught:
        Sample(aten.mm.default, (X, X), {})
    text = str(caught.value)
    assert text.startswith("rule(aten.mm.default), example: the op does not run: ")
    assert "torch.library.register_fake" in text


def test_tensors_are_replaced_in_order_and_all_else_stays() -> None:
    tree = ([X, 1], {"k": (X, "a")})
    assert mapped(tree, lambda x: TENSOR) == ([TENSOR, 1], {"k": (TENSOR, "a")})
    assert filled(([TENSOR, 1], {"k": TENSOR}), iter("ab")) == (["a", 1], {"k": "b"})
    assert tensors_of(X) == [X] or len(tensors_of(X)) == 1
    assert [x is X for x in tensors_of((X, None))] == [True]
