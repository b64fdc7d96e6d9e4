"""The C++ functions of a call are loaded once in a process, in the background, as an option."""

from __future__ import annotations

from typing import Any

import pytest

from shardfn import _compat
from shardfn.compile import native


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> list[bytes]:
    """What is loaded by a process that has loaded nothing yet, in a folder of its own."""
    loaded: list[bytes] = []
    monkeypatch.setattr(native, "_loading", native.LoadState())
    monkeypatch.setenv("SHARDFN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(_compat.library, "compiled_library", lambda: b"compiled")
    load = lambda binary: loaded.append(binary) is None
    monkeypatch.setattr(_compat.library, "load_library", load)
    return loaded


def load() -> None:
    thread = native.load_native()
    assert thread is not None and native.load_native() is thread
    thread.join()


def test_it_is_compiled_once_on_a_machine(
    loads: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    load()
    monkeypatch.setattr(native, "_loading", native.LoadState())
    monkeypatch.setattr(_compat.library, "compiled_library", lambda: b"again")
    load()
    assert loads == [b"compiled"] * 2


def test_it_is_compiled_again_if_the_stored_one_is_damaged(
    loads: list[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    load()
    (path,) = tmp_path.rglob("calls-*")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    monkeypatch.setattr(native, "_loading", native.LoadState())
    with pytest.warns(UserWarning, match="damaged"):
        native._load_or_compile()
    assert loads == [b"compiled"] * 2


def test_calls_go_on_without_a_compiler_a_folder_or_the_wish(
    loads: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> bytes:
        raise FileNotFoundError("a C++ compiler")

    monkeypatch.setattr(_compat.library, "compiled_library", missing)
    load()
    monkeypatch.setenv("SHARDFN_CACHE_DIR", "")
    assert not native._load_or_compile()
    monkeypatch.setenv(_compat.library.SWITCH, "0")
    assert native.load_native() is None and not loads
