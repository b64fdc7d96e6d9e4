"""The look-up of a sharding rule, and the samples that prove each."""

from __future__ import annotations

import pieces
import samples
import torch

from shardfn.partition import rules
from tests.support.stages.rule_proofs import choices, family

aten = torch.ops.aten
CUDA_ONLY = {
    f"aten._scaled_dot_product_{kind}.default"
    for kind in (
        "flash_attention",
        "flash_attention_backward",
        "efficient_attention",
        "efficient_attention_backward",
        "cudnn_attention",
        "cudnn_attention_backward",
    )
}
FAMILIES = (
    rules.attention,
    rules.bags,
    rules.batch,
    rules.conv,
    rules.indexing,
    rules.matmul,
    rules.norm,
    rules.pool,
    rules.random,
    rules.reads,
    rules.reduction,
    rules.reshape,
    rules.view,
    rules.writes,
)


def test_every_op_of_the_tables_has_samples() -> None:
    assert {str(op) for op in rules.RULES} - samples.IN_TABLES.keys() == CUDA_ONLY
    assert {
        name
        for name in samples.POINTWISE
        if not rules.pointwise.is_pointwise(samples.resolve(name))
    } == set()


def test_every_sample_is_proved_by_the_test_of_one_family() -> None:
    proved = [tuple(case.values) for of in FAMILIES for case in family(of)]
    assert sorted(proved) == sorted(
        (name, k) for name, calls in samples.IN_TABLES.items() for k in range(len(calls))
    )


def test_an_op_without_a_rule_is_only_run_on_whole_values() -> None:
    op = pieces.OneOp(aten.roll.default, (torch.ones(5, 3), [1], [0]), {})
    assert rules.find(op.call.target) is None
    assert choices(op, (1,)) == [(("R",), ("R",))]
