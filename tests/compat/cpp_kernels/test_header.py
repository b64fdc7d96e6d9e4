"""The header that all kernels include is the one that torch compiles for them."""

from __future__ import annotations

from typing import Any

import pytest
from torch._inductor import config
from torch._inductor.codecache import CppPythonBindingsCodeCache

from shardfn._compat.cpp_kernels import header


def test_it_is_compiled_as_for_a_kernel_without_compiling_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submitted: list[Any] = []

    def load_async(text: str, submit_fn: Any) -> None:
        submitted.append((text, submit_fn(lambda: submitted.append("a kernel"))))

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_async", load_async)
    header.compile_header()
    assert submitted == [("#include <torch/csrc/inductor/cpp_prefix.h>\n", None)]


def test_where_headers_are_not_compiled_there_is_no_place_for_them() -> None:
    with config.patch(cpp_cache_precompile_headers=False):
        assert header.header_folder() is None
