"""clear_cache forgets captures, and on request stored compilations; load_compiled at the door."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from stagings import counts

import shardfn as sf
from shardfn._compat import CACHE_DIR
from shardfn.errors import CaptureError, ShardError
from shardfn.stored import own_folder

X = torch.ones(3)


def test_the_next_call_captures_again() -> None:
    step = sf.jit(lambda x: x * 2, backend="aten")
    step(X)
    sf.clear_cache()
    assert torch.equal(step(X), X * 2) and counts["captures"] == 1


def test_what_is_stored_stays_unless_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_DIR, str(tmp_path))
    where = own_folder()
    assert where is not None
    where.write("a", b"text")
    sf.clear_cache()
    assert where.read("a") == b"text"
    sf.clear_cache(stored=True)
    assert where.read("a") is None
    monkeypatch.setenv(CACHE_DIR, "")
    sf.clear_cache(stored=True)


def test_a_flag_that_is_none_is_named() -> None:
    with pytest.raises(ShardError, match="clear_cache, stored: stored is 'all'"):
        sf.clear_cache(stored="all")  # type: ignore[arg-type]


def test_a_path_that_is_none_is_named() -> None:
    with pytest.raises(ShardError, match="load_compiled, path: path is 3"):
        sf.load_compiled(3)  # type: ignore[arg-type]
    with pytest.raises(ShardError, match="load_compiled, mesh"):
        sf.load_compiled("step", mesh=(2, 2))


def test_a_function_that_loads_while_it_is_captured_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    sf.jit(lambda x: x * 2, backend="aten").compile(X).save(path)
    with pytest.raises(CaptureError):
        sf.jit(lambda x: sf.load_compiled(path)(x), backend="aten")(X)
    assert torch.equal(sf.load_compiled(path)(X), X * 2)


def test_a_loaded_program_takes_one_device_or_a_mesh_of_one_rank(tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    sf.jit(lambda x: x * 2, backend="aten").compile(X).save(path)
    loaded = sf.load_compiled(path)
    with sf.fake_world(2):
        assert torch.equal(loaded(X), X * 2)
        mesh = sf.make_mesh((2,), ("dp",), device_type="cpu")
        with pytest.raises(ShardError, match="made for the mesh \\(\\), but the given mesh is"):
            sf.load_compiled(path, mesh=mesh)
