"""The look-up of a sharding rule, and the samples that prove each."""

from __future__ import annotations

from typing import Any

import pieces
import pytest
import samples
import torch

import shardfn as sf
from shardfn import P
from shardfn.ops.placement import AFTER
from shardfn.partition import rules
from shardfn.partition.emission.graph_builder import Builder, LocalShard
from shardfn.partition.rule_api.op_record import Op
from shardfn.partition.rule_api.strategy import Choice, OpCall, replicated
from tests.support.stages.rule_proofs import choices

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


def test_every_op_of_the_tables_has_samples() -> None:
    others = {*rules.pointwise.TABLE, AFTER}
    assert {str(op) for op in rules.OPS if op not in others} - samples.IN_TABLES.keys() == CUDA_ONLY
    assert {
        name
        for name in samples.POINTWISE
        if not rules.pointwise.is_pointwise(samples.resolve(name))
    } == set()


def test_an_op_without_a_rule_is_only_run_on_whole_values() -> None:
    op = pieces.OneOp(aten.roll.default, (torch.ones(5, 3), [1], [0]), {})
    assert rules.find(op.call.target) is None
    assert choices(op, (1,)) == [(("R",), ("R",))]


@torch.library.custom_op("tests::with_row_numbers", mutates_args=())
def with_row_numbers(x: torch.Tensor) -> torch.Tensor:
    """Each row plus its number."""
    return x + torch.arange(x.shape[0], device=x.device)[:, None]


with_row_numbers.register_fake(torch.empty_like)


def test_a_new_op_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its strategies, and how a rank computes it: the number of a row depends on its place."""

    def rule(call: OpCall) -> list[Choice]:
        return [replicated(call), ((0,), (0,)), ((1,), (1,))]

    def lower(b: Builder, args: Any, kwargs: Any, pieces: list[LocalShard]) -> Any:
        own = b.call(op, args[0])
        return b.call(aten.add.Tensor, own, b.offset(pieces[0], 0))

    op = torch.ops.tests.with_row_numbers.default
    monkeypatch.setitem(rules.OPS, op, Op(rule, lower=lower))
    x = torch.arange(14.0, dtype=torch.float64).view(7, 2)
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("dp",))
        sharded = sf.shard(lambda x: with_row_numbers(x) * 2, mesh, P("dp"), backend="aten")
        assert "all_gather" not in sharded.lower(x).text()
        torch.testing.assert_close(sf.full(sharded(x)), with_row_numbers(x) * 2)
