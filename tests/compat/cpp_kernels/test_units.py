"""Inductor's C++ kernels, compiled together: the same values, fewer runs of the compiler."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.cpp_builder import CppBuilder

import shardfn as sf
from shardfn._compat import patches
from shardfn._compat.cpp_kernels import units

HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>\n"
X = torch.linspace(-2, 2, 35, dtype=torch.float64).reshape(5, 7)


def several(x: torch.Tensor, seed: int) -> tuple[torch.Tensor, ...]:
    """Kernels of several kinds: vector code, reductions, integers, booleans, half floats."""
    y = (x.sin() * seed).softmax(1)
    i = (x * 10).long().cumsum(0) + seed
    b = (y > y.mean()).any(1)
    h = (x.bfloat16() * seed).relu().sum(0)
    return y @ y.T, i, b, h, x.float().std(1)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    """The runs of the compiler for kernels, in a cache of their own."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    runs: list[Any] = []
    build = CppBuilder.build

    def noted(builder: Any) -> None:
        if str(builder.get_target_file_path()).endswith(".main.so"):
            runs.append(builder)
        build(builder)

    monkeypatch.setattr(CppBuilder, "build", noted)
    forget(monkeypatch)
    yield runs


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what this process has loaded, as a new process would."""
    sf.clear_cache()
    monkeypatch.setattr(units, "_kernels", {})
    monkeypatch.setattr(CppPythonBindingsCodeCache, "cache", {})


def compiled(seed: int) -> Any:
    return sf.jit(lambda x: several(x, seed), backend="inductor")(X)


def test_values_are_those_of_kernels_compiled_one_by_one(
    built: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = compiled(3)
    assert 1 <= len(built) <= 2
    rows = patches.PATCHES["compilation"]
    alone = tuple(row for row in rows if row.enter is not units.kernels_joined)
    monkeypatch.setitem(patches.PATCHES, "compilation", alone)
    apart = sf.jit(lambda x: (*several(x, 3), x + 1), backend="inductor")(X)[:-1]
    assert len(built) > 3
    for a, b in zip(joined, apart, strict=True):
        assert torch.equal(a, b)


def test_another_program_and_another_process_compile_only_what_is_new(
    built: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(5)
    count = len(built)
    more = lambda x: (*several(x, 5), x.cos() + 8)
    first = sf.jit(more, backend="inductor")(X)
    assert len(built) <= count + 1
    known = len(built)
    forget(monkeypatch)
    again = sf.jit(lambda x: (*several(x, 5), x.cos() + 8), backend="inductor")(X)
    assert len(built) == known
    assert all(map(torch.equal, first, again))


def test_a_record_that_is_broken_or_foreign_is_written_again(
    built: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = compiled(7)
    records = sorted(tmp_path.glob(f"{units.FOLDER}/*/*.json"))
    texts = ["", "[]", "{}", '{"unit": "no.so", "key": "k", "name": "k0"}', "\x00"]
    outside = {"unit": "../k.so", "key": "k", "name": "k0"}
    texts.append(json.dumps(outside))
    for i, record in enumerate(records):
        record.write_text(texts[i % len(texts)])
    forget(monkeypatch)
    torch._dynamo.reset()
    found = sf.jit(lambda x: several(x, 7), backend="inductor")(X)
    assert all(map(torch.equal, wanted, found))
    assert not any(record.read_text() in texts for record in records)


def test_a_unit_that_the_compiler_refuses_is_compiled_one_by_one(
    built: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "unit", lambda kernels: f"{HEADER} broken {kernels!r}")
    found = sf.jit(lambda x: several(x, 9), backend="inductor")(X)
    plain = several(X, 9)
    for a, b in zip(found, plain, strict=True):
        torch.testing.assert_close(a, b)
    assert not units._kernels and len(built) > 2


@pytest.mark.usefixtures("built")
def test_an_error_of_a_kernel_reaches_python() -> None:
    at = sf.jit(lambda x, i: x[i] * 2, backend="inductor")
    assert at(X, torch.tensor([4]))[0, 0] == X[4, 0] * 2
    with pytest.raises((IndexError, RuntimeError)):
        at(X, torch.tensor([50]))
    (kernel,) = units._kernels.values()
    with pytest.raises(RuntimeError, match="a kernel takes 3 arguments"):
        kernel()
    with pytest.raises((RuntimeError, TypeError)):
        kernel(1, 2, 3)


TWO = """
import sys, torch, shardfn as sf
x = torch.linspace(-2, 2, 35, dtype=torch.float64).reshape(5, 7)
out = sf.jit(lambda x: (x.sin().sum(1), (x * 3).softmax(0)), backend="inductor")(x)
print([y.double().sum().item() for y in out])
"""


def test_two_processes_that_compile_at_once_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-c", TWO]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[0] for process in both]
    assert said[0] == said[1] and said[0].startswith("[")
