"""The calls of DTensor in the code of one rank, as the prims that they are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardfn as sf
from shardfn.capture.dtensors import table
from shardfn.capture.dtensors.own_sizes import NeedsOwnSizes
from shardfn.capture.shard_map import axis_names
from shardfn.simulated import SimulatedTensor
from shardfn.transforms.dtensors import _calls as calls
from tests.support.stages.rank_code import mesh_of_ranks, ops

X = torch.ones(6, 4)
S, R = Shard(0), Replicate()


@pytest.fixture(name="mesh")
def _mesh() -> Iterator[Any]:
    with mesh_of_ranks() as mesh:
        yield mesh


def of_local(mesh: Any, placements: Any, **options: Any) -> Callable[..., Any]:
    return lambda x: calls.from_local(x, mesh, placements, **options)


def test_from_local_makes_the_global_tensor(mesh: Any) -> None:
    assert ops(of_local(mesh, [S, R]), X) == [
        "as_invariant tp -> [6, 4]",
        "prim_from_local dp:2=0,tp:3= -> [12, 4]",
        "prim_redistribute dp; -> [12, 4]",
    ]
    assert ops(of_local(mesh["tp"], None), X) == [
        "as_invariant tp -> [6, 4]",
        "prim_from_local tp:3= -> [6, 4]",
        "prim_redistribute ; -> [6, 4]",
    ]


def test_a_check_takes_the_tensor_of_the_first_rank(mesh: Any) -> None:
    found = ops(of_local(mesh, [S, R], run_check=True), X)
    assert found[:2] == ["axis_index tp -> []", "eq 0 -> []"]
    assert "psum tp False -> [6, 4]" in found


def test_terms_are_reduced_and_a_mean_is_divided_first(mesh: Any) -> None:
    assert ops(of_local(mesh, [Partial("avg"), Partial("max")]), X) == [
        "div 2 -> [6, 4]",
        "psum dp True -> [6, 4]",
        "extremum tp max -> [6, 4]",
        "prim_from_local dp:2=,tp:3= -> [6, 4]",
    ]
    assert ops(of_local(mesh, [Partial(), R]), X)[1] == "psum dp True -> [6, 4]"


def test_redistribute_places_the_tensor(mesh: Any) -> None:
    move = lambda **kw: ops(
        lambda x: calls.redistribute(x, "dp=S0,tp=R", mesh, [R, Shard(-1)], **kw), X
    )
    assert move() == ["prim_redistribute ;tp -> [6, 4]"]
    assert move(forward_dtype=torch.float64) == ["_to_copy -> [6, 4]", *move()]
    assert move(backward_dtype=torch.float64) == move()
    assert move(forward_dtype=X.dtype, backward_dtype=X.dtype) == move()
    same = lambda x: calls.redistribute(x, "dp=S0,tp=R", None, [R, R])
    assert ops(same, X) == ["prim_redistribute ; -> [6, 4]"]


REFUSED: dict[str, tuple[Any, type, str]] = {
    "no placements": (
        lambda mesh: calls.redistribute(X, "dp=S0", mesh),
        sf.CaptureError,
        "DTensor.redistribute: without placements",
    ),
    "another mesh": (
        lambda mesh: calls.redistribute(X, "dp=S0", mesh, [S, S]),
        sf.PlacementError,
        "the DTensor is on dp=S0, and the call names a mesh of axes ('dp', 'tp')",
    ),
    "a plain tensor": (
        lambda mesh: calls.redistribute(X, None, mesh, [S, S]),
        sf.CaptureError,
        "DTensor.redistribute: of a plain tensor",
    ),
    "to Partial": (
        lambda mesh: calls.redistribute(X, "dp=R,tp=R", mesh, [R, Partial()]),
        sf.PlacementError,
        "DTensor.redistribute: Partial over tp",
    ),
    "a dtype of the backward": (
        lambda mesh: calls.redistribute(X, "dp=R,tp=R", mesh, [R, R], backward_dtype="bfloat16"),
        sf.CaptureError,
        "DTensor.redistribute, backward_dtype: a str",
    ),
    "distributed to Partial": (
        lambda mesh: calls.distributed(X, mesh, [Partial(), R]),
        sf.PlacementError,
        "distribute_tensor: Partial over dp",
    ),
    "too few placements": (
        lambda mesh: calls.from_local(X, mesh, [S]),
        sf.PlacementError,
        "1 placements for a mesh of 2 axes",
    ),
    "a dim that is not": (
        lambda mesh: calls.from_local(X, mesh, [Shard(2), R]),
        sf.PlacementError,
        "Shard(2) of a tensor with 2 dims",
    ),
    "a sum unknown to us": (
        lambda mesh: calls.from_local(X, mesh, [Partial("product"), R]),
        sf.PlacementError,
        "product is not a placement that shardfn knows",
    ),
    "uneven shards": (
        lambda mesh: calls.to_local(X, "dp=R,tp=S1"),
        sf.PlacementError,
        "dim 1 of 4 elements, sharded over tp of 3 ranks",
    ),
    "another shape": (
        lambda mesh: calls.from_local(X, mesh, [S, R], shape=(11, 4)),
        sf.PlacementError,
        "shape (11, 4), of local tensors of shape (6, 4)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(mesh: Any, case: str) -> None:
    call, kind, text = REFUSED[case]
    with pytest.raises(kind) as caught:
        call(mesh)
    assert text in str(caught.value)


def test_to_local_is_a_ranks_shard_or_term(mesh: Any) -> None:
    local = lambda text: ops(lambda x: calls.to_local(x, text), X)
    assert local("dp=S0,tp=R") == ["prim_to_local dp:2=0,tp:3= -> [3, 4]"]
    assert local("dp=S0,tp=S0") == ["prim_to_local dp:2=0,tp:3=0 -> [1, 4]"]
    assert local("dp=Psum,tp=S0") == [
        "own_term dp sum -> [6, 4]",
        "prim_to_local dp:2=,tp:3=0 -> [2, 4]",
    ]


def test_uneven_shards_have_the_sizes_of_the_rank() -> None:
    with mesh_of_ranks((0, 2)):
        found = ops(lambda x: calls.to_local(x, "dp=R,tp=S1"), X)
        assert found == ["prim_to_local dp:2=,tp:3=1@0/4 -> [6, 0]"]
    with mesh_of_ranks(()), pytest.raises(NeedsOwnSizes):
        calls.to_local(X, "dp=R,tp=S1")


def test_a_global_shape_names_the_size_of_each_shard() -> None:
    with mesh_of_ranks((1, 0)) as mesh:
        make = of_local(mesh, [S, R], shape=(13, 4), stride=(4, 1))
        assert "prim_from_local dp:2=0@6/13,tp:3= -> [13, 4]" in ops(make, X)


def test_full_tensor_replicates_first(mesh: Any) -> None:
    assert ops(lambda x: calls.full_tensor(x, "dp=S0,tp=R"), X) == [
        "prim_redistribute ; -> [6, 4]",
        "prim_to_local dp:2=,tp:3= -> [6, 4]",
    ]


def test_distribute_tensor_takes_the_tensor_of_the_first_rank(mesh: Any) -> None:
    place = lambda **kw: ops(lambda x: calls.distributed(x, mesh, [S, S], **kw), X)
    assert place()[-2:] == ["psum dp,tp False -> [6, 4]", "prim_redistribute dp,tp; -> [6, 4]"]
    assert place(src_data_rank=None) == [
        "as_invariant dp,tp -> [6, 4]",
        "prim_redistribute dp,tp; -> [6, 4]",
    ]


def _sum_with(make: Callable[[], Any]) -> Callable[..., Any]:
    return lambda x: x + make()


def test_factories_take_a_shape_and_placements(mesh: Any) -> None:
    made = lambda name: table.FUNCTIONS[getattr(torch.distributed.tensor, name)]
    where = {"device_mesh": mesh, "placements": [S, R], "dtype": torch.float64}
    for name, op in {"zeros": "zeros", "ones": "ones", "empty": "zeros"}.items():
        for size in [(6, 4), ((6, 4),)]:
            make = functools.partial(made(name), *size, **where)
            found = ops(_sum_with(make), X)
            assert found[0] == f"{op} [6, 4] -> [6, 4]"
            assert found[1] == "prim_redistribute dp; -> [6, 4]"


def test_placements_are_read_back() -> None:
    with mesh_of_ranks():
        text = "dp=S1,tp=Pmax"
        assert calls.placements_of(text) == (Shard(1), Partial("max"))
        assert calls.partial_of(text) == text
        assert calls.partial_of("dp=S1,tp=R") == calls.partial_of(None) == ""
        with pytest.raises(sf.PlacementError, match="_StridedShard over tp"):
            calls.placements_of("dp=R,tp=?_StridedShard")


def test_in_shard_a_placement_is_a_constraint(mesh: Any) -> None:
    with axis_names.scope(mesh, "cpu"):
        for call in (
            lambda x: calls.redistribute(x, None, mesh, [S, R]),
            lambda x: calls.distributed(x, mesh, [S, R]),
        ):
            assert ops(call, X) == ["prim_redistribute dp; -> [6, 4]"]
        with pytest.raises(sf.CaptureError, match="it is code of one rank"):
            calls.from_local(X, mesh, [S, R])


def test_torchs_own_calls_are_in_the_table() -> None:
    assert table.METHODS["to_local"] is calls.to_local
    assert table.METHODS["redistribute"] is calls.redistribute
    assert table.FUNCTIONS[DTensor.from_local] is calls.from_local


@pytest.mark.parametrize("placed", [R, S])
def test_what_all_ranks_compute_alike_has_one_gradient(placed: Any) -> None:
    """Where eager torch adds up n equal terms, on n ranks."""
    w = X.to(torch.float64)

    def loss(d: Any) -> torch.Tensor:
        return (d.full_tensor(grad_placements=[Partial()]) ** 2).sum()

    with sf.fake_world(2):
        d = distribute_tensor(w, sf.make_mesh((2,), ("dp",)), [placed])
        found = sf.jit(sf.grad(loss))(d)
        torch.testing.assert_close(found.full_tensor(), 2 * w)


def test_distribute_tensor_takes_the_tensor_of_a_rank() -> None:
    own = [X, X + 100]

    def place(x: torch.Tensor, rank: int) -> torch.Tensor:
        return distribute_tensor(x, mesh, [S], src_data_rank=rank).full_tensor()

    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        for rank in range(2):
            found = sf.jit(lambda x, rank=rank: place(x, rank))(SimulatedTensor(own))
            assert torch.equal(found.shards[0], own[rank])
        with pytest.raises(sf.CaptureError, match="src_data_rank is 2, and axis dp has 2"):
            sf.jit(lambda x: place(x, 2))(X)
