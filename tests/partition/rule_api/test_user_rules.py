"""A user's rule function: it answers with a text, or with placements, ours or DTensor's."""

from __future__ import annotations

import pieces
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from shardfn.partition.rule_api.user_rules import from_function

CALL = pieces.OneOp(torch.ops.aten.mm.default, (torch.ones(5, 3), torch.ones(3, 2)), {}).call
REPLICATED = (("R", "R"), ("R",))


def test_placements_are_ours_or_dtensors_and_replicated_is_always_among_them() -> None:
    theirs = from_function(
        lambda call: [([Shard(1), Shard(0)], [Partial()]), ([0, Replicate()], [0])]
    )
    assert theirs(CALL) == [REPLICATED, ((1, 0), ("sum",)), ((0, "R"), (0,))]


def test_other_reductions_keep_their_name() -> None:
    rule = from_function(lambda call: [(["R", "R"], [Partial("max")])])
    assert rule(CALL)[1] == (("R", "R"), ("max",))


def test_a_text_is_read_for_the_call() -> None:
    rule = from_function(lambda call: "i k, k j -> i j" if call["mat2"] is not None else "")
    assert rule(CALL) == [REPLICATED, ((0, "R"), (0,)), (("R", 1), (1,)), ((1, 0), ("sum",))]


def test_the_rule_has_the_name_of_the_function_for_errors() -> None:
    def my_rule(call: object) -> list[object]:
        return []

    rule = from_function(my_rule)
    assert rule.__module__ == __name__
    assert rule.__qualname__.endswith("my_rule")
