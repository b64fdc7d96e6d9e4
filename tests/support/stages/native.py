"""Tests that run twice: with the C++ functions of a call, and with Python's alone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardfn._compat.native import library

WAYS = ("python", "c++")


def with_native() -> Any:
    """The C++ functions, compiled once for all workers of a run."""
    if library.native() is None:
        place = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], library.library_name())
        if not place.exists():
            partial = place.with_suffix(f".{os.getpid()}")
            try:
                partial.write_bytes(library.compiled_library())
            except FileNotFoundError as reason:
                pytest.skip(f"no C++ functions: {reason}")
            os.replace(partial, place)
        assert library.load_library(place.read_bytes())
    return library.native()


@contextlib.contextmanager
def on_way(name: str) -> Iterator[None]:
    """A context in which these functions run, and no others."""
    with library.only_python():
        if name == "c++":
            with_native()
        yield


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test with each kind of functions."""
    with on_way(request.param):
        yield request.param
