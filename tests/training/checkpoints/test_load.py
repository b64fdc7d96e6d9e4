"""load: what it reads, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardfn as sf

TREE = {"w": torch.arange(6.0).reshape(2, 3), "epoch": 3, "b": torch.ones(4)}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return sf.save(tmp_path, TREE, step=5)


def _refused(path: Any, like: Any = TREE, *args: Any, **options: Any) -> str:
    with pytest.raises(sf.CheckpointError) as error:
        sf.load(path, like, *args, **options)
    return str(error.value)


def test_all_mismatches_are_listed_at_once(folder: str) -> None:
    like = {"w": torch.zeros(3, 2), "epoch": torch.ones(1), "new": 1}
    assert _refused(folder, like) == (
        f"load: {folder} holds another tree\n  new: in the given tree, but not in the "
        "checkpoint\n  b: in the checkpoint, but not in the given tree\n  w: torch.float32 "
        "(2, 3) in the checkpoint, torch.float32 (3, 2) in the tree\n  epoch: a constant in "
        "the checkpoint, a tensor in the tree\n  try: pass the tree that was saved; "
        "strict=False ignores entries that the tree does not have"
    )


def test_another_dtype_is_refused(folder: str) -> None:
    text = _refused(folder, {**TREE, "b": torch.ones(4, dtype=torch.float64)})
    assert "b: torch.float32 (4,) in the checkpoint, torch.float64 (4,)" in text


def test_a_long_list_of_mismatches_is_cut(folder: str) -> None:
    text = _refused(folder, {**TREE, **{f"x{i}": 1 for i in range(50)}})
    assert text.count("\n") == 22
    assert "\n  and 30 more\n" in text


def test_a_part_of_a_checkpoint(folder: str) -> None:
    loaded = sf.load(folder, {"w": torch.zeros(2, 3)}, strict=False)
    assert torch.equal(loaded["w"], TREE["w"])


def test_there_is_no_checkpoint(tmp_path: Path) -> None:
    fix = "\n  try: give the folder that sf.save wrote to"
    assert _refused(tmp_path) == f"load: {tmp_path} holds no checkpoint{fix}"
    assert _refused(tmp_path / "none").startswith("load: ")
    sf.save(tmp_path, TREE, step=5)
    assert _refused(tmp_path, step=4) == (
        f"load: {tmp_path} holds no complete step 4\n  complete steps: 5{fix}"
    )
