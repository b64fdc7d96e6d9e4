"""Each row of the table in docs/dtensor.md runs, and each cell says what happens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as placed
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.nn import functional as forms
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from worlds import SimulatedTensor

import shardfn as sf
from shardfn import P
from tests.support.reading.source import ROOT
from tests.transforms.test_flattened import Pair

ROWS = [torch.arange(8.0).view(4, 2), torch.arange(8.0).view(4, 2) + 10]
X = torch.cat(ROWS)
S, R, C = [Shard(0)], [Replicate()], [Shard(1)]
HEAD = "| construct |"


def same(x: torch.Tensor) -> list[torch.Tensor]:
    return [x, x]


@attrs.frozen
class Row:
    """A construct in a function of x and a mesh.

    Args:
        fn: code of one rank, or of global tensors.
        wanted: on each rank. None where it is refused.
        in_shard: the result of `shard`. None where it is refused.
    """

    fn: Callable[[Any, Any], Any]
    wanted: list[torch.Tensor] | None
    in_shard: torch.Tensor | None = None


def in_place(x: Any, mesh: Any) -> Any:
    total, first, rows = x * 1, x * 1, [torch.empty_like(x) for _ in range(2)]
    dist.all_reduce(total)
    dist.broadcast(first, 0)
    dist.all_gather(rows, x)
    part = x.new_empty(2, 2)
    dist.reduce_scatter_tensor(part, x, op=dist.ReduceOp.MAX)
    return total + first + sum(rows) + part.sum(), rows[0]


def returned(x: Any, mesh: Any) -> Any:
    total = functional.all_reduce(x, "sum", mesh)
    other = functional.permute_tensor(x.flatten(), [1, 0], mesh.get_group())
    return total + forms.all_reduce(x) + other.view(4, 2)


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


def as_constants(x: Any, mesh: Any) -> Any:
    d = DTensor.from_local(x, mesh, S)
    is_right = d.placements[0].is_shard(0) and type(d) is DTensor
    return x + (1 if is_right and isinstance(d, DTensor) and d.device_mesh == mesh else 0)


def mapped(x: Any, mesh: Any) -> Any:
    double = local_map(lambda y: y * 2, out_placements=(S,), in_placements=(S,), device_mesh=mesh)
    return double(DTensor.from_local(x, mesh, S)).to_local()


def filled(x: Any, mesh: Any) -> Any:
    d = placed.ones(4, 2, device_mesh=mesh, placements=S)
    return (d + placed.full((4, 2), 2.0, device_mesh=mesh, placements=S)).full_tensor()


def drawn(x: Any, mesh: Any) -> Any:
    d = placed.rand(4, 2, device_mesh=mesh, placements=S)
    return (d >= 0).full_tensor() * 1.0


def called(mesh: Any, is_parallel: bool) -> Any:
    net: Any = nn.Linear(2, 4, bias=False)
    held = {"weight": distribute_tensor(torch.ones(4, 2), mesh, S)}
    if is_parallel:
        style = ColwiseParallel(use_local_output=False)
        net = parallelize_module(net, mesh, style)
    return lambda x: torch.func.functional_call(net, held, (x,)).sum(-1)


def ranked(x: Any, mesh: Any) -> Any:
    numbers = dist.get_rank() + mesh.get_group().rank() * 10
    return x + numbers + mesh.get_local_rank() * 100 + mesh.get_coordinate()[0] * 1000


def sized(x: Any, mesh: Any) -> Any:
    return x + mesh.size() + mesh["dp"].size() + mesh.ndim + dist.get_world_size()


def flat(x: Any, mesh: Any) -> Any:
    return x * mesh._flatten("every").size()


def within(x: Any, mesh: Any) -> Any:
    with mesh:
        return distribute_tensor(x, None, R).redistribute(None, S).full_tensor()


def lost(x: Any, mesh: Any) -> Any:
    labels = torch.arange(x.shape[0]) % 2
    logits = distribute_tensor(x, mesh, C)
    with loss_parallel():
        return F.cross_entropy(logits, labels, reduction="none").full_tensor()


def of_losses(x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, torch.arange(len(x)) % 2, reduction="none")


def barred(x: Any, mesh: Any) -> Any:
    dist.barrier()
    return x * 1


def on_parts(x: Any, mesh: Any) -> Any:
    return DTensor.from_local(x, mesh["dp"], S).full_tensor()


BOTH = ROWS[0] + ROWS[1]
TABLE: dict[str, Row] = {
    "`DTensor.from_local`": Row(lambda x, m: DTensor.from_local(x, m, S).full_tensor(), same(X)),
    "`x.redistribute`": Row(
        lambda x, m: distribute_tensor(x, m, R).redistribute(m, C).full_tensor(), same(ROWS[0]), X
    ),
    "`x.to_local`": Row(
        lambda x, m: distribute_tensor(x, m, S).to_local(), [ROWS[0][:2], ROWS[0][2:]]
    ),
    "`x._local_tensor`": Row(
        lambda x, m: distribute_tensor(x, m, S)._local_tensor, [ROWS[0][:2], ROWS[0][2:]]
    ),
    "`x.placements`": Row(as_constants, [x + 1 for x in ROWS]),
    "`local_map`": Row(mapped, [x * 2 for x in ROWS]),
    "`torch.distributed.tensor.zeros`": Row(
        filled, same(torch.full((4, 2), 3.0)), torch.full((4, 2), 3.0)
    ),
    "`torch.distributed.tensor.rand`": Row(drawn, same(torch.ones(4, 2)), torch.ones(4, 2)),
    "ops of DTensors": Row(
        lambda x, m: (distribute_tensor(x, m, S) * 2 + 1).full_tensor(),
        same(ROWS[0] * 2 + 1),
        X * 2 + 1,
    ),
    "`dist.all_reduce`": Row(
        lambda x, m: in_place(x, m)[0],
        [BOTH * 2 + ROWS[0] + ROWS[1][2 * k :][:2].sum() for k in range(2)],
    ),
    "functional collectives": Row(returned, [BOTH * 2 + ROWS[1 - k] for k in range(2)]),
    "a `torch.autograd.Function`": Row(
        lambda x, m: sf.grad(lambda x: (Summed.apply(x) ** 2).sum())(x), same(2 * BOTH)
    ),
    "`dist.get_rank`": Row(ranked, [ROWS[0], ROWS[1] + 1111]),
    "`dist.get_process_group_ranks`": Row(
        lambda x, m: x + dist.get_global_rank(m.get_group(), 1),
        [x + 1 for x in ROWS],
        X + 1,  # of all ranks a constant
    ),
    "sizes, shapes and names": Row(sized, [x + 7 for x in ROWS], X + 7),
    "`mesh[": Row(flat, [x * 2 for x in ROWS], X * 2),
    "`with mesh:`": Row(within, same(ROWS[0]), X),
    "`with loss_parallel():`": Row(lost, same(of_losses(ROWS[0])), of_losses(X)),
    "`dist.gather`": Row(barred, None),
    "DTensors on a submesh": Row(on_parts, same(X)),
}
OTHERS = {  # with arguments of their own, below
    "`torch.func.functional_call",
    "a DTensor that the function closes over",
    "a wrapper tensor",
    "a mesh as an argument",
}
GOES = ("yes", "constants", "a tensor", "tensors", "a constraint", "constraints")
GOES += ("as `to_local`", "the same")
GOES += (
    "the current mesh",
    "values made inside",
    "arguments, results",
    "a constant",
    "an input",
    "a global",
)


def rows() -> list[list[str]]:
    text = Path(ROOT, "docs", "dtensor.md").read_text()
    lines = text[text.index(HEAD) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def cells(name: str) -> list[str]:
    """The cells for jit, shard_map and shard of the one row of a construct."""
    (row,) = [row for row in rows() if row[0].startswith(name)]
    assert len(row) == 4
    return row[1:]


def test_every_row_is_run() -> None:
    names = [*TABLE, *OTHERS]
    for construct, *_ in rows():
        assert sum(construct.startswith(name) for name in names) == 1, construct
    assert len(rows()) == len(names)


@pytest.mark.parametrize("name", TABLE)
def test_a_row_says_what_happens(name: str) -> None:
    row = TABLE[name]
    by_jit, by_map, by_shard = cells(name)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        fn = lambda x: row.fn(x, mesh)
        staged = [
            sf.jit(fn, backend="aten"),
            sf.shard_map(fn, mesh, P("dp"), P("dp"), backend="aten"),
            sf.shard(fn, mesh, P("dp"), backend="aten"),
        ]
        if row.wanted is None:
            assert {by_jit, by_map, by_shard} == {"refused"}
            for call in staged:
                with pytest.raises(sf.ShardError) as caught:
                    call(X)
                assert caught.value.fix
            return
        assert by_jit.startswith(GOES) and by_map.startswith(GOES)
        found = staged[0](SimulatedTensor(ROWS))
        shards = found.shards if isinstance(found, SimulatedTensor) else same(found)
        torch.testing.assert_close(shards, row.wanted)
        whole = sf.full(staged[1](X))
        torch.testing.assert_close(whole, torch.cat(row.wanted))
        if row.in_shard is None:
            assert by_shard.startswith("refused")
            with pytest.raises(sf.ShardError) as caught:
                staged[2](X)
            assert caught.value.fix
        else:
            assert by_shard.startswith((*GOES, "refused")), by_shard
            torch.testing.assert_close(sf.full(staged[2](X)), row.in_shard)


def test_rows_of_arguments_and_closed_over_values() -> None:
    for name in OTHERS:
        assert all(cell.startswith(GOES) for cell in cells(name)), name
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        d = distribute_tensor(X, mesh, S)
        wraps = (
            lambda fn: sf.jit(fn, backend="aten"),
            lambda fn: sf.shard(fn, mesh, backend="aten"),
        )
        for wrap in wraps:
            torch.testing.assert_close(sf.full(wrap(lambda x: d * x)(d)), X * X)
            pair = wrap(lambda p: p * 2)(Pair(d, d))
            torch.testing.assert_close(sf.full(pair.a), X * 2)
        given = distribute_tensor(X, mesh, R)
        with torch.no_grad():
            for wrap, is_parallel in zip(wraps, (True, False), strict=True):
                out = wrap(called(mesh, is_parallel))(given)
                torch.testing.assert_close(sf.full(out), X.sum(-1) * 4)
            with pytest.raises(sf.ShardError):
                wraps[1](called(mesh, True))(given)
        for again in (mesh, sf.make_mesh((2,), ("dp",))):
            fn = lambda x, mesh: DTensor.from_local(x, mesh, S).full_tensor()
            out = sf.jit(fn, backend="aten")(SimulatedTensor(ROWS), again)
            torch.testing.assert_close(out.shards, same(X))
        local = lambda x: x + d.to_local().sum() + Pair(x, x).a.sum()
        out = sf.shard_map(local, mesh, P("dp"), P("dp"), backend="aten")(X)
        wanted = [x + 2 * x.sum() for x in ROWS]
        torch.testing.assert_close(sf.full(out), torch.cat(wanted))
