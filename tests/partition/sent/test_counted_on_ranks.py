"""What a lowered program says it sends is what real ranks hand to the collectives, to the byte."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

import shardfn as sf
from shardfn import P

KINDS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
GATHERS = {"all_gather_into_tensor"}  # counted by what they return


class Counted(TorchDispatchMode):
    """Collectives as they are called: their kinds and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: collections.Counter[tuple[str, int]] = collections.Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        name = op._opname.rstrip("_")
        if op.namespace == "_c10d_functional" and name in KINDS:
            x = out if name in GATHERS else args[0]
            self.sent[KINDS[name], x.nbytes] += 1
        return out


def mlp(w: Any, x: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x @ w["up"]) @ w["down"]).square().mean()


def strided(w: Any, x: torch.Tensor) -> torch.Tensor:
    """Sequence first: the batch is an inner part of a merged dim."""
    h = (x.flatten(0, 1) @ w["up"]).unflatten(0, x.shape[:2])
    return (h.tanh() @ w["down"]).square().mean()


def experts(w: Any, x: torch.Tensor) -> torch.Tensor:
    chosen = (x @ w["router"]).argmax(-1)
    order = chosen.argsort()
    rows = x[order] * w["scale"][chosen[order]]
    return torch.zeros_like(x).index_add(0, order, rows @ w["up"]).square().mean()


def scanned(w: Any, x: torch.Tensor) -> torch.Tensor:
    h, _ = sf.scan(lambda c, a: (torch.tanh(c @ a), None), x, w)
    return h.square().mean()


def recurrent(net: torch.nn.LSTM) -> tuple[Callable[..., torch.Tensor], Any]:
    fn, params, buffers = sf.functionalize(net)
    return lambda w, x: fn(w, buffers, x)[0][0].square().mean(), params


def programs() -> dict[str, tuple[Callable[..., Any], Any, torch.Tensor, Any, Any]]:
    """A loss, its parameters and batch, and the placements of both."""
    r = torch.randn
    net = {"up": r(7, 11), "down": r(11, 7)}
    moe = {"router": r(7, 3), "scale": r(3, 1), "up": r(7, 7)}
    lstm, weights = recurrent(torch.nn.LSTM(5, 7))
    columns = {"up": P(None, "a"), "down": P("a")}
    return {
        "data parallel": (mlp, net, r(9, 7), P(), P("a")),
        "fully sharded": (mlp, net, r(9, 7), P("a"), P("a")),
        "tensor parallel": (mlp, net, r(9, 7), columns, P()),
        "on the wrong dims": (mlp, net, r(9, 7), P(None, "a"), P("a")),
        "strided": (strided, net, r(5, 9, 7), P(), P(None, "a")),
        "strided and sharded": (strided, net, r(5, 9, 7), P("a"), P(None, "a")),
        "experts": (experts, moe, r(9, 7), P(), P("a")),
        "experts sharded": (experts, moe, r(9, 7), P("a"), P("a")),
        "scan": (scanned, r(3, 7, 7), r(9, 7), P(None, "a"), P("a")),
        "lstm": (lstm, weights, r(4, 9, 5), P("a"), P(None, "a")),
    }


def counted() -> dict[str, tuple[Any, Any]]:
    """For each program, what is stated and what is counted on this rank."""
    torch.manual_seed(0)
    mesh = sf.make_mesh((torch.distributed.get_world_size(),), ("a",))
    found = {}
    for name, (loss, w, x, of_w, of_x) in programs().items():
        step = sf.shard(sf.value_and_grad(loss), mesh, (of_w, of_x), backend="aten")
        stated = collections.Counter((c.kind, c.nbytes) for c in step.lower(w, x).collectives)
        step(w, x)
        with Counted() as seen:
            step(w, x)
        found[name] = dict(stated), dict(seen.sent)
    return found


def test_the_stated_bytes_are_those_that_real_ranks_send() -> None:
    for found in run_ranks(2, counted):
        for name, (stated, sent) in found.items():
            assert sent == stated, name
        assert all(sent for _, sent in found.values())
