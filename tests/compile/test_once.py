"""A program is compiled once: in a process, in a folder of processes, by one of the ranks."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stagings import counts

import shardfn as sf
from shardfn import P, _compat
from shardfn._compat import CACHE_DIR
from shardfn._compat.compilations.undisturbed import SettingsChanged, undisturbed
from shardfn.compile import once
from shardfn.stored import own_folder
from shardfn.stored.folder import SUFFIX, _warned
from tests.support.ranks import run_ranks

X = torch.arange(7.0) / 3


def cubed(x: torch.Tensor) -> torch.Tensor:
    return (x * x * x).cumsum(0)


def added(xs: torch.Tensor) -> Any:
    return sf.scan(lambda c, x: (c + x.sin(), c * x), xs[0], xs)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(CACHE_DIR, str(tmp_path))
    _warned.clear()
    yield tmp_path
    _warned.clear()


def compilations(call: Any) -> tuple[Any, int]:
    before = counts["compilations"]
    return call(), counts["compilations"] - before


def stored() -> list[Path]:
    """The stored programs."""
    where = own_folder()
    assert where is not None
    paths = [path for *_, path in where.entries()]
    return [path for path in paths if not path.name.startswith("compiler")]


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_a_call_spends_nothing_that_compile_has_spent(backend: str) -> None:
    step = sf.jit(lambda x: cubed(x) + 1, backend=backend)
    before = dict(counts)
    compiled = step.compile(sf.ShapeDtype((7,)))
    spent = dict(counts)
    assert spent["partitions"] == before.get("partitions", 0) + 1
    assert torch.equal(step(X), compiled(X))
    assert dict(counts) == spent and step.compile(X) is not None
    assert dict(counts) == spent


def test_compile_serves_no_call_of_another_kind() -> None:
    step = sf.jit(lambda x, n: x * n, backend="aten")
    step.compile(X, 2)
    assert torch.equal(step(X, 3), X * 3)
    assert torch.equal(step(X, 2), X * 2)
    with torch.no_grad():
        assert torch.equal(step(X[:3], 2), X[:3] * 2)


def test_equal_programs_are_compiled_once() -> None:
    f, g = sf.jit(lambda x: cubed(x) * 3), sf.jit(lambda y: cubed(y) * 3)
    a, first = compilations(lambda: f(X))
    b, second = compilations(lambda: g(X))
    assert torch.equal(a, b) and (first, second) == (1, 0)
    c, other = compilations(lambda: sf.jit(lambda y: cubed(y) * 4)(X))
    assert other == 1 and torch.equal(c, cubed(X) * 4)


@pytest.mark.parametrize("fn", [cubed, added])
def test_what_is_stored_is_not_compiled_again(
    here: Path, monkeypatch: pytest.MonkeyPatch, fn: Any
) -> None:
    first, count = compilations(lambda: sf.jit(fn)(X))
    assert count == 1 and stored()
    sf.clear_cache()

    def refuse(*_: Any) -> None:
        raise AssertionError("Inductor runs again")

    monkeypatch.setattr(_compat, "inductor", refuse)
    again, count = compilations(lambda: sf.jit(fn)(X))
    rows = zip(*map(torch.utils._pytree.tree_leaves, (first, again)), strict=True)
    assert count == 0 and all(torch.equal(a, b) for a, b in rows)
    sf.clear_cache(stored=True)
    assert not stored()


def test_contents_of_another_version_are_compiled_again(here: Path) -> None:
    sf.clear_cache()
    first, _ = compilations(lambda: sf.jit(cubed)(X))
    where, (path,) = own_folder(), stored()
    assert where is not None
    where.write(path.name.removesuffix(SUFFIX), b"\x02\0\0\0\0\0\0\0{}")
    sf.clear_cache()
    with pytest.warns(UserWarning, match="does not load: it has another format"):
        again, count = compilations(lambda: sf.jit(cubed)(X))
    assert count == 1 and torch.equal(first, again)


def test_a_folder_that_cannot_be_used_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "file"))
    _warned.clear()
    sf.clear_cache()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = sf.jit(cubed)(X)
    assert torch.equal(result, cubed(X))
    assert [str(x.message) for x in told if "not cached" in str(x.message)] == [
        str(x.message) for x in told
    ]
    assert len(told) == 1


def test_the_key_has_the_program_and_what_its_compilation_depends_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def key(fn: Any, *args: Any) -> str | None:
        return once.key_of(sf.jit(fn).lower(*args).program.graph, ())

    mine = key(cubed, X)
    assert mine == key(lambda y: cubed(y), X) and mine is not None
    others = {key(cubed, X[:3]), key(cubed, X.double()), key(lambda x: x * 1.5, X)}
    others.add(key(lambda x: x * 2.5, X))
    monkeypatch.setattr(_compat, "environment", lambda: "another machine")
    others.add(key(cubed, X))
    assert len(others - {mine}) == 5


def on_ranks(folder: str) -> tuple[int, torch.Tensor]:
    """A step of data parallel, and how often this rank has compiled."""
    import os

    os.environ[CACHE_DIR] = folder
    mesh = sf.make_mesh((2,), ("dp",), device_type="cpu")
    step = sf.shard(cubed, mesh, P("dp"), P("dp"))
    step.compile(sf.ShapeDtype((8,)))
    result = sf.full(step(torch.arange(8.0)))
    return counts["compilations"], result


def test_ranks_with_equal_programs_compile_once(tmp_path: Path) -> None:
    before = run_ranks(2, on_ranks, str(tmp_path))
    after = run_ranks(2, on_ranks, str(tmp_path))
    assert sum(count for count, _ in before) == 1
    assert sum(count for count, _ in after) == 0
    for _, result in (*before, *after):
        assert torch.equal(result, cubed(torch.arange(8.0)))


@pytest.mark.parametrize("key", [None, "a key"])
def test_nothing_is_kept_of_a_compilation_during_which_a_setting_changed(
    key: str | None, here: Path
) -> None:
    def there_and_back() -> None:
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_dtype(torch.float32)

    def compile_now() -> Any:
        thread = threading.Thread(target=there_and_back)
        thread.start()
        thread.join()
        return cubed

    with undisturbed(), pytest.raises(SettingsChanged):
        once.compiled_once(key, compile_now, lambda: None)
    assert not stored() and key not in once._runners
