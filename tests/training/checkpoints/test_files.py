"""Files of a checkpoint: memory that is shared, disks that are full, files that are damaged."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

import shardfn as sf
from tests.support.checkpoint_trees import assert_equal

TREE = {"w": torch.arange(6.0).reshape(2, 3), "epoch": 3, "b": torch.ones(4)}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return sf.save(tmp_path, TREE, step=5)


def _refused(path: Any, like: Any = TREE) -> str:
    with pytest.raises(sf.CheckpointError) as error:
        sf.load(path, like)
    return str(error.value)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_file_that_is_cut_short(folder: str, keep: int) -> None:
    path = Path(folder, "__0_0.distcp")
    os.truncate(path, path.stat().st_size - 1 if keep < 0 else keep)
    assert _refused(folder).startswith(f"load: {path} cannot be read\n")


def test_a_file_that_is_missing_or_another_ones(folder: str) -> None:
    path = Path(folder, "__0_0.distcp")
    path.unlink()
    assert _refused(folder).startswith(f"load: {path} cannot be read\n")
    sf.save_safetensors(folder, {"other": torch.ones(3)})
    Path(folder, "model.safetensors").rename(path)
    assert _refused(folder).startswith(f"load: {path} cannot be read\n")


def test_memory_that_tensors_share_is_written_for_each(tmp_path: Path) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    tree = {"x": x, "same": x, "turned": x.T, "row": x[1]}
    sf.save(tmp_path, tree)
    assert_equal(sf.load(tmp_path, tree), tree)


def test_a_disk_that_really_takes_no_more(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(sf.CheckpointError, match="cannot be written"):
            sf.save(tmp_path, {"x": torch.ones(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not os.listdir(tmp_path)


def test_complex_numbers_at_odd_places_of_a_file(tmp_path: Path) -> None:
    for rows in range(1, 5):
        x = torch.arange(rows * 3.0).reshape(rows, 3)
        tree = {
            "wide": torch.complex(x, -x).to(torch.complex128),
            "narrow": torch.complex(x, -x),
            "rest": torch.ones(rows, dtype=torch.uint8),
        }
        sf.save(tmp_path, tree, step=rows)
        assert_equal(sf.load(tmp_path, tree), tree)
