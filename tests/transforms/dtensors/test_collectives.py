"""torch's collectives in the code of one rank, as the prims that they are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardfn as sf
from shardfn import _compat
from shardfn.capture.dtensors import table
from shardfn.transforms.dtensors import _collectives as ours
from tests.support.stages.rank_code import mesh_of_ranks, ops

X = torch.ones(6, 4)


@pytest.fixture(name="mesh")
def _mesh() -> Iterator[Any]:
    with mesh_of_ranks() as mesh:
        yield mesh


def prims(fn: Any, *args: torch.Tensor) -> list[str]:
    """The ops of a function, without views."""
    views = ("view", "permute", "squeeze", "unsqueeze", "clone", "_unsafe_view")
    return [op for op in ops(fn, *args) if op.split()[0] not in views]


REDUCED = {
    "sum": ["psum dp False -> [6, 4]"],
    "avg": ["psum dp False -> [6, 4]", "div 2 -> [6, 4]"],
    "max": ["extremum dp max -> [6, 4]"],
    "min": ["extremum dp min -> [6, 4]"],
}


@pytest.mark.parametrize("kind", REDUCED)
def test_reductions_over_an_axis(mesh: Any, kind: str) -> None:
    group = mesh.get_group("dp")
    functional = lambda x: ours.functional_all_reduce(x, kind, group)
    assert prims(functional, X) == REDUCED[kind]
    op = getattr(dist.ReduceOp, kind.upper())
    in_place = lambda x: ours.all_reduce(x, op, group) or x
    assert prims(in_place, X) == [*REDUCED[kind], "copy_ -> [6, 4]"]


def test_without_a_group_all_ranks_are_meant(mesh: Any) -> None:
    found = prims(lambda x: ours.all_reduce(x) or x, X)
    assert found[0] == "psum dp,tp False -> [6, 4]"


def test_an_asynchronous_call_returns_a_handle(mesh: Any) -> None:
    handles = []

    def run(x: Any) -> Any:
        handles.append(ours.all_reduce(x, async_op=True))
        return x

    assert prims(run, X)[-1] == "copy_ -> [6, 4]"
    (handle,) = handles
    assert handle.wait() and handle.is_completed()


def test_gathers_and_scatters(mesh: Any) -> None:
    tp = mesh.get_group("tp")
    gather = lambda x: ours.functional_all_gather(x, 1, tp)
    assert prims(gather, X) == ["all_gather tp 3 0 -> [3, 6, 4]"]
    assert ops(gather, X)[-1].endswith("[6, 12]")
    scatter = lambda x: ours.functional_reduce_scatter(x, "avg", 0, tp)
    assert prims(scatter, X) == [
        "psum tp True -> [3, 2, 4]",
        "own_piece tp 3 0 -> [1, 2, 4]",
        "div 3 -> [2, 4]",
    ]


def test_results_are_written_to_out(mesh: Any) -> None:
    tp = mesh.get_group("tp")
    out = torch.zeros(18, 4)
    gather = lambda y, x: ours.all_gather_into_tensor(y, x, tp) or y
    assert prims(gather, out, X)[-1] == "copy_ -> [18, 4]"
    scatter = lambda y, x: ours.reduce_scatter_tensor(y, x, "sum", tp) or y
    assert prims(scatter, X[:2], X)[-1] == "copy_ -> [2, 4]"
    send = lambda y, x: ours.all_to_all_single(y, x, None, [2, 2, 2], tp) or y
    found = prims(send, X, X)
    assert found == ["all_to_all tp 3 0 1 -> [1, 3, 2, 4]", "copy_ -> [6, 4]"]


def test_unequal_splits_are_refused(mesh: Any) -> None:
    for call in (
        lambda: ours.all_to_all_single(X, X, None, [4, 2]),
        lambda: ours.functional_all_to_all(X, [4, 2], None, None),
    ):
        with pytest.raises(sf.CaptureError, match=r"split sizes \[4, 2\]"):
            call()


def test_a_broadcast_is_a_sum_of_one_ranks_value(mesh: Any) -> None:
    found = prims(lambda x: ours.functional_broadcast(x, 4, None), X)
    assert "eq 4 -> []" in found
    assert found[-2:] == ["where -> [6, 4]", "psum dp,tp False -> [6, 4]"]
    tp = mesh.get_group("tp")
    in_place = lambda x: ours.broadcast(x, group=tp, group_src=2) or x
    found = prims(in_place, X)
    assert found[:2] == ["axis_index tp -> []", "eq 2 -> []"]
    assert found[-1] == "copy_ -> [6, 4]"


def test_a_truth_value_is_sent_as_a_number(mesh: Any) -> None:
    module = lambda x: ours.of_rank(x, 0, ("tp",))
    found = prims(module, X > 0)
    assert found[0] == found[-1] == "_to_copy -> [6, 4]"
    assert ours.wait_tensor(X) is X


def test_ranks_and_coordinates_are_tensors(mesh: Any) -> None:
    number = ["axis_index dp -> []", "mul 3 -> []", "axis_index tp -> []"]
    assert prims(lambda x: x + ours.rank(), X)[:3] == number
    local = lambda x: x + ours.local_rank(mesh, "tp")
    assert prims(local, X)[:-1] == ["axis_index tp -> []"]
    both = lambda x: x + ours.coordinate(mesh)[0] * ours.coordinate(mesh)[1]
    found = [op for op in prims(both, X) if op.startswith("axis_index")]
    assert found == ["axis_index dp -> []", "axis_index tp -> []"] * 2


def test_torchs_own_calls_are_in_the_table() -> None:
    assert table.FUNCTIONS[dist.all_reduce] is ours.all_reduce
    assert table.OF_MESHES["get_coordinate"] is ours.coordinate
    for name, fn in ours.FUNCTIONAL.items():
        assert table.FUNCTIONS[_compat.FUNCTIONAL[name]] is fn
