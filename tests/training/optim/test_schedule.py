"""Schedulers of torch: their values are tensors, and no step is captured again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from stagings import counts

import shardfn as sf
from tests.training.optim import table

O = torch.optim
S = O.lr_scheduler
LR, STEPS = 0.1, 5


def sequential(optimizer: O.Optimizer) -> S.LRScheduler:
    parts = [S.LinearLR(optimizer, total_iters=2), S.ExponentialLR(optimizer, 0.5)]
    return S.SequentialLR(optimizer, parts, [2])


def chained(optimizer: O.Optimizer) -> Any:
    return S.ChainedScheduler([S.ConstantLR(optimizer), S.StepLR(optimizer, 2)])


# (what makes the scheduler, its arguments)
SCHEDULERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "LambdaLR": (S.LambdaLR, {"lr_lambda": lambda i: 1 / (1 + i)}),
    "MultiplicativeLR": (S.MultiplicativeLR, {"lr_lambda": lambda i: 0.9}),
    "StepLR": (S.StepLR, {"step_size": 2}),
    "MultiStepLR": (S.MultiStepLR, {"milestones": [1, 3]}),
    "ConstantLR": (S.ConstantLR, {"total_iters": 2}),
    "LinearLR": (S.LinearLR, {"total_iters": 3}),
    "ExponentialLR": (S.ExponentialLR, {"gamma": 0.7}),
    "PolynomialLR": (S.PolynomialLR, {"total_iters": 4}),
    "CosineAnnealingLR": (S.CosineAnnealingLR, {"T_max": 4}),
    "CosineAnnealingWarmRestarts": (S.CosineAnnealingWarmRestarts, {"T_0": 2}),
    "CyclicLR": (S.CyclicLR, {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 2}),
    "OneCycleLR": (S.OneCycleLR, {"max_lr": 0.3, "total_steps": 9}),
    "ReduceLROnPlateau": (S.ReduceLROnPlateau, {"patience": 0}),
    "SequentialLR": (sequential, {}),
    "ChainedScheduler": (chained, {}),
}
PARAMS, GRADS = table.matrices(0), [table.matrices(i + 1) for i in range(STEPS)]
OPT = sf.optim(O.SGD, lr=LR, momentum=0.9)
STEP = sf.jit(lambda p, g, s, options: OPT.update(p, g, s, **options), backend="aten")


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_drives_steps_as_it_drives_torchs(name: str) -> None:
    make, options = SCHEDULERS[name]
    own = [x.clone() for x in table.flat(PARAMS)]
    optimizer = O.SGD(own, lr=LR, momentum=0.9)
    scheduler = make(optimizer, **options)
    rates = OPT.schedule(make, **options)
    eager = captured = PARAMS, OPT.init(PARAMS)
    metrics = (1.0,) if name == "ReduceLROnPlateau" else ()
    captures = []
    for g in GRADS:
        for p, x in zip(own, table.flat(g), strict=True):
            p.grad = x
        optimizer.step()
        assert float(rates.lr) == optimizer.param_groups[0]["lr"]
        eager = OPT.update(eager[0], g, eager[1], **rates.options)
        captured = STEP(captured[0], g, captured[1], rates.options)
        captures.append(counts["captures"])
        scheduler.step(*metrics)
        rates.step(*metrics)
    assert all(map(torch.equal, table.flat(eager[0]), own))
    assert table.largest(captured[0], own) < 1e-12
    assert len(set(captures)) == 1  # after the first step


def test_torch_has_no_other_scheduler() -> None:
    assert set(SCHEDULERS) == set(S.__all__) - {"LRScheduler"}


def test_a_rate_that_changes_captures_nothing_and_compiles_nothing() -> None:
    opt = sf.optim(O.AdamW, lr=LR)
    step = sf.jit(lambda p, g, s, lr: opt.update(p, g, s, lr=lr), backend="aten")
    rates = opt.schedule(S.CosineAnnealingLR, T_max=7)
    params, state = PARAMS, opt.init(PARAMS)
    before = counts.copy()
    seen = set()
    for g in GRADS:
        params, state = step(params, g, state, rates.lr)
        seen.add(float(rates.lr))
        rates.step()
    changed = {name: counts[name] - before[name] for name in counts}
    assert changed["captures"] == 1 and all(n <= 1 for n in changed.values())
    assert len(seen) == STEPS


def test_a_scheduler_gives_one_rate_for_each_parameter_group() -> None:
    opt = sf.optim(O.SGD, lr=LR, groups={"w": {"lr": 1.0}})
    rates = opt.schedule(S.StepLR, 1)
    rates.step()
    assert [round(float(x), 9) for x in rates.lr] == [0.01, 0.1]
    new, _ = opt.update(PARAMS, GRADS[0], opt.init(PARAMS), lr=rates.lr)
    wanted = {name: PARAMS[name] - lr * GRADS[0][name] for name, lr in [("w", 0.1), ("v", 0.01)]}
    assert table.largest(new, wanted) < 1e-15


def test_momentum_and_betas_that_a_scheduler_cycles_are_tensors_too() -> None:
    opt = sf.optim(O.AdamW, lr=LR)
    rates = opt.schedule(S.OneCycleLR, max_lr=0.3, total_steps=9)
    assert [*rates.options] == ["lr", "betas"]
    step = sf.jit(lambda p, g, s, k: opt.update(p, g, s, **k), backend="aten")
    state = opt.init(PARAMS)
    wanted, _ = opt.update(PARAMS, GRADS[0], state, **rates.options)
    new, _ = step(PARAMS, GRADS[0], state, rates.options)
    assert table.largest(new, wanted) < 1e-12


@pytest.mark.parametrize("groups", [None, {"b": {"weight_decay": 0.0}}])
def test_a_schedule_goes_on_from_its_state(groups: Any, tmp_path: Path) -> None:
    opt = sf.optim(torch.optim.AdamW, lr=0.5, groups=groups)
    make = lambda: opt.schedule(torch.optim.lr_scheduler.CosineAnnealingLR, 10)
    rates, again = make(), make()
    for _ in range(3):
        rates.step()
    sf.save(tmp_path, {"rates": rates})
    assert sf.load(tmp_path, {"rates": again})["rates"] is again
    for _ in range(4):
        assert again.options == rates.options
        rates.step()
        again.step()
    assert again.options == rates.options


def test_a_state_of_other_groups_is_refused() -> None:
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR
    rates = sf.optim(torch.optim.SGD).schedule(cosine, 10)
    grouped = sf.optim(torch.optim.SGD, groups={"b": {"lr": 0.1}})
    with pytest.raises(sf.CheckpointError) as error:
        rates.load_state_dict(grouped.schedule(cosine, 10).state_dict())
    text = "Schedule.load_state_dict: the state has 2 parameter groups, not 1"
    assert str(error.value).startswith(text)
