"""A file may call ops that compute tensors, and nothing else."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

from shardfn.compile.text import ops

aten = torch.ops.aten
ALLOWED = [
    aten.add.Tensor,
    aten.copy_.default,
    aten.native_layer_norm.default,
    aten.split.Tensor,
    aten._assert_async.msg,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.wait_tensor.default,
    torch.ops.shardfn.pack.default,
    torch.ops.shardfn.random_bits.default,
    operator.getitem,
]


@pytest.mark.parametrize("op", ALLOWED, ids=str)
def test_an_op_that_computes_comes_back_by_its_name(op: Any) -> None:
    name = ops.name_of(op)
    assert name is not None and ops.op_of(name) is op


REFUSED = [
    "aten.from_file.default",
    "aten.add_.Tensor",
    "aten.save.default",
    "aten.set_.source_Storage",
    "aten.item.default",
    "aten.add",
    "aten.add.none",
    "aten.none.default",
    "shardfn.run_loop.default",
    "_c10d_functional.all_reduce_.default",
    "prim.Print.default",
    "inductor.resize_storage_bytes_.default",
    "os.system.default",
    "aten.__class__.__init__",
    "aten.add.Tensor.__call__",
    "",
    None,
    3,
    ["aten.add.Tensor"],
]


@pytest.mark.parametrize("name", REFUSED, ids=str)
def test_any_other_name_is_refused(name: Any) -> None:
    assert ops.op_of(name) is None


@pytest.mark.parametrize("target", [torch.add, len, aten.add, aten.add_.Tensor])
def test_a_target_that_a_file_may_not_call_has_no_name(target: Any) -> None:
    assert ops.name_of(target) is None


@pytest.mark.parametrize("name", ops.CHECKED)
def test_indices_of_a_file_are_checked(name: str) -> None:
    assert str(ops.op_of(name)) == ops.CHECKED[name]
