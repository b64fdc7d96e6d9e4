"""The tests' own real ranks: a crash below Python runs once more and says so, an error does not."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import CrashedError, run_ranks


def crashing(folder: str, times: int) -> int:
    """Rank 1 dies the first `times` times."""
    runs = len(list(Path(folder).iterdir()))
    dist.barrier()
    if dist.get_rank() == 1:
        Path(folder, str(runs)).touch()
        if runs < times:
            os.kill(os.getpid(), signal.SIGABRT)
    total = torch.ones(3)
    dist.all_reduce(total)
    return int(total.sum())


def raising(folder: str) -> None:
    Path(folder, f"{len(list(Path(folder).iterdir()))}").touch()
    raise ValueError(f"rank {dist.get_rank()} raised")


def test_ranks_that_crash_once_run_again_and_say_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"ranks \[1\] of 2 crashed; they run once more: crashing"):
        assert run_ranks(2, crashing, str(tmp_path), 1) == [6, 6]


def test_ranks_that_crash_again_fail(tmp_path: Path) -> None:
    with pytest.warns(UserWarning), pytest.raises(CrashedError, match=r"ranks \[1\] of 2 crashed"):
        run_ranks(2, crashing, str(tmp_path), 2)


def test_an_error_on_a_rank_is_raised_at_once(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="rank 0 raised"):
        run_ranks(1, raising, str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 1


def waiting() -> None:
    if dist.get_rank() == 1:
        dist.recv(torch.zeros(1), src=0)
    dist.barrier()


def test_ranks_that_wait_for_good_end_and_show_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ranks.LIMIT", 2.0)
    with pytest.raises(TimeoutError, match=r"in waiting"):
        run_ranks(2, waiting)
