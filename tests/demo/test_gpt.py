"""The model: shapes, causality, and gradients that autograd and finite differences agree with."""

import functools
import math

import pytest
import torch

import shardfn as sf
from shardfn import P
from shardfn_demo import gpt

CONFIG = gpt.Config(vocab=11, context=5, width=6, heads=3, layers=2)


@pytest.fixture
def params():
    return gpt.init(CONFIG, dtype=torch.float64)


@pytest.fixture
def tokens():
    return torch.randint(11, (2, 3, 5), generator=torch.Generator().manual_seed(1))


def test_a_new_model_knows_nothing(params, tokens):
    loss = gpt.loss_fn(params, *tokens, heads=3)
    assert loss.shape == () and loss.item() == pytest.approx(math.log(11), rel=0.02)


def test_logits_have_a_number_for_each_token_of_the_vocabulary(params, tokens):
    assert gpt.logits(params, tokens[0], heads=3).shape == (3, 5, 11)


def test_a_prediction_does_not_see_the_future(params, tokens):
    x = tokens[0]
    changed = x.clone()
    changed[:, 3:] = (x[:, 3:] + 1) % 11
    before, after = (gpt.logits(params, x, heads=3), gpt.logits(params, changed, heads=3))
    torch.testing.assert_close(before[:, :3], after[:, :3], rtol=0, atol=0)
    assert not torch.allclose(before[:, 3:], after[:, 3:])


def test_a_shorter_text_than_the_context_is_a_prefix_of_it(params, tokens):
    x = tokens[0]
    torch.testing.assert_close(
        gpt.logits(params, x[:, :2], heads=3), gpt.logits(params, x, heads=3)[:, :2]
    )


def test_init_is_the_same_for_a_seed_and_its_sizes_follow_the_config():
    first, again, other = (gpt.init(CONFIG), gpt.init(CONFIG), gpt.init(CONFIG, seed=1))
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first["tok"], other["tok"])
    assert first["pos"].shape == (5, 6) and len(first["layers"]) == 2
    assert first["layers"][0]["down"].shape == (24, 6) and first["head"].shape == (6, 11)


def test_value_and_grad_equals_autograd(params, tokens):
    loss_fn = functools.partial(gpt.loss_fn, heads=3)
    loss, grads = sf.value_and_grad(loss_fn)(params, *tokens)
    theirs = sf.tree_map(lambda p: p.clone().requires_grad_(), params)
    right = loss_fn(theirs, *tokens)
    right.backward()
    torch.testing.assert_close(loss, right.detach())
    torch.testing.assert_close(grads, sf.tree_map(lambda p: p.grad, theirs))


@pytest.mark.parametrize("name", ["q", "k", "v", "o", "up", "down"])
def test_gradients_equal_finite_differences(params, tokens, name):
    loss_fn = functools.partial(gpt.loss_fn, heads=3)
    grads = sf.grad(loss_fn)(params, *tokens)
    generator = torch.Generator().manual_seed(2)
    direction = torch.randn(
        params["layers"][1][name].shape, generator=generator, dtype=torch.float64
    )

    def along(t):
        layer = {**params["layers"][1], name: params["layers"][1][name] + t * direction}
        return loss_fn({**params, "layers": [params["layers"][0], layer]}, *tokens)

    slope = (along(1e-4) - along(-1e-4)) / 2e-4
    torch.testing.assert_close(
        (grads["layers"][1][name] * direction).sum(), slope, rtol=1e-5, atol=1e-9
    )


def test_every_parameter_has_a_placement_that_divides_it_by_the_heads():
    params = gpt.init(gpt.Config())
    where = gpt.placements(params)
    assert where["layers"][3]["q"] == where["head"] == P(None, "tp")
    assert where["layers"][3]["o"] == where["tok"] == P("tp", None)

    def divides(p, spec):
        return all(axis is None or n % 4 == 0 for axis, n in zip(spec.parts, p.shape, strict=False))

    assert walk(divides, params, where)


def walk(check, params, where):
    if isinstance(params, torch.Tensor):
        return check(params, where)
    pairs = (
        [(params[k], where[k]) for k in params]
        if isinstance(params, dict)
        else zip(params, where, strict=True)
    )
    return all(walk(check, p, w) for p, w in pairs)
