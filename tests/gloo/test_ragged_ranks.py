"""ragged_all_to_all on real gloo processes: as on one device, and as in the simulator to the last
bit; and what one rank refuses, all refuse.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equality import close
from ranks import run_ranks
from torch import Tensor
from torch.testing import assert_close

import shardfn as sf
from shardfn import P

G = torch.Generator().manual_seed(6)
N, D, EXPERTS = 5, 3, 4
W = torch.randn(EXPERTS, D, D, generator=G, dtype=torch.float64)


def tokens(n: int) -> tuple[Tensor, Tensor]:
    """Rows, and the expert of each."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n * N, D, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, EXPERTS, (n * N,), generator=generator)


def experts(w: Tensor, x: Tensor, expert: Tensor) -> Tensor:
    """Each row times the matrix of its expert, where ranks have experts: dispatch, compute, back.

    Args:
        w: (EXPERTS / n, D, D), the experts of this rank.
        x: (N, D), its rows.
        expert: (N,), of each row.
    """
    order = expert.argsort()
    owner = expert[order] // len(w)
    counts = torch.bincount(owner, minlength=sf.axis_size("ep"))
    sent = x[order], expert[order]
    (rows, places), came = sf.ragged_all_to_all(sent, counts, "ep")
    own = places - sf.axis_index("ep") * len(w)
    made = torch.einsum("rd,rde->re", rows, w[own.clamp(0, len(w) - 1)]).tanh()
    back, _ = sf.ragged_all_to_all(made, came, "ep", rows=len(x))
    return torch.zeros_like(x).index_copy(0, order, back)


def plain(w: Tensor, x: Tensor, expert: Tensor) -> Tensor:
    return torch.einsum("rd,rde->re", x, w[expert]).tanh()


def loss(f: Any) -> Any:
    return lambda w, x, expert: f(w, x, expert).square().sum()


def run(n: int, backend: str) -> Any:
    mesh = sf.make_mesh((n,), ("ep",))
    layer = sf.shard_map(experts, None, P("ep"), P("ep"))
    value = sf.shard(layer, mesh, P("ep"), backend=backend)
    gradient = sf.shard(sf.grad(loss(layer), (0, 1)), mesh, P("ep"), backend=backend)
    x, expert = tokens(n)
    batch = torch.stack([x, x.sin()]), torch.stack([expert, expert.flip(0)])
    placed = P("ep"), P(None, "ep"), P(None, "ep")
    samples = sf.shard(sf.vmap(layer, (None, 0, 0)), mesh, placed, backend=backend)
    return sf.full((value(W, x, expert), gradient(W, x, expert), samples(W, *batch)))


def wanted(n: int) -> Any:
    x, expert = tokens(n)
    gradients = torch.func.grad(loss(plain), (0, 1))(W, x, expert)
    second = plain(W, x.sin(), expert.flip(0))
    first = plain(W, x, expert)
    return first, gradients, torch.stack([first, second])


@pytest.mark.parametrize("n", [2, 4])
def test_gloo_sends_rows_as_the_simulator_does(n: int) -> None:
    torch.set_num_threads(1)
    with sf.fake_world(n):
        simulated = run(n, "aten")
    for got in run_ranks(n, run, n, "aten"):
        close(got, wanted(n))
        assert_close(got, simulated, rtol=0, atol=0)


def test_compiled_exchanges_on_gloo() -> None:
    for got in run_ranks(2, run, 2, "inductor"):
        close(got, wanted(2))


def send_too_many(n: int, backend: str) -> Any:
    """The errors of a rank, and its rows of a later call with counts that fit."""
    mesh = sf.make_mesh((n,), ("ep",))
    local = lambda x, c: sf.ragged_all_to_all(x, c.reshape(-1), "ep", rows=N)[0]
    send = sf.shard_map(local, mesh, P("ep"), P("ep"), backend=backend)
    x, _ = tokens(n)
    own = torch.eye(n, dtype=torch.int64)
    wrong = [own.clone() for _ in range(3)]
    wrong[0][0, 1] = N  # rank 1 receives one more
    wrong[0][0, 0] = 0
    wrong[1][1, 0] = -1
    wrong[2][1, 0] = N  # rank 1 sends one more
    errors = []
    for counts in wrong:
        try:
            send(x, counts)
        except sf.ShardError as error:
            assert __file__ in str(error.source)
            errors.append((type(error).__name__, str(error)))
    return errors, sf.full(send(x, own))


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_every_rank_raises_the_error_of_one_and_goes_on(backend: str) -> None:
    n = 2
    with sf.fake_world(n):
        simulated = send_too_many(n, "aten")
    for errors, rows in run_ranks(n, send_too_many, n, backend):
        assert errors == simulated[0]
        assert torch.equal(rows, simulated[1])
    assert [name for name, _ in simulated[0]] == ["CapacityError", "ShardError", "ShardError"]
