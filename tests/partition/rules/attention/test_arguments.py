"""The attention kernels of CUDA, on fake tensors: each strategy gives the shapes that it says."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from shardfn import _compat
from shardfn.partition import Plan, emit, layout, rules
from shardfn.partition import plan as steps
from shardfn.partition.rule_api.strategy import OpCall, tensors
from shardfn.types import MeshAxes

aten = torch.ops.aten
AXES = MeshAxes(("cp",), (4,))
MODE = _compat.fake_mode()
FLASH = aten._scaled_dot_product_flash_attention.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
CUDNN = aten._scaled_dot_product_cudnn_attention.default


def made(*shape: int) -> Any:
    return torch.empty(*shape, dtype=torch.float16, device="cuda")


def calls(causal: bool) -> dict[Any, tuple[Any, ...]]:
    """The arguments of each kernel, forward and backward."""
    with MODE:
        q, k = made(2, 8, 128, 32), made(2, 8, 128, 32)
        dense = (q, k, k, 0.0, causal)
        masked = (q, k, k, None, True, 0.0, causal)
        f, e, c = FLASH(*dense), EFFICIENT(*masked), CUDNN(*masked)
    of_flash = (f[0], f[1], None, None, 128, 128, 0.0, causal, f[6], f[7])
    of_efficient = (None, *e[:4], 0.0, [True, True, True, False], causal)
    of_cudnn = (*c[:2], c[6], c[7], None, None, None, 128, 128, 0.0, causal)
    return {
        FLASH: dense,
        EFFICIENT: masked,
        CUDNN: masked,
        aten._scaled_dot_product_flash_attention_backward.default: (q, q, k, k, *of_flash),
        aten._scaled_dot_product_efficient_attention_backward.default: (q, q, k, k, *of_efficient),
        aten._scaled_dot_product_cudnn_attention_backward.default: (q, q, k, k, *of_cudnn),
    }


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("position", range(6))
def test_kernels_of_cuda_run_in_every_way(position: int, causal: bool) -> None:
    op, args = [*calls(causal).items()][position]
    graph = torch.fx.Graph()
    ins: list[Any] = []

    def holder(x: Any) -> Any:
        node = graph.placeholder(f"x{len(ins)}")
        node.meta["val"] = x
        ins.append(x)
        return node

    node = graph.call_function(op, torch.utils._pytree.tree_map_only(torch.Tensor, holder, args))
    with MODE:
        node.meta.update(val=op(*args), phase="forward", source=None)
    call = OpCall(op, node.args, {}, tuple(ins), tensors(node.meta["val"]))
    rule = rules.find(op)
    assert rule is not None
    rows = rule(call)
    assert len(rows) == 5  # replicated, batch, heads, gather, ring
    for of_ins, of_outs in rows:
        values, row = (*call.ins, *call.outs), (*of_ins, *of_outs)
        fitted = [layout.canonical(x.shape, (m,), (4,)) for x, m in zip(values, row, strict=True)]
        numbers = itertools.count()
        slot = lambda x, m, n=numbers: steps.Slot(next(n), x, m)
        slots = [slot(x, m) for x, m in zip(values, fitted, strict=True)]
        own, results = tuple(slots[: len(ins)]), tuple(slots[len(ins) :])
        with MODE:
            parts = tuple(rules.steps_of(steps.Apply(node, own, results), AXES, slot))
        plan = Plan(axes=AXES, steps=parts, ins=own, outs=results)
        emit(plan, (1,), ("group",), "cuda")
