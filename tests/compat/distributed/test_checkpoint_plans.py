"""Plans of torch.distributed.checkpoint: who writes and who reads a chunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import shardfn as sf
from shardfn import P
from shardfn.training.checkpoints.files import Files


def test_each_rank_reads_its_own_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all, each byte once for each rank that holds it."""
    read: list[int] = []
    block = Files.block

    def counted(*args: Any) -> torch.Tensor:
        out = block(*args)
        read.append(out.nbytes)
        return out

    monkeypatch.setattr(Files, "block", counted)
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
    with safe_open(Path(folder, "part-00000.safetensors"), "pt") as file:
        assert sorted(file.keys()) == ["x@0", "x@3", "y@0"]
        assert file.get_tensor("x@3").tolist() == [3, 4, 5]
