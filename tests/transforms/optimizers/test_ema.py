"""clip_by_global_norm and ema equal torch's, alone, captured and sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import swa_utils

import shardfn as sf
from shardfn import P
from tests.transforms.optimizers import table

GRADS = table.tree(0)


@pytest.mark.parametrize("max_norm", [1.0, 100.0])
def test_clipping_equals_clip_grad_norm_(max_norm: float) -> None:
    own = [torch.zeros_like(x) for x in table.flat(GRADS)]
    for p, g in zip(own, table.flat(GRADS), strict=True):
        p.grad = g.clone()
    wanted = torch.nn.utils.clip_grad_norm_(own, max_norm)
    limit = torch.tensor(max_norm, dtype=torch.float64)
    captured = sf.jit(sf.clip_by_global_norm, backend="aten")
    for grads, norm in (
        sf.clip_by_global_norm(GRADS, max_norm),
        captured(GRADS, limit),
    ):
        assert table.largest(grads, [p.grad for p in own]) < 1e-12
        assert abs(float(norm - wanted)) < 1e-12


def test_the_norm_of_nothing_is_zero() -> None:
    grads, norm = sf.clip_by_global_norm({"w": None}, 1.0)
    assert grads == {"w": None} and float(norm) == 0.0


def test_the_norm_of_shards_is_that_of_all() -> None:
    wanted, norm = sf.clip_by_global_norm(GRADS, 1.0)
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("a",))
        placed = {"in": P("a"), "out": [P(None, "a"), P()]}
        fn = sf.shard(
            lambda g: sf.clip_by_global_norm(g, 1.0),
            mesh,
            (placed,),
            backend="aten",
        )
        grads, of_all = sf.full(fn(GRADS))
        assert table.largest(grads, wanted) < 1e-12
        assert abs(float(of_all - norm)) < 1e-12


def test_an_average_equals_torchs_averaged_model() -> None:
    module = torch.nn.Linear(3, 2, dtype=torch.float64)
    model = swa_utils.AveragedModel(
        module, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)
    )
    ema = sf.ema(0.9)
    step = sf.jit(lambda p, s: ema.update(p, s), backend="aten")
    params = {name: p.detach().clone() for name, p in module.named_parameters()}
    model.update_parameters(module)  # its first call copies
    state = captured = ema.init(params)
    for i in range(3):
        with torch.no_grad():
            for name, p in module.named_parameters():
                p += 0.1 * (i + 1)
                params[name] = p.detach().clone()
        model.update_parameters(module)
        state, captured = ema.update(params, state), step(params, captured)
    wanted = [p.detach() for p in model.module.parameters()]
    for found in (state, captured):
        assert table.largest(ema.average(found), wanted) < 1e-12
        assert int(found["count"]) == 3


def test_a_debiased_average_of_a_constant_is_the_constant() -> None:
    ema, params = sf.ema(0.99, debias=True), table.tree(0)
    state = ema.init(params)
    for _ in range(3):
        state = ema.update(params, state)
    average: Any = sf.jit(ema.average, backend="aten")(state)
    assert table.largest(average, params) < 1e-12


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: sf.ema(2.0), "decay is 2.0"),
        (
            lambda: sf.ema(0.5).update([GRADS], sf.ema(0.5).init(GRADS)),
            "ema.update: the whole tree",
        ),
    ],
    ids=["decay", "trees"],
)
def test_errors_name_what_does_not_fit(call: Any, text: str) -> None:
    with pytest.raises(sf.ShardError) as caught:
        call()
    assert text in str(caught.value)
