"""The table of prims of per-rank code: every row is full, and a new prim is one row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from worlds import simulated

import shardfn as sf
from shardfn import P, partition  # noqa: F401  partition fills its part of the rows
from shardfn.ops import prims, shard_map
from shardfn.ops.prims import CALLS, PRIMS, Prim, constants_of, implement
from shardfn.partition.propagation import walk_shard_map

ROWS = [pytest.param(row, id=row.call.__name__) for row in PRIMS.values()]
SAMPLES: dict[Callable[..., Tensor], tuple[Any, ...]] = {
    shard_map.to_local: ("a:2=1",),
    shard_map.from_local: ("a:2=1",),
    shard_map.vary: ("a",),
    shard_map.as_invariant: ("a",),
    shard_map.own_term: ("a", "sum"),
    shard_map.no_cotangent: ("a",),
    shard_map.vary_in_value: ("a",),
    shard_map.vary_equal: ("a",),
    shard_map.undecided: ("a", shard_map.UNDECIDED, ""),
    shard_map.as_equal: ("a",),
    shard_map.psum: ("a", False),
    shard_map.extremum: ("a", "max"),
    shard_map.all_gather: ("a", 2, 1),
    shard_map.own_chunk: ("a", 2, 1),
    shard_map.all_to_all: ("a", 2, 0, 1),
    shard_map.ppermute: ("a", "0>1"),
    shard_map.ragged_all_to_all: ("a", 2, 4, 5),
}


def sample(call: Callable[..., Tensor], device: str = "cpu") -> tuple[Any, ...]:
    """The operand of a prim, if it takes one, and the constants of its sample."""
    has_operand = CALLS[call].batched_operand is not None
    counts = [torch.ones(2, 2, dtype=torch.int64, device=device)] if has_operand else []
    return (*counts, *SAMPLES[call])


def as_graph(fn: Callable[[Tensor], Tensor], x: Tensor) -> torch.fx.Graph:
    """What a function does to a fake tensor, as ops."""
    traced = make_fx(fn, tracing_mode="fake")
    return traced(x).graph


def test_every_prim_that_takes_a_tensor_has_a_sample_here() -> None:
    assert set(SAMPLES) == CALLS.keys() - {shard_map.axis_index}


@pytest.mark.parametrize("row", ROWS)
def test_every_prim_can_be_found_and_placed(row: Prim) -> None:
    assert PRIMS[row.op] is CALLS[row.call] is row
    assert row.place is not None


@pytest.mark.parametrize("call", SAMPLES)
def test_every_prim_of_a_tensor_has_a_transpose_or_two_derivatives(
    call: Callable[..., Tensor],
) -> None:
    row = CALLS[call]
    assert (row.transpose is None) == (row.jvp is not None) == (row.vjp is not None)


# left out: capture narrows as_invariant to the axes over which its tensor varies, and the others
# are of values that vary in name, or have no gradient
IN_NAME = shard_map.as_invariant, shard_map.vary_equal, shard_map.as_equal, shard_map.undecided
LINEAR = [c for c in SAMPLES if CALLS[c].transpose and c not in IN_NAME]


@pytest.mark.parametrize("call", LINEAR)
def test_a_transpose_has_the_shape_of_the_tensor_and_varies_the_other_way_round(
    call: Callable[..., Tensor],
) -> None:
    def traced(x: Tensor) -> Tensor:
        row, constants = CALLS[call], sample(call)
        assert row.transpose is not None
        return row.transpose(row.op(x, *constants), *constants)

    graph = as_graph(traced, torch.ones(4, 6))
    calls = [PRIMS[n.target] for n in graph.nodes if n.target in PRIMS]
    forward, backward = calls
    assert graph.find_nodes(op="output")[0].args[0].meta["val"].shape == (4, 6)
    assert (backward.takes_varying, backward.gives_varying) == (
        forward.gives_varying,
        forward.takes_varying,
    )


@pytest.mark.parametrize("call", SAMPLES)
def test_batching_commutes_with_the_fake_kernel(call: Callable[..., Tensor]) -> None:
    row, constants = CALLS[call], sample(call, "meta")
    x = torch.empty(4, 6, device="meta")
    dim = 0 if row.batched_operand is None else row.batched_operand(constants[0])
    batched = torch.empty(3, 4, 6, device="meta").movedim(0, dim)
    alone = row.op(x, *constants)
    together = row.op(batched, *row.batched(*constants))
    assert together.movedim(dim, 0).shape == (3, *alone.shape)


def test_a_batched_operand_has_its_dim_in_front() -> None:
    row, (_, *constants) = CALLS[shard_map.ragged_all_to_all], sample(shard_map.ragged_all_to_all)
    x = torch.empty(3, 4, 6, device="meta")
    counts = torch.ones(3, 2, 2, dtype=torch.int64, device="meta")
    assert row.op(x, counts, *constants).shape == (3, 5, 6)


def place(walk: Any, node: torch.fx.Node) -> None:
    axis, n, by = constants_of(node)
    pairs = tuple((k, (k + by) % n) for k in range(n))
    walk_shard_map.permute(walk, node, axis, pairs)


@pytest.fixture(scope="module")
def rotate() -> Iterator[Callable[..., Tensor]]:
    """A prim that only this file knows: what the rank has that is `by` ranks before this one."""

    @prims.prim(
        name="test_rotate", axes=prims.one_axis, takes_varying=True, gives_varying=True, place=place
    )
    def rotate(x: torch.Tensor, axis: str, n: int, by: int) -> torch.Tensor:
        return torch.empty_like(x)

    implement(rotate, transpose=lambda g, axis, n, by: rotate(g, axis, n, -by))
    yield rotate
    row = CALLS.pop(rotate)
    del PRIMS[row.op]


X = torch.arange(6.0, dtype=torch.float64).reshape(3, 2)
W = torch.tensor([[2.0, 3.0], [5.0, 7.0], [11.0, 13.0]], dtype=torch.float64)


def sharded(body: Callable[..., Tensor], spec: P) -> Callable[..., Tensor]:
    """Per-rank code on three simulated ranks."""

    def run(*args: Tensor) -> Tensor:
        with simulated(a=3) as mesh:
            ins = tuple(spec for _ in args)
            return sf.full(sf.shard_map(body, mesh, ins, spec, backend="aten")(*args))

    return run


def test_a_new_prim_runs_in_shard_map(rotate: Callable[..., Tensor]) -> None:
    run = sharded(lambda x: rotate(x, "a", 3, 1), P("a"))
    assert torch.equal(run(X), X.roll(1, 0))


def test_a_new_prim_is_differentiated(rotate: Callable[..., Tensor]) -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        return sf.grad(lambda y: (rotate(y, "a", 3, 1) * w).square().sum())(x)

    expected = sf.grad(lambda y: (y.roll(1, 0) * W).square().sum())(X)
    assert torch.equal(sharded(body, P("a"))(X, W), expected)


def test_a_new_prim_is_batched(rotate: Callable[..., Tensor]) -> None:
    body = sf.vmap(lambda x: rotate(x, "a", 3, 2), 1, 1)
    assert torch.equal(sharded(body, P("a"))(X), X.roll(2, 0))


def test_a_value_that_all_ranks_share_is_made_varying_for_a_new_prim(
    rotate: Callable[..., Tensor],
) -> None:
    body = lambda x: rotate(x.sum(0, keepdim=True), "a", 3, 1)
    with simulated(a=3) as mesh:
        traced = sf.shard_map(body, mesh, P(), P("a"), backend="aten").trace(X)
    graph = traced.program.graph.graph
    calls = [PRIMS[n.target].call for n in graph.nodes if n.target in PRIMS]
    assert calls[1:3] == [shard_map.vary, rotate]
