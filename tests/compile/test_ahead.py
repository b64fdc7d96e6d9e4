"""The compiler is prepared once in a process, and the header is compiled once on a machine."""

from __future__ import annotations

from typing import Any

import pytest

from shardfn.compile import ahead


@pytest.fixture
def headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> list[str]:
    """The headers compiled by a process that has prepared nothing yet."""
    compiled: list[str] = []
    monkeypatch.setattr(ahead, "_preparation", ahead.PreparationState())
    monkeypatch.setenv("SHARDFN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(ahead, "load_native", lambda: None)
    monkeypatch.setattr(ahead, "compile_header", lambda: compiled.append("header"))
    monkeypatch.setattr(ahead, "import_header_compiler", lambda: None)
    return compiled


def test_the_header_is_compiled_once_on_a_machine(
    headers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = ahead.prepare_compiler()
    assert ahead.prepare_compiler() is thread
    thread.join()
    assert headers == ["header"]
    monkeypatch.setattr(ahead, "_preparation", ahead.PreparationState())
    ahead.prepare_compiler().join()
    assert headers == ["header"], "the folder of compilations says that it is there"


def test_a_compiler_that_fails_is_left_to_the_compilation_that_needs_it(
    headers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise FileNotFoundError("a C++ compiler")

    for step in ("compile_header", "header_folder"):
        with monkeypatch.context() as patch:
            patch.setattr(ahead, step, missing)
            ahead.prepare_compiler().join()
        monkeypatch.setattr(ahead, "_preparation", ahead.PreparationState())
    assert not headers
    ahead.prepare_compiler().join()
    assert headers == ["header"], "a failure is not remembered"
