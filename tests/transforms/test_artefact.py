"""load_compiled at the door: paths, and calls inside of a transform."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardfn as sf
from shardfn.errors import CaptureError, ShardError

X = torch.ones(3)


def test_a_path_that_is_none_is_named() -> None:
    with pytest.raises(ShardError, match="load_compiled, path: path is 3"):
        sf.load_compiled(3)  # type: ignore[arg-type]


def test_a_function_that_loads_while_it_is_captured_is_refused(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "step")
    sf.jit(lambda x: x * 2, backend="aten").compile(X).save(path)
    with pytest.raises(CaptureError):
        sf.jit(lambda x: sf.load_compiled(path)(x), backend="aten")(X)
    assert torch.equal(sf.load_compiled(path)(X), X * 2)


def test_a_loaded_program_takes_one_device_or_a_mesh_of_one_rank(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "step")
    sf.jit(lambda x: x * 2, backend="aten").compile(X).save(path)
    loaded = sf.load_compiled(path)
    with sf.fake_world(2):
        assert torch.equal(loaded(X), X * 2)
        mesh = sf.make_mesh((2,), ("dp",), device_type="cpu")
        with pytest.raises(ShardError, match="made for the mesh \\(\\), this is"):
            sf.load_compiled(path, mesh=mesh)
