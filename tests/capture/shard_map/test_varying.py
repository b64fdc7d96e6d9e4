"""Which values of per-rank code vary, as the Program shows it: `vary` stands where what all
ranks share meets a rank's own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.checkpoint

import shardfn as sf
from shardfn import P

X, W = torch.ones(4, 4), torch.ones(4, 4)


def ops(body: Any, ins: Any = None, outs: Any = None) -> list[str]:
    """The prims of a Program, with their axes."""
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        traced = sf.shard_map(
            body, mesh, ins or (P(), P("dp")), P("dp") if outs is None else outs, backend="aten"
        ).trace(W, X)
    found = [
        n
        for n in traced.program.graph.graph.nodes
        if getattr(n.target, "namespace", "") == "shardfn"
    ]
    return [
        f"{n.target._opname} {n.args[1]}" for n in found if not n.target._opname.startswith("prim_")
    ]


def test_what_all_share_meets_a_ranks_own_once() -> None:
    assert ops(lambda w, x: x @ w + x * w.sum()) == ["vary dp", "vary dp"]
    assert ops(lambda w, x: (x @ w) @ w) == ["vary dp"]


def test_what_all_share_stays_so_among_itself() -> None:
    assert ops(lambda w, x: (w @ w).sin(), outs=P()) == []
    assert ops(lambda w, x: w @ w + sf.psum(x.sum(), "dp"), outs=P()) == ["psum dp"]


def test_a_view_of_what_varies_anyhow_shares_its_sum() -> None:
    assert ops(lambda w, x: (x @ w) @ w.T) == ["vary dp"]
    assert ops(lambda w, x: (x @ w) * w[0]) == ["vary dp"]
    assert ops(lambda w, x: x * w[0]) == ["vary dp"]  # of the row alone


def test_axes_are_told_apart() -> None:
    body = lambda w, x: sf.psum(x @ w, "tp")
    assert ops(body, (P("tp", None), P("dp", "tp")), P("dp"))[-1] == "psum tp"
    assert ops(lambda w, x: x @ w, (P(None, "tp"), P("dp")), P("dp", "tp")) == [
        "vary dp",
        "vary tp",
    ]


def test_the_transpose_of_vary_is_a_sum_and_of_a_sum_vary() -> None:
    assert ops(sf.grad(lambda w, x: (x @ w).sum()), outs=P()) == ["vary dp", "psum dp"]
    assert ops(sf.grad(lambda w, x: sf.psum((x @ w).sum(), "dp")), outs=P()) == [
        "vary dp",
        "psum dp",
        "vary dp",
        "psum dp",
    ]


def test_a_checkpointed_part_is_read_too() -> None:
    body = lambda w, x: torch.utils.checkpoint.checkpoint(
        lambda w, x: (x @ w).sin() @ w, w, x, use_reentrant=False
    )
    assert ops(body) == ["vary dp"]


def test_a_program_without_per_rank_code_is_left_alone() -> None:
    traced = sf.grad(lambda w: (w @ w).sum()).trace(W)
    assert "vary(" not in str(traced)


VIEWS: dict[str, Any] = {
    "ravel": lambda y: y.ravel(),
    "adjoint": lambda y: y.adjoint(),
    "moveaxis": lambda y: y.moveaxis(0, 1),
    "swapdims": lambda y: y.swapdims(0, 1),
    "broadcast_to": lambda y: y.broadcast_to(4, 3),
    "as_strided": lambda y: y.as_strided((2, 2), (3, 1)),
    "view of a dtype": lambda y: y.view(torch.int64).view(torch.float64),
    "atleast_3d": torch.atleast_3d,
    "real": lambda y: y.real,
    "cpu": lambda y: y.cpu(),
    "conj": lambda y: y.conj(),
    "getitem": lambda y: y[1:],
    "flatten": torch.nn.Flatten(0),
}
OF_SEVERAL: dict[str, Any] = {
    "tensor_split": lambda y: y.tensor_split(2)[0],
    "hsplit": lambda y: y.hsplit(3)[1],
    "vsplit": lambda y: y.vsplit(2)[1],
    "split_with_sizes": lambda y: y.split_with_sizes([1, 3])[1],
    "unbind": lambda y: torch.unbind(y)[2],
}
COPIES: dict[str, Any] = {
    "to": lambda y: y.to(torch.float32),
    "contiguous": lambda y: y.t().contiguous(),
    "reshape": lambda y: y.t().reshape(12),
    "type_as": lambda y: y.type_as(y.float()),
}


def written(ways: dict[str, Any], x: torch.Tensor) -> list[torch.Tensor]:
    """What is read of a tensor that all ranks have, after a write through each view of it."""
    found = []
    for way in ways.values():
        y = torch.ones(4, 3, dtype=torch.float64)
        way(y).mul_(x.sum())
        found.append(y.square().sum())
    return found


def test_a_write_through_any_view_reaches_the_tensor() -> None:
    xs = torch.arange(1.0, 5.0, dtype=torch.float64)
    ways = VIEWS | OF_SEVERAL | COPIES
    loss = lambda x: torch.stack(written(VIEWS | COPIES, x))
    total = lambda x: sf.psum(loss(x).sum(), ("dp", "tp"))
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        own = P(("dp", "tp"))
        each = lambda x: torch.stack(written(ways, x))[:, None]
        wanted = torch.stack([each(x)[:, 0] for x in xs], 1)
        mapped = sf.shard_map(each, mesh, own, P(None, ("dp", "tp")), backend="aten")
        torch.testing.assert_close(sf.full(mapped(xs)), wanted)
        gradient = sf.grad(sf.shard_map(total, mesh, own, P(), backend="aten"))
        wanted = torch.stack([torch.func.grad(lambda x: loss(x).sum())(x) for x in xs])
        torch.testing.assert_close(sf.full(gradient(xs)), wanted)
