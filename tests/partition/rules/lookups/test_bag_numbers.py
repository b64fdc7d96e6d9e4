"""Which bag an index belongs to: what a call says, and what a rank computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardfn as sf
from shardfn import P
from shardfn.partition.rule_api.strategy import call_of
from shardfn.partition.rules.lookups.bags import options_in

TABLE = torch.linspace(-1, 1, 20, dtype=torch.float64).view(5, 4)
AT = torch.arange(18) % 5


def bagged(step: int, last: bool) -> Any:
    def fn(table: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        starts = torch.arange(0, 18, step)
        return F.embedding_bag(at, table, starts, mode="sum", include_last_offset=last)

    return fn


@pytest.mark.parametrize(
    ("step", "last", "long"), [(3, False, 3), (4, False, None), (3, True, None)]
)
def test_bags_are_equally_long_where_the_offsets_count(
    step: int, last: bool, long: int | None
) -> None:
    """Not if a shorter bag follows, or if the last offset is an end, so that one bag is missing."""
    fn = bagged(step, last)
    program = sf.jit(fn).trace(TABLE, AT).program
    (node,) = [x for x in program.graph.graph.nodes if "bag" in str(x.target)][:1]
    call = call_of(node)
    assert call is not None
    assert options_in(call).length == long
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        sharded = sf.shard(fn, mesh, (P(), P("dp")), backend="aten")
        got = sf.full(sharded(TABLE, AT))
    torch.testing.assert_close(got, fn(TABLE, AT), rtol=1e-12, atol=1e-12)
