"""check: the proof of Law 0 for one function, in several worlds."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn import P


def test_check_proves_law_0_and_finds_what_breaks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fn = lambda x, y: (x @ y).softmax(-1)
    args = (torch.randn(5, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64))
    found = sf.check(fn, *args, worlds=[1, 2, 3, {"dp": 2, "tp": 2}], placements=(P("dp"), P()))
    assert all(v < 1e-12 for v in found.values()) and list(found) == [
        1,
        2,
        3,
        (("dp", 2), ("tp", 2)),
    ]
    from shardfn.partition import rules
    from shardfn.partition.rule_api.op_record import Op
    from shardfn.partition.rules import pointwise

    # a wrong rule: the square of a pending sum is not the pending sum of squares
    monkeypatch.setitem(
        rules.OPS,
        torch.ops.aten.exp.default,
        Op(lambda call: [(("sum",), ("sum",)), *pointwise.pointwise(call)]),
    )
    with pytest.raises(
        sf.DivergenceError, match=r"check, world 2, result: sharded differs from plain by up to"
    ):
        sf.check(lambda x: x.sum(0).exp(), torch.randn(5, 3, dtype=torch.float64), worlds=[2])
