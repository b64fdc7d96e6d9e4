"""A process that is killed while it saves leaves a checkpoint that is whole."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from ranks import _serve
from torch.distributed.checkpoint.filesystem import FileSystem

import shardfn as sf
from shardfn.training.checkpoints import folders


class _Killed(BaseException):
    pass


def _tree(step: int) -> dict[str, Any]:
    return {"step": step, "x": torch.full((1_000,), float(step))}


def _remove_a_part(folder: str) -> None:
    """What a process that is killed while it removes a folder has removed."""
    for part in Path(folder).glob("*.distcp"):
        part.unlink()


def _assert_whole(path: Any, steps: tuple[int, ...]) -> None:
    found = sf.load(path, _tree(0))
    assert found["step"] in steps
    assert torch.equal(found["x"], _tree(found["step"])["x"])


@pytest.mark.parametrize("step", [1, 2], ids=["replaced", "new"])
def test_a_crash_between_any_two_operations_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Each operation in turn is the first that does not happen, as for a process that is gone."""
    operations = [
        (os, "makedirs"),
        (os, "rename"),
        (os, "fsync"),
        (os, "unlink"),
        (shutil, "rmtree"),
        (FileSystem, "create_stream"),
        (torch, "save"),
    ]
    count = 0
    shutil_rmtree = shutil.rmtree

    def counted(original: Any, allowed: int) -> Any:
        def operate(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count > allowed:
                if original is shutil_rmtree:
                    _remove_a_part(args[0])
                raise _Killed
            return original(*args, **options)

        return operate

    finished = False
    for allowed in range(100):
        path = tmp_path / str(allowed)
        sf.save(path, _tree(1), step=1)
        count = 0
        with monkeypatch.context() as patch:
            for module, name in operations:
                patch.setattr(module, name, counted(getattr(module, name), allowed))
            try:
                sf.save(path, _tree(9), step=step)
                finished = True
            except _Killed:
                pass
        _assert_whole(path, (1, 9))
        sf.save(path, _tree(10), step=step)  # and saving goes on
        _assert_whole(path, (10,))
        assert folders.steps(str(path)) == sorted({1, step})
        if finished:
            break
    assert finished and allowed > 5


def _save_for_ever(path: str) -> NoReturn:
    step = 0
    while True:
        step += 1
        sf.save(path, _tree(step), step=step % 3)


def _killed_at_random_moments(root: str, seeds: range) -> None:
    """Fork processes that save for ever, and kill each at some moment after its first step."""
    sf.save(os.path.join(root, "first"), _tree(0))  # imports what saving needs
    for seed in seeds:
        path = os.path.join(root, str(seed))
        moment = random.Random(seed).uniform(0, 0.03)
        if (child := os.fork()) == 0:
            _save_for_ever(path)
        while not folders.steps(path):
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
        end = time.monotonic() + moment
        while time.monotonic() < end:
            pass
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_process_killed_at_20_random_moments(tmp_path: Path) -> None:
    _serve()
    seeds = range(20)
    process = multiprocessing.get_context("forkserver").Process(
        target=_killed_at_random_moments, args=(str(tmp_path), seeds)
    )
    process.start()
    process.join()
    assert process.exitcode == 0
    for seed in seeds:
        path = tmp_path / str(seed)
        steps = folders.steps(str(path))
        newest = max(sf.load(path, _tree(0), step=n)["step"] for n in steps)
        _assert_whole(path, tuple(range(1, newest + 1)))


def test_only_complete_steps_count(tmp_path: Path) -> None:
    sf.save(tmp_path, _tree(1), step=1)
    os.makedirs(tmp_path / "step-00000007")
    os.makedirs(tmp_path / "step-00000008.saving")
    (tmp_path / "step-x").mkdir()
    (tmp_path / "notes.txt").write_text("")
    assert folders.steps(str(tmp_path)) == [1]
    assert folders.steps(str(tmp_path / "notes.txt")) == []
    assert sf.save(tmp_path, _tree(2)).endswith("step-00000002")
