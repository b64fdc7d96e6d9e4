"""Programs of the core, for a copy of the package without the rooms over it. Run as a script:
`core_programs.py simulated` in one process, `core_programs.py ranks` in each process of a job.

They need nothing but the copy and torch.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

import shardfn as sf
from shardfn import P

F64 = torch.float64
W = torch.arange(12.0, dtype=F64).view(3, 4).cos()
X = torch.arange(24.0, dtype=F64).view(8, 3).sin()


def loss(w: Any, x: Any) -> Any:
    return ((x @ w).tanh() ** 2).mean()


def one_device() -> torch.Tensor:
    """The gradient as torch's autograd computes it."""
    w = W.clone().requires_grad_()
    loss(w, X).backward()
    assert w.grad is not None
    return w.grad


def equal(x: Any, wanted: Any) -> None:
    torch.testing.assert_close(sf.full(x), wanted, rtol=1e-12, atol=1e-12)


def transforms(mesh: Any) -> None:
    """Law 0 of transforms, with plain tensors and with DTensors as arguments."""
    step = sf.shard(sf.value_and_grad(loss), mesh, (P(), P("dp")), backend="aten")
    value, gradient = step(W, X)
    equal(value, loss(W, X))
    equal(gradient, one_device())
    w, x = sf.distribute((W, X), mesh, (P(None, "dp"), P("dp")))
    equal(sf.shard(sf.grad(loss), mesh, backend="aten")(w, x), one_device())
    summed = sf.shard_map(lambda r: sf.psum(r.sum(0), "dp"), mesh, P("dp"), P())
    equal(summed(X), X.sum(0))
    rows = sf.vmap(lambda r: (r @ W).sin())
    equal(sf.shard(rows, mesh, P("dp"), backend="aten")(X), (X @ W).sin())
    total = sf.scan(lambda c, r: (c + r, c * r), torch.zeros(3, dtype=F64), X)[0]
    equal(total, X.sum(0))
    buckets = sf.shard(sf.bucketed_grad(loss), mesh, (P(), P("dp")), backend="aten")
    equal(buckets(W, X)[1], one_device())


def simulated() -> None:
    """Programs of a fake world, what they cost, and what names the room that is not there."""
    with sf.fake_world(4):
        mesh = sf.make_mesh((4,), ("dp",))
        transforms(mesh)
        step = sf.shard(sf.grad(loss), mesh, (P(), P("dp")))
        low = step.lower(W, X)
        assert "all_reduce" in str(sf.explain(step, W, X))
        assert low.memory.peak > 0 and low.time("H100").compute > 0
        eagerly("shardfn.eager", lambda: step(W, X) + 1)
    with sf.fake_world(8, numerics=False):
        assert "all_reduce" in str(
            sf.shard(loss, sf.make_mesh((8,), ("dp",)), (P(), P("dp"))).lower(W, X)
        )
    sf.check(sf.grad(loss), W, X, worlds=(2,))
    equal(sf.jit(sf.grad(loss))(W, X), one_device())  # Inductor
    eagerly("shardfn.pictures", lambda: sf.optim)  # the first room that is absent
    eagerly("shardfn.pictures", lambda: sf.save)
    assert low._repr_html_() is None  # a notebook shows text
    eagerly("shardfn.pictures", low.draw)
    eagerly("shardfn.reports", low.report)


def eagerly(room: str, call: Any) -> None:
    """Check that a call names the room that it needs."""
    try:
        call()
    except ImportError as error:
        assert room in str(error), error
    else:
        raise AssertionError(f"{room} is there")


def ranks() -> None:
    """The same with real ranks, and law 6: ranks that would run other programs get an error."""
    mesh = sf.make_mesh((2,), ("dp",))
    transforms(mesh)
    equal(sf.shard(sf.grad(loss), mesh, (P(), P("dp")))(W, X), one_device())  # Inductor
    scale = 1.0 + int(os.environ["RANK"])
    try:
        sf.shard(lambda x: x * scale, mesh, P("dp"), backend="aten")(X)
    except sf.DivergenceError as error:
        assert "rank 1" in str(error), error
    else:
        raise AssertionError("other programs ran")
    try:
        sf.make_mesh((2,), ("dp",) if scale == 1.0 else ("tp",))
    except sf.DivergenceError as error:
        assert "ranks differ" in str(error), error
    else:
        raise AssertionError("other meshes were made")


if __name__ == "__main__":
    {"simulated": simulated, "ranks": ranks}[sys.argv[1]]()
    print(f"right, in {sf.__file__}")
