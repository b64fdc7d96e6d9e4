"""Checkpoints of simulated DTensors: the place of every rank's shard, each written once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint
from torch.distributed.tensor import DTensor, Partial

import shardfn as sf
from shardfn import P
from shardfn.eager.checkpoint import chunks, shard, write_items

X = torch.arange(35.0).view(7, 5)


def placed(spec: P, shape: tuple[int, ...] = (2, 3)) -> DTensor:
    mesh = sf.make_mesh(shape, ("a", "b")[: len(shape)])
    return sf.distribute(X, mesh, spec)


@pytest.mark.parametrize("spec", [P("a"), P("b", "a"), P(("a", "b")), P(("b", "a")), P(None, "b")])
def test_every_element_stands_in_the_shard_at_its_place(spec: P) -> None:
    with sf.fake_world(6):
        x = placed(spec)
        shards = x._local_tensor.shards
        for chunk, local in zip(chunks(x), shards, strict=True):
            slices = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            assert torch.equal(X[slices], local)


def test_a_shard_is_written_once_and_an_empty_one_not_at_all() -> None:
    with sf.fake_world(6):
        assert len(write_items("w", placed(P("a")))) == 2, "3 ranks hold each"
        assert len(write_items("w", placed(P()))) == 1
        rows = placed(P(("a", "b")))
        assert len(write_items("w", rows)) == len(
            {c.offsets for c in chunks(rows) if c.sizes.numel()}
        )


def test_an_item_finds_its_shard_by_number_or_place() -> None:
    with sf.fake_world(6):
        x = placed(P("a"))
        for item in write_items("w", x):
            index = item.index
            assert torch.equal(shard(x, index), X[index.offset[0] :][: len(shard(x, index))])


def test_ranks_of_other_stages_write_and_read_nothing() -> None:
    with sf.fake_world(4):
        x = sf.distribute(X, sf.make_mesh((2, 2), ("pp", "tp")), P("tp", pp=1))
        assert [tuple(c.offsets) for c in chunks(x)] == [(0, 0), (4, 0)]
        rows = write_items("w", x)
        assert len(rows) == 2
        for item, place in zip(rows, (2, 3), strict=True):
            assert shard(x, item.index) is x._local_tensor.shards[place]


def test_a_zigzag_is_two_blocks_of_each_rank() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("cp", "tp"))
        x = sf.distribute(X[:4, :4], mesh, P(sf.zigzag("cp"), sf.zigzag("tp")))
        assert len(chunks(x)) == 16 and len({tuple(c.offsets) for c in chunks(x)}) == 16
        assert [tuple(c.offsets) for c in chunks(x)[:4]] == [(0, 0), (0, 3), (3, 0), (3, 3)]
        for item in write_items("w", x):
            (row, column) = item.index.offset
            assert torch.equal(shard(x, item.index), X[row : row + 1, column : column + 1])


def test_a_zigzag_whose_chunks_another_axis_shards_is_two_blocks_of_each_rank() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("tp", "cp"))
        whole = torch.arange(32.0).view(8, 4)
        x = sf.distribute(whole, mesh, P((sf.zigzag("cp"), "tp")))
        rows = [c.offsets[0] for c in chunks(x)]
        assert rows == [0, 6, 2, 4, 1, 7, 3, 5]
        for item in write_items("w", x):
            row, _ = item.index.offset
            assert torch.equal(shard(x, item.index), whole[row : row + 1])


def test_a_partial_value_is_refused() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("a",))
        x = sf.from_local(torch.ones(2), mesh, [Partial()])
        with pytest.raises(sf.ShardError) as caught:
            chunks(x)
    assert "needed: Shard and Replicate" in str(caught.value)
