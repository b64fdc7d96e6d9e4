"""Plans of torch.distributed.checkpoint: who writes and who reads a chunk."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P
from shardfn._compat.distributed.checkpoint_files import Items
from shardfn._compat.distributed.checkpoint_plans import global_save


def test_each_rank_reads_its_own_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all, each byte once for each rank that holds it."""
    read: list[int] = []
    chunk = Items._chunk

    class Counted:
        """The bytes of a chunk, of which slices are read."""

        def __init__(self, raw: torch.Tensor) -> None:
            self.raw = raw

        def __getitem__(self, slices: Any) -> torch.Tensor:
            read.append(self.raw[slices].nbytes)
            return self.raw[slices]

    def counted(items: Items, index: Any) -> Any:
        raw, signs = chunk(items, index)
        return Counted(raw), signs

    monkeypatch.setattr(Items, "_chunk", counted)
    with sf.fake_world(4):
        mesh = sf.make_mesh((4,), ("dp",))
        x = sf.distribute(torch.randn(10, 3), mesh, P("dp"))
        sf.save(tmp_path, {"x": x})
        other = sf.make_mesh((2, 2), ("dp", "tp"))
        like = {"x": sf.ShapeDtype((10, 3))}
        for spec, times in ((P("dp", "tp"), 1), (P("dp"), 2), (P(), 4)):
            read.clear()
            loaded = sf.load(tmp_path, like, other, spec)
            assert torch.equal(sf.full(loaded)["x"], sf.full(x))
            assert sum(read) == times * 10 * 3 * 4


def test_each_chunk_is_written_once(tmp_path: Path) -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        x = sf.distribute(torch.arange(6.0), mesh, P("dp"))
        folder = sf.save(tmp_path, {"x": x, "y": torch.ones(3)})
    metadata = pickle.loads(Path(folder, ".metadata").read_bytes())
    assert sorted((i.fqn, i.offset[0]) for i in metadata.storage_data) == [
        ("x", 0),
        ("x", 3),
        ("y", 0),
    ]
    size = Path(folder, "__0_0.distcp").stat().st_size
    assert sum(place.length for place in metadata.storage_data.values()) == size


ROWS = {
    "instead of sizes": [["x", [0], [-1], [2], "torch.float32"]],
    "instead of a dtype": [["x", [0], [2], [2], "torch.save"]],
    "a chunk": [["x", [0], [2, 1], [2], "torch.float32"]],
    "tensor-volume": [["x", [0], [1], [2], "torch.float32"]],
}


@pytest.mark.parametrize("why", ROWS)
def test_rows_of_another_rank_are_checked(why: str) -> None:
    with pytest.raises(ValueError, match=why):
        global_save([ROWS[why], []])
