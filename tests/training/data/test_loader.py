"""loader: the batches of one device on every world, read by rows, and resumed on another one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from message import without_line
from ranks import run_ranks
from torch.utils.data import DataLoader, IterableDataset

import shardfn as sf
from shardfn import P

SIZE, BATCH = 13, 5  # batches of 5, 5 and 3


class Squares:
    """A dataset that counts what is read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        self.read.append(i)
        return {"x": torch.full((2,), float(i)), "y": torch.tensor(i * i)}


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(SIZE):
            yield torch.randn(2, dtype=torch.float64)


class Counter:
    """An iterable with a state of its own, which cannot be read from its start again."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < 5:
            self.at += 1
            yield torch.full((3,), self.at)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def shuffled(**options: Any) -> DataLoader[Any]:
    options = {"batch_size": BATCH, "shuffle": True, **options}
    return DataLoader(Squares(), **options)  # type: ignore[arg-type]


def with_generator() -> DataLoader[Any]:
    return shuffled(generator=torch.Generator().manual_seed(7))


def mesh_of(n: int) -> Any:
    return sf.make_mesh((n,), ("dp",))


def numbers(batches: Any) -> list[list[int]]:
    """The samples of each batch."""
    out = []
    for batch in batches:
        whole = sf.full(batch)
        rows = whole["y"] if isinstance(whole, dict) else whole
        out.append(rows.tolist())
    return out


def test_every_world_reads_the_same_batches_and_each_rank_its_rows() -> None:
    with sf.fake_world(1):
        wanted = numbers(sf.loader(shuffled(), mesh_of(1), P("dp")))
    assert [len(rows) for rows in wanted] == [5, 5, 3]
    every = [x for rows in wanted for x in rows]
    assert sorted(every) == [i * i for i in range(SIZE)]
    with sf.fake_world(4):  # the last batch is 1, 1, 1 and none
        loader = sf.loader(shuffled(), mesh_of(4), P("dp"))
        assert numbers(loader) == wanted
        assert numbers(loader) != wanted  # another pass, another order
    for found, read in run_ranks(2, _on_a_rank):
        assert found == wanted
        assert len(read) in (3 + 3 + 2, 2 + 2 + 1)


def _on_a_rank() -> Any:
    data: Any = shuffled()
    batches = numbers(sf.loader(data, mesh_of(2), P("dp")))
    return batches, data.dataset.read


def test_the_order_of_a_generator_is_that_of_torch() -> None:
    wanted = [batch["y"].tolist() for batch in with_generator()]
    with sf.fake_world(3):
        assert numbers(sf.loader(with_generator(), mesh_of(3), P("dp"))) == wanted


def test_workers_read_the_same_batches() -> None:
    with sf.fake_world(2):
        wanted = numbers(sf.loader(shuffled(), mesh_of(2), P("dp")))
        workers = shuffled(num_workers=1, multiprocessing_context="fork")
        assert numbers(sf.loader(workers, mesh_of(2), P("dp"))) == wanted


DATA = {
    "shuffled": shuffled,
    "with a generator": with_generator,
    "a stream": lambda: DataLoader(Stream(), batch_size=BATCH),
    "a list": lambda: [torch.arange(i, i + 3) for i in range(5)],
    "a state of its own": Counter,
}


@pytest.mark.parametrize("after", [0, 1, 3, 4], ids=lambda n: f"after {n}")
@pytest.mark.parametrize("kind", DATA)
def test_it_resumes_on_another_number_of_ranks(tmp_path: Path, kind: str, after: int) -> None:
    with sf.fake_world(3):
        loader = sf.loader(DATA[kind](), mesh_of(3), P("dp"))
        feed = endless(loader)
        numbers(next(feed) for _ in range(after))
        sf.save(tmp_path, {"loader": loader})
        wanted = numbers([next(feed)])
    with sf.fake_world(2):
        loader = sf.loader(DATA[kind](), mesh_of(2), P("dp"), seed=5)
        loader = sf.load(tmp_path, {"loader": loader})["loader"]
        assert loader.state_dict()["epoch"] in (0, 1)
        assert numbers([next(endless(loader))]) == wanted


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def test_a_pass_that_is_left_is_over() -> None:
    with sf.fake_world(2):
        loader = sf.loader([torch.arange(2), torch.ones(2)], mesh_of(2), P("dp"))
        next(iter(loader))
        assert len(list(loader)) == len(loader) == 2
        assert loader.state_dict()["epoch"] == 2


def test_torchs_stateful_loader() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    with sf.fake_world(2):
        data = lambda: stateful.StatefulDataLoader(Stream(), batch_size=BATCH)
        loader = sf.loader(data(), mesh_of(2), P("dp"))
        feed = iter(loader)
        next(feed)
        state = loader.state_dict()
        wanted = [sf.full(x) for x in feed]
        loader = sf.loader(data(), mesh_of(2), P("dp"))
        loader.load_state_dict(state)
        assert len([*loader]) == len(wanted) == 2


def _unequal() -> Any:
    """The errors of loaders whose ranks differ."""
    rank = torch.distributed.get_rank()
    mesh = mesh_of(2)

    def failing() -> Iterator[Any]:
        yield torch.ones(2)
        if rank:
            raise OSError("the disk is gone")
        yield torch.ones(2)

    def padded(rows: Any) -> Any:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    ragged = DataLoader([torch.ones(n) for n in (1, 2, 3, 4)], 4, collate_fn=padded)  # type: ignore[arg-type]
    cases = {
        "fewer": [torch.ones(2)] * (3 - rank),
        "other values": [torch.ones(2), torch.full((2,), float(rank))],
        "other shapes": [torch.ones(2 + rank)],
        "failing": failing(),
    }
    found = {}
    for case, data in cases.items():
        with pytest.raises((sf.ShardError, OSError)) as error:
            list(sf.loader(data, mesh, P("dp")))
        found[case] = without_line(error.value)
    with pytest.raises(sf.DivergenceError) as error:
        list(sf.loader(ragged, mesh, P("dp"), rows=True))
    found["padded"] = without_line(error.value)
    by_default = [sf.full(x).shape for x in sf.loader(ragged, mesh, P("dp"))]
    return found, by_default


def test_ranks_that_read_other_batches_are_named() -> None:
    (first, shapes), (second, _) = run_ranks(2, _unequal)
    assert shapes == [(4, 4)]
    fix = (
        "\n  needed: the same global batch on every rank\n  try: use the same seed on every "
        "rank, no DistributedSampler, and a collate_fn that pads to one length"
    )
    wanted = {
        "fewer": "loader, batch 2: the batch exists on rank 0, but not on rank 1\n  needed: the \
same "
        "number of batches on every rank\n  try: use a loader of global batches, which are "
        "the same on every rank",
        "other values": "loader, batch 1: ranks 0 and 1 read different values: batch float32[2]"
        + fix,
        "other shapes": "loader, batch 0: rank 0: batch float32[2]\n"
        "  rank 1: batch float32[3]" + fix,
        "failing": "loader, batch 1: rank 1: OSError: the disk is gone\n"
        "  try: read the error message of the failed rank",
        "padded": "loader, batch 0: rank 0: batch float32[*, 2]\n"
        "  rank 1: batch float32[*, 4]" + fix,
    }
    assert first == wanted
    assert second == {**wanted, "failing": "the disk is gone"}
