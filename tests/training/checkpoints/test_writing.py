"""A save that fails on one rank fails on all, by what they tell each other as text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.distributed.checkpoint import FileSystemWriter

import shardfn as sf
from shardfn import P


def _one_rank_fails(folder: str) -> list[str]:
    """The errors of saves that fail on rank 1, which no rank unpickles."""

    def pickled(*_: Any, **__: Any) -> None:
        raise AssertionError("an object travels between processes")

    for name in ("_object_to_tensor", "_tensor_to_object"):
        setattr(torch.distributed.distributed_c10d, name, pickled)
    x = {"w": sf.distribute(torch.arange(7.0), sf.make_mesh((2,), ("dp",)), P("dp"))}
    write, said = FileSystemWriter.write_data, []
    for error in (OSError(28, "No space left on device"), ValueError("no float")):
        is_failing = torch.distributed.get_rank() == 1
        FileSystemWriter.write_data = _failing(error) if is_failing else write
        with pytest.raises((sf.CheckpointError, ValueError)) as caught:
            sf.save(folder, x)
        said.append(f"{type(caught.value).__name__} {caught.value}")
    FileSystemWriter.write_data = write
    sf.save(folder, x)
    assert torch.equal(sf.full(sf.load(folder, x))["w"], torch.arange(7.0))
    if torch.distributed.get_rank() == 1:
        os.remove(f"{folder}/step-00000000/__1_0.distcp")
    with pytest.raises(sf.CheckpointError) as caught:
        sf.load(folder, x)
    said.append(str(caught.value).split("\n")[0])
    return said


def _failing(error: Exception) -> Any:
    def write(*_: Any) -> None:
        raise error

    return write


def test_an_error_of_one_rank_is_told_to_all_as_text(tmp_path: Path) -> None:
    first, second = run_ranks(2, _one_rank_fails, str(tmp_path))
    full = (
        f"CheckpointError save: {tmp_path} cannot be written\n  [Errno 28] No space left on "
        "device\n  try: free disk space, or use another folder; earlier checkpoints are "
        "unchanged"
    )
    gone = f"load: {tmp_path}/step-00000000/__1_0.distcp cannot be read"
    told = (
        "CheckpointError save: rank 1 failed\n  ValueError: no float\n"
        "  try: read the error message of the failed rank"
    )
    assert first == [full, told, gone]
    assert second == [full, "ValueError no float", gone]
