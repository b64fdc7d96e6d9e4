"""Per-rank code on two real gloo processes: as on whole arrays, and as in the simulator to the
last bit.
"""

from __future__ import annotations

from typing import Any

import torch
from equality import close
from ranks import run_ranks
from torch import Tensor
from torch.testing import assert_close

import shardfn as sf
from shardfn import P

G = torch.Generator().manual_seed(8)
X = torch.randn(4, 6, generator=G, dtype=torch.float64)
W = torch.randn(6, 4, generator=G, dtype=torch.float64)


def loss(w: Tensor, x: Tensor) -> Tensor:
    return sf.pmean((x @ w).tanh().square().mean(), "dp")


def every_collective(x: Tensor) -> Any:
    moved = sf.all_to_all(x, "dp", 1, 0, tiled=True)
    return (
        sf.psum(x, "dp").sin() + sf.pmax(x, "dp") - sf.pmin(x, "dp"),
        sf.all_gather(x, "dp", axis=1, tiled=True),
        x * sf.ppermute(x, "dp", [(0, 1), (1, 0)])
        + sf.ppermute(x, "dp", [(1, 0)]) * sf.axis_index("dp"),
        sf.psum_scatter(moved, "dp", tiled=True),
    )


OUTS = (P(), P(), P("dp"), P("dp"))


def whole(x: Tensor) -> Any:
    a, b = x.chunk(2)
    exchanged = torch.cat([b, a])
    got = torch.cat([b, torch.zeros_like(a)]) * torch.tensor(
        [[0.0], [0.0], [1.0], [1.0]], dtype=x.dtype
    )
    return (
        (a + b).sin() + torch.maximum(a, b) - torch.minimum(a, b),
        torch.cat([a, b], 1),
        x * exchanged + got,
        x[:, :3] + x[:, 3:],
    )


def squares(f: Any) -> Any:
    return lambda x: sum(y.square().sum() for y in f(x))


def run(backend: str) -> Any:
    mesh = sf.make_mesh((2,), ("dp",))
    fn = sf.shard_map(every_collective, mesh, P("dp"), OUTS, backend=backend)
    step = sf.shard_map(sf.bucketed_grad(loss), mesh, (P(), P("dp")), P(), backend=backend)
    derived = sf.shard(
        sf.grad(squares(sf.shard_map(every_collective, None, P("dp"), OUTS))),
        mesh,
        P("dp"),
        backend=backend,
    )
    return sf.full((fn(X), step(W, X), derived(X)))


def wanted() -> Any:
    plain = lambda w: (X @ w).tanh().square().mean()
    return (whole(X), torch.func.grad_and_value(plain)(W)[::-1], torch.func.grad(squares(whole))(X))


def checked(backend: str) -> list[Any]:
    """What each rank of gloo returns, where all of it equals whole arrays."""
    found = run_ranks(2, run, backend)
    for got in found:
        close(got, wanted())
    return found


def test_gloo_runs_per_rank_code_as_the_simulator_does() -> None:
    torch.set_num_threads(1)
    with sf.fake_world(2):
        simulated = run("aten")
    for got in checked("aten"):
        assert_close(got, simulated, rtol=0, atol=0)


def test_compiled_per_rank_code_on_gloo() -> None:
    checked("inductor")
