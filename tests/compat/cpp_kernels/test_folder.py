"""Kernels that Inductor compiles for us are kept in a folder of the user's own."""

from __future__ import annotations

import os
import stat
import threading
from importlib import import_module
from pathlib import Path

import pytest
import torch

import shardfn as sf
from shardfn._compat.cpp_kernels import folder

HERE = "TORCHINDUCTOR_CACHE_DIR"
X = torch.linspace(0.0, 1.0, 7, dtype=torch.float64)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of a user who has named no folder."""
    monkeypatch.delenv(HERE)
    monkeypatch.delenv(folder.CACHE_DIR)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(folder, "_kernel_folder", folder._KernelFolder())
    return tmp_path / "cache" / "shardfn" / "kernels"


def named() -> str | None:
    return os.environ.get(HERE)


def test_a_compiled_call_keeps_its_kernels_in_a_folder_of_mode_0700(home: Path) -> None:
    import_module("torch._inductor.codecache")  # which names one
    before = named()
    fn = sf.jit(lambda x: (x * 0.2468).sin() + 3, backend="inductor")
    torch.testing.assert_close(fn(X), (X * 0.2468).sin() + 3)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert list(home.rglob("*.so"))
    assert named() == before


def test_precompiled_headers_are_there_too(home: Path) -> None:
    codecache = import_module("torch._inductor.codecache")
    before = codecache._HEADER_DIR
    with folder.private_kernel_folder():
        assert str(home / "precompiled_headers") == codecache._HEADER_DIR
    assert before == codecache._HEADER_DIR


def test_a_folder_that_the_user_names_is_taken(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HERE, "/of/mine")
    with folder.private_kernel_folder():
        assert named() == "/of/mine"
    assert named() == "/of/mine"
    assert not home.exists()


def test_what_torch_named_by_default_is_named_again_afterwards(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv(HERE, default_cache_dir())
    with folder.private_kernel_folder():
        assert named() == str(home)
    assert named() == default_cache_dir()


def test_compilations_may_overlap(home: Path) -> None:
    inside, leave = threading.Event(), threading.Event()

    def compile_slowly() -> None:
        with folder.private_kernel_folder():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=compile_slowly)
    thread.start()
    inside.wait()
    with folder.private_kernel_folder():
        assert named() == str(home)
    assert named() == str(home)  # the thread needs it
    leave.set()
    thread.join()
    assert named() is None


def open_to_all(home: Path) -> None:
    home.mkdir(parents=True)
    home.chmod(0o777)


def a_file(home: Path) -> None:
    home.parent.mkdir(parents=True)
    home.write_text("")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [(open_to_all, "belong to you alone, with mode 0700"), (a_file, "File exists")],
)
def test_a_folder_that_is_not_the_users_is_left_with_one_warning(
    spoil: object, said: str, home: Path
) -> None:
    assert callable(spoil)
    spoil(home)
    with pytest.warns(UserWarning, match=said), folder.private_kernel_folder():
        place = Path(named() or "")
    assert place != home and stat.S_IMODE(place.stat().st_mode) == 0o700
    with folder.private_kernel_folder():  # without another warning
        assert named() == str(place)


def test_where_nothing_is_to_be_stored_kernels_go_when_the_process_ends(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(folder.CACHE_DIR, "")
    with folder.private_kernel_folder():
        place = Path(named() or "")
    assert place.is_dir() and not home.exists()
    removal = folder._kernel_folder.removal
    assert removal.alive and removal.atexit
    removal()
    assert not place.exists()
