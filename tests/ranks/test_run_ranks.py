"""Ranks of a program of torch.distributed take turns in one process, or say why they cannot."""

from __future__ import annotations

import importlib
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardfn as sf
from shardfn.ranks.run_ranks import run_ranks


def run(n: int, each: Any) -> list[Any]:
    return run_ranks(lambda _: each(dist.get_rank()), n, name="each")


def test_ranks_have_an_environment_of_their_own() -> None:
    def each(rank: int) -> Any:
        dist.barrier()
        return os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]

    before = dict(os.environ)
    assert run(3, each) == [(str(r), "3", str(r)) for r in range(3)]
    assert dict(os.environ) == before


def test_ranks_have_random_numbers_of_their_own() -> None:
    def each(rank: int) -> Any:
        first = torch.rand(2), random.random()
        dist.barrier()
        torch.manual_seed(rank)
        dist.barrier()
        return *first, torch.rand(2)

    a, b = run(2, each)
    assert torch.equal(a[0], b[0]) and a[1] == b[1]
    for rank, own in enumerate((a, b)):
        assert torch.equal(own[2], torch.rand(2, generator=torch.Generator().manual_seed(rank)))


def test_ranks_that_all_wait_are_named_with_their_lines() -> None:
    def each(rank: int) -> None:
        if rank == 0:
            dist.all_reduce(torch.ones(2))
        elif rank == 1:
            dist.recv(torch.ones(3), 2, tag=5)

    with pytest.raises(sf.DivergenceError) as error:
        run(3, each)
    text = str(error.value)
    assert text.startswith("each: all ranks wait for each other\n")
    assert "rank 0 waits in all_reduce([2], SUM) at" in text
    assert "rank 1 waits in recv([3], 2, 5) at" in text
    assert "rank 2 has ended" in text and "test_run_ranks.py" in text


@pytest.mark.parametrize(
    "sizes, dtypes",
    [((2, 3), (torch.float32, torch.float32)), ((2, 2), (torch.float32, torch.float64))],
)
def test_tensors_that_differ_are_named(sizes: Any, dtypes: Any) -> None:
    def each(rank: int) -> None:
        dist.all_reduce(torch.ones(sizes[rank], dtype=dtypes[rank]))

    with pytest.raises(sf.DivergenceError, match="ranks enter different collectives"):
        run(2, each)


def test_the_order_of_asynchronous_collectives_of_two_groups_is_free() -> None:
    def each(rank: int) -> Any:
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        values = [torch.ones(1) * (rank + 1), torch.ones(1) * 10]
        order = (0, 1) if rank == 0 else (1, 0)
        works = [dist.all_reduce(values[i], group=groups[i], async_op=True) for i in order]
        for work in reversed(works):
            work.wait()
        return values

    assert run(2, each) == [[3.0, 20.0]] * 2


def test_a_loop_until_a_work_is_completed_lets_the_others_run() -> None:
    def each(rank: int) -> int:
        work = dist.barrier(async_op=True)
        turns = 0
        while not work.is_completed():
            turns += 1
        return turns

    assert max(run(3, each)) < 10


def test_messages_from_any_rank_arrive_and_say_from_whom() -> None:
    def each(rank: int) -> Any:
        if rank:
            dist.send(torch.full((2,), float(rank)), 0)
            return None
        x = torch.empty(2)
        return sorted((dist.recv(x), *x.tolist()) for _ in range(2))

    assert run(3, each)[0] == [(1, 1.0, 1.0), (2, 2.0, 2.0)]


def test_objects_stores_and_subgroups_work() -> None:
    def each(rank: int) -> Any:
        objects = [{"of": rank} if rank == 1 else None]
        dist.broadcast_object_list(objects, src=1)
        store = dist.distributed_c10d._get_default_store()
        if rank == 2:
            store.set("key", "value")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        total = torch.ones(1) * rank
        dist.all_reduce(total, group=mesh["b"].get_group())
        return objects[0], store.get("key"), total.item(), mesh["a"].get_local_rank()

    found = run(4, each)
    assert [x[0] for x in found] == [{"of": 1}] * 4 and found[3][1] == b"value"
    assert [x[2:] for x in found] == [(1, 0), (1, 0), (5, 1), (5, 1)]


def test_a_program_may_make_its_own_process_group() -> None:
    def each(rank: int) -> Any:
        dist.init_process_group("nccl")
        name = dist.get_backend()
        dist.destroy_process_group()
        return name, dist.is_initialized()

    assert run(2, each) == [("nccl", False)] * 2
    assert not dist.is_initialized()


def test_packages_that_keep_the_place_of_a_process_are_imported_once_for_each_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "accelerate"
    folder.mkdir()
    (folder / "__init__.py").write_text("from .state import PLACE")
    (folder / "state.py").write_text("import os\nPLACE = os.environ.get('RANK')")
    monkeypatch.syspath_prepend(tmp_path)
    outside = importlib.import_module("accelerate")

    def each(rank: int) -> Any:
        dist.barrier()
        importlib.import_module("accelerate")
        dist.barrier()
        return importlib.import_module("accelerate.state").PLACE

    assert run(3, each) == ["0", "1", "2"]
    assert sys.modules["accelerate"] is outside and outside.PLACE is None
    for name in ("accelerate", "accelerate.state"):
        monkeypatch.delitem(sys.modules, name)


def test_one_failed_rank_ends_the_others() -> None:
    ended = []

    def each(rank: int) -> None:
        try:
            if rank == 2:
                raise KeyError("x")
            dist.barrier()
        finally:
            ended.append(rank)

    with pytest.raises(KeyError) as error:
        run(4, each)
    assert error.value.__notes__ == ["raised on simulated rank 2 of 4"]
    assert sorted(ended) == [0, 1, 2, 3] or sorted(ended) == [0, 1, 2]
    assert not dist.is_initialized()


def test_a_sum_of_what_is_multiplied_is_that_of_nccl() -> None:
    """FSDP2 has it of NCCL, for set_gradient_divide_factor; Gloo lacks it."""

    def each(rank: int) -> float:
        x = torch.ones(1) * (rank + 1)
        dist.all_reduce(x, dist.ReduceOp.PREMUL_SUM(0.25))
        return x.item()

    assert run(3, each) == [1.5] * 3
