"""Tensor subclasses that a captured function may not return or hold."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn import _compat
from shardfn.capture.refusals import tensor_classes as refusals
from tests.compat.dynamo.test_shells import Scaled
from tests.compat.dynamo.test_tensor_classes import Reading

X = torch.ones(2)


def test_plain_results_and_tensors_that_say_what_they_hold_pass() -> None:
    refusals.refuse_results({"a": X, "b": [Scaled(X, X, None), 3]}, "f")


def test_a_result_of_a_foreign_class_is_refused_by_its_path() -> None:
    with pytest.raises(sf.CaptureError) as caught:
        refusals.refuse_results({"a": X, "b": [X.as_subclass(Reading)]}, "f")
    text = str(caught.value)
    assert text.startswith("f, result['b'][0]: a Reading\n")
    assert "x.as_subclass(torch.Tensor)" in text
    assert caught.value.arg_path == "result['b'][0]"


def test_a_dtensor_is_told_how_values_are_placed_inside() -> None:
    error = refusals.refused("f", refusals.DTENSOR, "model.py:7")
    assert "in_placements, out_placements and sf.constrain" in str(error)
    assert error.source == "model.py:7"


def test_a_tensor_in_the_context_is_not_held() -> None:
    refusals.refuse_told([Scaled(X, X, {"n": 3})], "f")
    with pytest.raises(sf.CaptureError) as caught:
        refusals.refuse_told([Scaled(X, X, {"t": X})], "f")
    assert "f, result[0]: a Scaled, which tells a tensor and does not hold it" in str(caught.value)


def test_a_constant_without_a_value_has_leaked() -> None:
    refusals.refuse_fakes([X], "f")
    with pytest.raises(sf.CaptureError, match="f, a tensor that it holds"):
        refusals.refuse_fakes([_compat.FakeTensorMode().from_tensor(X)], "f")


def test_an_op_that_communicates_by_itself_is_refused_by_name() -> None:
    with sf.fake_world(2), pytest.raises(sf.CaptureError) as caught:
        group = sf.make_mesh((2,), ("tp",)).get_group().group_name
        fused = torch.ops.symm_mem.fused_all_gather_matmul
        sf.jit(lambda x: fused(x, [x], 0, group)[0])(torch.ones(2, 2))
    text = str(caught.value)
    assert "it calls symm_mem.fused_all_gather_matmul, which communicates" in text
    assert "all_gather_into_tensor" in text
    assert "test_tensor_classes.py" in text
