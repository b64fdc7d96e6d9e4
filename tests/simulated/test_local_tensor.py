"""Local tensors of a world in one process: one value per rank, none at all, or one that was
given away.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional_collectives

import shardfn as sf
from shardfn import P
from shardfn.simulated import DonatedTensor, SimulatedTensor, UnreadTensor, used_after_donation

SHARDS = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0]]), torch.empty(0, 2)]


def uneven(shown: int = 0) -> SimulatedTensor:
    """3 rows of 2 on 3 ranks: 2, 1 and none."""
    return SimulatedTensor([s.clone() for s in SHARDS], shown)


@pytest.mark.parametrize("shown", [0, 1, 2])
def test_it_looks_like_the_shown_ranks_tensor(shown: int) -> None:
    x = uneven(shown)
    assert (x.shape, x.dtype, x.stride(), x.device) == (
        SHARDS[shown].shape,
        torch.float32,
        SHARDS[shown].stride(),
        SHARDS[shown].device,
    )
    assert repr(x) == f"SimulatedTensor(3 ranks, rank {shown}: {SHARDS[shown]!r})"


OPS: dict[str, Callable[[Any], Any]] = {
    "pointwise": lambda x: x * 2 + 1,
    "with itself": lambda x: x * x,
    "with a plain tensor": lambda x: torch.ones(2) - x,
    "a reduction": lambda x: x.sum(0),
    "two results": lambda x: x.sort(1),
    "a list of results": lambda x: x.split(1, 1),
    "a list of arguments": lambda x: torch.cat([x, torch.ones(1, 2), x]),
    "a view": lambda x: x.t(),
    "an index": lambda x: x[:, torch.tensor([1, 0])],
    "a new tensor": torch.zeros_like,
    "a cast": lambda x: x.to(torch.float64),
    "a copy": copy.deepcopy,
    "a product": lambda x: x @ torch.ones(2, 3),
    "in place": lambda x: x.clone().add_(1),
}


@pytest.mark.parametrize("case", list(OPS))
@pytest.mark.parametrize("shown", [0, 1])
def test_an_op_runs_on_every_ranks_shard(case: str, shown: int) -> None:
    got = OPS[case](uneven(shown))
    wanted = [OPS[case](s.clone()) for s in SHARDS]
    if isinstance(got, torch.Tensor):
        got, wanted = (got,), [(w,) for w in wanted]
    for i, result in enumerate(got):
        assert isinstance(result, SimulatedTensor) and result.shown == shown
        for shard, want in zip(result.shards, wanted, strict=True):
            assert torch.equal(shard, want[i]) and shard.dtype == want[i].dtype


def test_writing_in_place_writes_to_every_rank() -> None:
    x = uneven()
    x.mul_(2)
    assert [s.tolist() for s in x.shards] == [(2 * s).tolist() for s in SHARDS]


def test_a_value_is_read_where_all_ranks_agree() -> None:
    same = SimulatedTensor([torch.tensor([2.0]), torch.tensor([2.0])])
    assert same.item() == 2.0 and float(same) == 2.0 and bool(same > 1)
    assert torch.equal(same, same) and not torch.equal(same, same + 1)
    nan = SimulatedTensor([torch.tensor(float("nan"))] * 2)
    assert nan.item() != nan.item(), "nan on every rank is an agreement"
    assert bool((uneven() < 9).all())


def test_a_value_that_differs_between_ranks_is_not_read_as_one() -> None:
    x = SimulatedTensor([torch.tensor(1.0), torch.tensor(2.0)])
    with pytest.raises(sf.DivergenceError) as error:
        x.item()
    assert str(error.value) == (
        "aten._local_scalar_dense.default: ranks hold different values: [1.0, 2.0]\n  "
        "try: read the global value with sf.full(x)"
    )
    assert error.value.fix == "sf.full(x)"
    for read in (
        lambda: bool(x > 1),
        lambda: torch.equal(x, torch.tensor(1.0)),
        lambda: torch.allclose(x, torch.tensor(1.0)),
    ):
        with pytest.raises(sf.DivergenceError):
            read()


def test_an_eager_collective_is_that_of_all_ranks() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        x = sf.distribute(torch.arange(4.0), mesh, sf.P("dp")).to_local()
        total: Any = functional_collectives.all_reduce(x, "sum", mesh)
        assert [y.tolist() for y in total.wait().shards] == [[2.0, 4.0]] * 2
        torch.distributed.all_reduce(x)
        assert [y.tolist() for y in x.shards] == [[2.0, 4.0]] * 2


UNREAD: dict[str, Callable[[Any], Any]] = {
    "pointwise": lambda x: x * 2 + 1,
    "with itself": lambda x: x @ x.t(),
    "with a plain tensor": lambda x: x + torch.ones(2),
    "a reduction": lambda x: x.sum(0),
    "two results": lambda x: x.sort(1),
    "a list of results": lambda x: x.split(2),
    "a cast": lambda x: x.double(),
    "an index": lambda x: x[torch.tensor([0, 2])],
}


@pytest.mark.parametrize("case", list(UNREAD))
def test_a_tensor_without_values_has_the_shapes_dtypes_and_device_of_results(case: str) -> None:
    like = torch.ones(3, 2)
    got, wanted = UNREAD[case](UnreadTensor(like)), UNREAD[case](like)
    pairs = (
        [(got, wanted)] if isinstance(wanted, torch.Tensor) else list(zip(got, wanted, strict=True))
    )
    for a, b in pairs:
        assert isinstance(a, UnreadTensor)
        assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda x: x[0, 0].item(),
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.sum()),
    "bool": lambda x: bool(x.sum()),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
}


@pytest.mark.parametrize("case", list(READS))
def test_reading_a_tensor_without_values_says_why_there_is_none(case: str) -> None:
    with pytest.raises(sf.FakeValueError) as error:
        READS[case](UnreadTensor(torch.ones(3, 2)))
    where, said = str(error.value).split(": ", 1)
    assert said == (
        "the code reads a value, but the world has no values (numerics=False)\n  try: "
        "fake_world(n, numerics=True) computes true values"
    )
    assert where
    assert repr(UnreadTensor(torch.ones(3, 2))) == "UnreadTensor(shape=(3, 2), dtype=torch.float32)"


USES = (
    lambda x: x + 1,
    lambda x: x.sum(),
    lambda x: torch.cat([torch.ones(1), x]),
    lambda x: x.clone(),
    lambda x: x[0],
)


@pytest.mark.parametrize("use", USES)
def test_every_use_of_a_donated_tensor_says_which_call_took_it(use: Callable[[Any], Any]) -> None:
    x = DonatedTensor(torch.ones(3), "shard(step)")
    with pytest.raises(sf.ShardError) as error:
        use(x)
    assert str(error.value) == str(used_after_donation("shard(step)"))
    assert str(error.value) == (
        "shard(step): the tensor was donated to this call, so its memory is gone\n"
        "  try: use the call's results, or leave the argument out of donate_argnums"
    )
    assert error.value.fix == "use the call's results, or leave the argument out of donate_argnums"


def test_a_donated_tensor_can_still_be_looked_at() -> None:
    x = DonatedTensor(torch.ones(3, 2), "shard(step)")
    assert (repr(x), tuple(x.shape), x.dtype) == (
        "DonatedTensor(to shard(step))",
        (3, 2),
        torch.float32,
    )


WRITES = {
    "in place": lambda x, y: y.add_(x),
    "an item": lambda x, y: y.__setitem__(0, x[0]),
    "out=": lambda x, y: torch.add(x, 1, out=y),
    "a collective": lambda x, y: torch.distributed.all_gather_into_tensor(y, x),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_tensor_without_values_is_not_written_over_one_with_values(write: str) -> None:
    with sf.fake_world(1, numerics=False):
        x = UnreadTensor(torch.ones(2))
        with pytest.raises(sf.FakeValueError, match="the code reads a value, but the world"):
            WRITES[write](x, torch.ones(2))
        x.add_(torch.ones(2))


def test_a_leaf_of_uneven_sizes_that_was_made_without_autograd_is_refused() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        d = sf.distribute(torch.arange(7.0), mesh, P("dp"))
        own = d.to_local().requires_grad_()
        with pytest.raises(sf.ShardError) as caught:
            own.sin()
    text = str(caught.value)
    assert "the tensor's shapes differ between ranks: [(4,), (3,)]" in text
    assert "try: call requires_grad_() of the DTensor before to_local()" in text


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_ranks_do_not_write_their_own_values_to_a_plain_tensor(optimizer: Any) -> None:
    own = SimulatedTensor([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])])
    plain = torch.ones(2)
    with pytest.raises(sf.ShardError, match="a plain tensor, which all ranks share") as caught:
        plain.add_(own)
    assert "DTensor.from_local(x, mesh)" in (caught.value.fix or "")
    w = torch.nn.Parameter(plain)
    with torch.no_grad():
        w.grad = own
    with pytest.raises(sf.ShardError, match="a plain tensor"):
        optimizer([w], lr=0.1, foreach=False).step()
    torch.testing.assert_close(w.detach(), torch.ones(2))
    own.add_(plain)  # theirs may be written with it
