"""The library of C++ functions: its name, its compiler, and what happens without one."""

from __future__ import annotations

from typing import Any

import pytest
from support.stages.native import with_native

from shardfn._compat.native import library


def test_a_context_has_only_python_functions() -> None:
    functions = with_native()
    with library.only_python():
        assert library.native() is None
    assert library.native() is functions


def test_the_name_depends_on_the_sources_and_on_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    name = library.library_name()
    assert name == library.library_name()
    monkeypatch.setattr(library.torch, "__version__", "9.9")
    other = library.library_name()
    assert other != name
    monkeypatch.undo()
    for path in library.SOURCES.iterdir():
        if path.suffix in (".cpp", ".h"):
            (tmp_path / path.name).write_text(path.read_text() + "\n")
    monkeypatch.setattr(library, "SOURCES", tmp_path)
    assert library.library_name() not in (name, other)


def test_the_switch_turns_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.is_wanted()
    monkeypatch.setenv(library.SWITCH, "0")
    assert not library.is_wanted()


def test_a_compiler_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    with_native()  # skips without a compiler
    (tmp_path / "calls.cpp").write_text("no C++")
    monkeypatch.setattr(library, "SOURCES", tmp_path)
    with pytest.raises(RuntimeError, match="error"):
        library.compiled_library()


def test_a_library_that_is_none_is_not_loaded() -> None:
    before = library.native()
    with pytest.raises(ImportError):
        library.load_library(b"no library")
    assert library.native() is before


def test_a_library_that_does_not_find_its_way_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        """A library that says yes to every tensor."""

        start = staticmethod(lambda *_: True)
        layouts = staticmethod(lambda _: 1)
        same_tensors = staticmethod(lambda *_: True)

    assert not library._starts(Module)
    monkeypatch.setattr(Module, "start", staticmethod(lambda *_: False))
    assert not library._starts(Module)
