"""ema equals torch's averaged model, alone and captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import swa_utils

import shardfn as sf
from tests.training.optim import table

GRADS = table.tree(0)


def test_an_average_equals_torchs_averaged_model() -> None:
    module = torch.nn.Linear(3, 2, dtype=torch.float64)
    model = swa_utils.AveragedModel(module, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
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
        (
            lambda: sf.ema(0.5).update(torch.ones(3), sf.ema(0.5).init(torch.ones(1))),
            "ema.update: the parameters have a float32[3], but the average has a float32[1]",
        ),
    ],
    ids=["decay", "trees", "shapes"],
)
def test_errors_name_what_does_not_fit(call: Any, text: str) -> None:
    with pytest.raises(sf.ShardError) as caught:
        call()
    assert text in str(caught.value)


@pytest.mark.parametrize("debias", [False, True])
def test_the_state_of_shapes_has_the_shapes_of_the_state(debias: bool) -> None:
    ema = sf.ema(0.9, debias=debias)
    tree = {"w": torch.ones(3, 2), "rest": [torch.ones(5, dtype=torch.bfloat16), 3]}
    shape = lambda x: sf.ShapeDtype(tuple(x.shape), x.dtype) if torch.is_tensor(x) else x
    shapes = sf.tree_map(shape, tree)
    assert ema.init(shapes) == sf.tree_map(shape, ema.init(tree))
    mixed = {**shapes, "w": tree["w"]}
    assert ema.init(mixed) == ema.init(shapes)


@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize("is_captured", [False, True])
def test_integers_are_those_of_the_newest_parameters(debias: bool, is_captured: bool) -> None:
    """As the count of batches of a batch norm: its dtype stays, so that the next call fits."""
    ema = sf.ema(0.5, debias=debias)
    tree = lambda k: {
        "n": torch.tensor(k),
        "b": torch.tensor(k > 1),
        "w": torch.full((2,), float(k)),
    }
    update = sf.jit(ema.update, backend="aten") if is_captured else ema.update
    state = ema.init(tree(1))
    assert state["average"]["n"].item() == 1
    for k in (2, 3):
        state = update(tree(k), state)
        found = ema.average(state)
        assert found["n"].dtype == torch.int64 and found["n"].item() == k
        assert found["b"].dtype == torch.bool and found["b"].item()
    expected = 2.0 / 0.75 if debias else 2.25
    torch.testing.assert_close(found["w"], torch.full((2,), expected))
