"""Ops replaced where torch runs eagerly, in this thread and outside of captures."""

from __future__ import annotations

import torch

from shardfn._compat.dispatch import aten_ops, init_replaced, ops_replaced, takes_context
from shardfn._compat.threads import capturing

aten = torch.ops.aten


def test_an_op_is_replaced_by_a_function_of_the_same_arguments() -> None:
    table = {aten.add.Tensor: lambda x, y, alpha=1: x * y * alpha}
    x = torch.tensor([2.0, 3.0])
    with ops_replaced(table, lambda kwargs: True):
        assert (x + x).tolist() == [4.0, 9.0]
        assert torch.add(x, x, alpha=2).tolist() == [8.0, 18.0]
        assert (x * 2).tolist() == [4.0, 6.0], "others are torch's"
        with capturing():
            assert (x + x).tolist() == [4.0, 6.0]
    assert (x + x).tolist() == [4.0, 6.0]


def test_ops_that_this_torch_lacks_are_left_out() -> None:
    assert aten_ops("add.Tensor", "no_such_op.default", "add.no_such_overload") == [aten.add.Tensor]


def test_truncated_numbers_are_replaced_where_they_are_ours() -> None:
    ours = lambda x, *args, **kwargs: x.fill_(7)
    x = torch.empty(2)
    with init_replaced((ours, lambda: True)):
        assert torch.nn.init.trunc_normal_(x).tolist() == [7.0, 7.0]
    with init_replaced((ours, lambda: False)):
        assert torch.nn.init.trunc_normal_(x).tolist() != [7.0, 7.0]


def test_a_function_whose_forward_takes_the_context_has_no_setup_context() -> None:
    class Old(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x

    class New(torch.autograd.Function):
        @staticmethod
        def setup_context(ctx, inputs, output): ...

    assert takes_context(Old) and not takes_context(New)
