"""The folder of compilations: checked, bounded, shared; any fault of it is a warning."""

from __future__ import annotations

import errno
import os
import pickle
import stat
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardfn._compat import CACHE_DIR
from shardfn.stored import Folder, own_folder, place
from shardfn.stored.folder import KEY, LIMIT, SUFFIX, _warned, limit


@pytest.fixture(autouse=True)
def told_nothing() -> Iterator[None]:
    _warned.clear()
    yield
    _warned.clear()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "cache"))
    found = own_folder()
    assert found is not None
    return found


def test_what_is_written_is_read_also_by_another_process(here: Folder) -> None:
    here.write("a", b"text")
    assert Folder(here.path).read("a") == b"text"
    assert here.read("b") is None


def test_the_folder_and_its_files_are_the_users_own(here: Folder) -> None:
    here.write("a", b"text")
    assert stat.S_IMODE(here.path.stat().st_mode) == 0o700
    modes = {stat.S_IMODE(path.stat().st_mode) for path in here.path.iterdir()}
    assert modes == {0o600}


DAMAGE = {
    "truncated": lambda x: x[:-1],
    "empty": lambda x: b"",
    "a bit": lambda x: x[:-1] + bytes([x[-1] ^ 1]),
    "a pickle": lambda x: pickle.dumps(["hostile"]),
    "garbage": lambda x: os.urandom(len(x)),
}


@pytest.mark.parametrize("kind", sorted(DAMAGE))
def test_a_damaged_file_is_dropped_with_one_warning(here: Folder, kind: str) -> None:
    here.write("a", b"text")
    path = here.path / f"a{SUFFIX}"
    path.write_bytes(DAMAGE[kind](path.read_bytes()))
    with pytest.warns(UserWarning, match="compiled again: the file is damaged"):
        assert here.read("a") is None
    assert not path.exists()


def test_a_file_of_another_folder_or_name_is_not_read(here: Folder, tmp_path: Path) -> None:
    other = Folder(tmp_path / "other")
    other.path.mkdir(mode=0o700)
    other.write("a", b"foreign")
    here.write("b", b"text")
    (here.path / f"a{SUFFIX}").write_bytes((other.path / f"a{SUFFIX}").read_bytes())
    (here.path / f"c{SUFFIX}").write_bytes((here.path / f"b{SUFFIX}").read_bytes())
    with pytest.warns(UserWarning, match="another user stored it"):
        assert here.read("a") is None and here.read("c") is None
    assert here.read("b") == b"text"


def test_a_broken_key_is_made_again(here: Folder) -> None:
    here.write("a", b"text")
    (here.path / KEY).write_bytes(b"short")
    with pytest.warns(UserWarning):
        assert here.read("a") is None
    here.write("a", b"text")
    assert here.read("a") == b"text"


def test_the_files_used_last_stay(here: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, "2500B")
    for k, name in enumerate("abc"):
        here.write(name, bytes(1000))
        os.utime(here.path / f"{name}{SUFFIX}", (k, k))
    assert [path.stem for *_, path in here.entries()] == ["b", "c"]
    here.read("b")
    here.write("d", bytes(1000))
    assert {path.stem for *_, path in here.entries()} == {"b", "d"}


def test_a_limit_that_is_no_size_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, "much")
    with pytest.warns(UserWarning, match="SHARDFN_CACHE_SIZE is 'much'"):
        assert limit() == 10**9


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_DIR, "")
    assert place() is None and own_folder() is None
    monkeypatch.delenv(CACHE_DIR)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert place() == tmp_path / "shardfn" / "compilations"


def test_a_folder_that_others_can_write_is_not_used(
    here: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.path.chmod(0o770)
    with pytest.warns(UserWarning, match="must belong to you alone, with mode 0700"):
        assert own_folder() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert own_folder() is None, "told once"


def test_a_file_in_the_place_of_the_folder_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "cache"))
    with pytest.warns(UserWarning, match="compilations are not cached"):
        assert own_folder() is None


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EROFS])
def test_a_full_disk_and_a_folder_that_is_only_read_are_a_warning(
    here: Folder, monkeypatch: pytest.MonkeyPatch, fault: int
) -> None:
    here.write("a", b"text")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    monkeypatch.setattr(os, "utime", refuse)
    with pytest.warns(UserWarning, match="compilations are not cached"):
        here.write("b", b"text")
    with here.alone("b"):
        assert here.read("b") is None
    assert here.read("a") == b"text", "a folder that is only read is read"


def test_two_threads_that_write_at_once_leave_one_of_the_texts(here: Folder) -> None:
    texts = [bytes([k]) * 10_000 for k in range(8)]
    threads = [threading.Thread(target=here.write, args=("a", x)) for x in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert here.read("a") in texts


def test_one_at_a_time_is_alone_with_a_name(here: Folder) -> None:
    inside: list[int] = []
    most: list[int] = []

    def enter() -> None:
        with here.alone("a"):
            inside.append(1)
            most.append(len(inside))
            inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 4


def test_clear_removes_what_is_stored(here: Folder) -> None:
    here.write("a", b"text")
    here.clear()
    assert not here.entries() and here.read("a") is None
