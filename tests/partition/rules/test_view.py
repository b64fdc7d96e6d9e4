"""Views, and ops that rearrange: every choice of their rules is right on shards."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf


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
