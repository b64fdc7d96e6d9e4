"""Views, and ops that rearrange: every choice of their rules is right on shards."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn.partition.rules import view
from tests.support.stages.rule_proofs import family, prove_on_grids, prove_on_lines


@pytest.mark.parametrize(("name", "position"), family(view))
def test_every_choice_is_right_on_one_axis(name: str, position: int) -> None:
    prove_on_lines(name, position)


@pytest.mark.parametrize(("name", "position"), family(view))
def test_choices_are_independent_on_two_axes(name: str, position: int) -> None:
    prove_on_grids(name, position)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_reshape_of_what_a_rank_holds_expanded_is_a_copy(n: int) -> None:
    """Its strides on a rank are not those of the whole, and torch's fake tensors allow views
    that are none.
    """
    x = torch.arange(1.0)
    fn = lambda x: x.unsqueeze(1).expand(1, 3).unsqueeze(0).expand(2, 1, 3).reshape(1, 1, 6)
    with sf.fake_world(n):
        got = sf.shard(fn, sf.make_mesh((n,), ("a",)), sf.P("a"), backend="aten")(x)
        assert torch.equal(sf.full(got), fn(x))
