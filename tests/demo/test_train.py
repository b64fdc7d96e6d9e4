"""The step is pure, and the loop feeds its results back in."""

import itertools

import torch

import shardfn as sf
from shardfn_demo import adamw, gpt, train

CONFIG = gpt.Config(vocab=7, context=5, width=6, heads=2, layers=1)


def batches():
    tokens = torch.arange(20).reshape(2, 10) % 7
    return itertools.repeat((tokens[:, :5], tokens[:, 1:6]))


def test_training_lowers_the_loss_and_tells_each_step():
    params, told = gpt.init(CONFIG), []
    losses = train.train(
        train.step(CONFIG, lr=1e-2),
        params,
        adamw.init(params),
        batches(),
        steps=7,
        progress=told.append,
    )
    assert told == losses and len(losses) == 7
    assert losses[-1] < losses[0] - 0.1


def test_a_step_changes_none_of_its_arguments():
    params = gpt.init(CONFIG)
    state = adamw.init(params)
    before = sf.tree_map(torch.clone, (params, state))
    train.step(CONFIG)(params, state, *next(batches()))
    torch.testing.assert_close((params, state), before, rtol=0, atol=0)
