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
        sf.DivergenceError,
        match="check, world 2, result: the sharded result differs from the result on one device",
    ):
        sf.check(lambda x: x.sum(0).exp(), torch.randn(5, 3, dtype=torch.float64), worlds=[2])


def test_check_takes_steps_with_transforms_inside() -> None:
    w = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3)
    x = torch.linspace(2, -1, 20, dtype=torch.float64).view(4, 5)
    loss = lambda w, x: (x @ w).square().mean()
    opt = sf.optim(torch.optim.AdamW, lr=0.01)
    mean = sf.shard_map(lambda x: sf.pmean(x.sum(0), "dp"), in_placements=P("dp"))
    steps = {
        "sgd": (lambda w, x: w - 0.1 * sf.grad(loss)(w, x), w, x),
        "adamw": (lambda w, s, x: opt.update(w, sf.grad(loss)(w, x), s), w, opt.init(w), x),
        "vmap": (lambda w, x: w.sum() + sf.vmap(lambda row: row @ w)(x), w, x),
    }
    for fn, *args in steps.values():
        assert sf.check(fn, *args, worlds=[2], rtol=1e-12)[2] < 1e-12
    step = lambda w, x: w - 0.1 * sf.grad(lambda w: mean(x @ w).sum())(w)
    assert sf.check(step, w, x[:1].expand(4, 5), worlds=[1]) == {1: 0.0}
