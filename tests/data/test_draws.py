"""The random numbers of a pass."""

import random

import torch

from shardfn.data.draws import Draws


def test_a_pass_draws_its_own_numbers_and_leaves_the_others_alone() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    draws = Draws(0, 1)
    rows = []
    before = random.getstate()
    for _ in range(2):
        with draws.used():
            rows.append((torch.rand(1).item(), random.random()))
    assert random.getstate() == before
    assert torch.equal(torch.rand(2), wanted)
    again = Draws(0, 1)
    with again.used():
        assert [(torch.rand(1).item(), random.random()) for _ in rows] == rows
    with Draws(0, 2).used():
        assert torch.rand(1).item() != rows[0][0]
    with Draws(0, 1, "workers").used():
        assert torch.rand(1).item() != rows[0][0]
