"""Tensor subclasses that a captured function may not return or hold."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn.capture.refusals import tensor_subclasses as refusals


def test_a_dtensor_is_told_how_values_are_placed_inside() -> None:
    error = refusals.subclass_error("f", refusals.DTENSOR, "model.py:7")
    assert "in_placements, out_placements and sf.constrain" in str(error)
    assert error.source == "model.py:7"


def test_an_op_that_communicates_by_itself_is_refused_by_name() -> None:
    with sf.fake_world(2), pytest.raises(sf.CaptureError) as caught:
        group = sf.make_mesh((2,), ("tp",)).get_group().group_name
        fused = torch.ops.symm_mem.fused_all_gather_matmul
        sf.jit(lambda x: fused(x, [x], 0, group)[0])(torch.ones(2, 2))
    text = str(caught.value)
    assert "the function calls symm_mem.fused_all_gather_matmul, which runs" in text
    assert "all_gather_into_tensor" in text
    assert "test_tensor_subclasses.py" in text
