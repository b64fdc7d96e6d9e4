"""The pure AdamW is torch's AdamW."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

import shardfn as sf
from shardfn_demo import adamw

OPTIONS = ({"lr": 1e-2}, {"lr": 0.3, "betas": (0.7, 0.999), "eps": 1e-3, "weight_decay": 0.5})


def trees(seed):
    generator = torch.Generator().manual_seed(seed)
    new = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    return {"w": new(3, 5), "layers": [{"b": new(7)}, {"b": new(2)}], "scale": new()}


@pytest.mark.parametrize("options", OPTIONS)
def test_seven_steps_equal_torchs_optimizer(options):
    params = trees(0)
    state = adamw.init(params) | {"step": torch.zeros((), dtype=torch.float64)}
    theirs = sf.tree_map(lambda p: p.clone().requires_grad_(), params)
    optimizer = torch.optim.AdamW(
        tree_leaves(theirs), **{"betas": (0.9, 0.95), "weight_decay": 0.01, **options}
    )
    for seed in range(1, 8):
        grads = trees(seed)
        params, state = adamw.update(params, grads, state, **options)
        for p, g in zip(tree_leaves(theirs), tree_leaves(grads), strict=True):
            p.grad = g
        optimizer.step()
    torch.testing.assert_close(
        params, sf.tree_map(torch.Tensor.detach, theirs), rtol=1e-13, atol=1e-13
    )
    assert state["step"].item() == 7


def test_update_changes_none_of_its_arguments():
    params, grads = trees(0), trees(1)
    state = adamw.init(params)
    before = sf.tree_map(torch.clone, (params, grads, state))
    adamw.update(params, grads, state)
    torch.testing.assert_close((params, grads, state), before, rtol=0, atol=0)


def test_state_and_params_keep_their_dtype():
    params = {"w": torch.ones(3)}
    after, state = adamw.update(params, params, adamw.init(params))
    assert {x.dtype for x in (after["w"], state["step"], state["m"]["w"], state["v"]["w"])} == {
        torch.float32
    }


@pytest.mark.parametrize("step", [1, 10, 1000])
def test_the_correction_keeps_its_digits_in_float32(step):
    right = 1 - 0.999**step
    assert adamw.correction(0.999, torch.tensor(float(step))).item() == pytest.approx(
        right, rel=3e-7
    )
