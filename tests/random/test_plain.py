"""plain: torch run eagerly with the random numbers of captured functions."""

from __future__ import annotations

import torch

import shardfn as sf


def drawn() -> torch.Tensor:
    return torch.stack([torch.rand(3), torch.nn.functional.dropout(torch.ones(3), 0.5)])


def test_numbers_follow_from_the_seed_and_the_number_of_the_call() -> None:
    sf.random.state.seed(3)
    with sf.random.plain():
        first, second = drawn(), drawn()
    sf.random.state.seed(3)
    with sf.random.plain():
        assert torch.equal(drawn(), first) and torch.equal(drawn(), second)
    assert not torch.equal(first, second)


def test_torchs_own_generator_is_neither_read_nor_written() -> None:
    before = torch.get_rng_state()
    with sf.random.plain():
        drawn()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(0)
    mine = drawn()
    torch.manual_seed(0)
    assert torch.equal(drawn(), mine), "outside torch draws as always"


def test_it_is_a_decorator_and_ends_with_an_error() -> None:
    @sf.random.plain()
    def once() -> torch.Tensor:
        return torch.rand(2)

    sf.random.state.seed(4)
    first = once()
    sf.random.state.seed(4)
    assert torch.equal(once(), first)
    try:
        with sf.random.plain():
            raise ZeroDivisionError
    except ZeroDivisionError:
        torch.manual_seed(1)
        x = torch.rand(2)
        torch.manual_seed(1)
        assert torch.equal(torch.rand(2), x)
