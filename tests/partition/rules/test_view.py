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


@pytest.mark.parametrize("placement", [sf.P("a"), sf.P(None, "a"), sf.P()], ids=str)
@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_a_view_of_pairs_as_complex_numbers(placement: sf.P, backend: str) -> None:
    """The parts of a number are side by side on a rank, too, after writes to one of them."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(x.clone())
        z.imag.mul_(2)
        z.real[1:] = 5.0
        return torch.view_as_real(z * z).clone()

    x = torch.rand(5, 2)
    with sf.fake_world(2):
        got = sf.full(sf.shard(fn, sf.make_mesh((2,), ("a",)), placement, backend=backend)(x))
    wanted = fn(x)
    torch.testing.assert_close(got, wanted)
    assert got.stride() == wanted.stride()
