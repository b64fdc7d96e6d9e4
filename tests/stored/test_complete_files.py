"""A file is complete, or it is not there; a failure leaves nothing beside it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest

from shardfn.stored import complete_files


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a"
    complete_files.write(path, b"old, and longer")
    complete_files.write(str(path), b"new")
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["a"]


def test_a_file_that_is_to_be_kept_stays(tmp_path: Path) -> None:
    path = tmp_path / "a"
    complete_files.write(path, b"first", keep=True)
    complete_files.write(path, b"second", keep=True)
    assert path.read_bytes() == b"first" and os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_leaves_the_file_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "a"
    complete_files.write(path, b"before")

    def full(*args: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="No space left"):
        complete_files.write(path, b"after")
    assert path.read_bytes() == b"before" and os.listdir(tmp_path) == ["a"]


def test_a_folder_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        complete_files.write(tmp_path / "none" / "a", b"x")
