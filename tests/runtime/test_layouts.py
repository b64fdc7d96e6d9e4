"""The local tensors of DTensors lie as the program needs them, in each call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.stages.native import way
from torch.distributed.tensor import Shard

import shardfn as sf
from shardfn import P
from shardfn._compat.distributed.groups import dtensor_spec, dtensors
from tests.support.stages.one_rank import mesh

__all__ = ["mesh", "way"]
pytestmark = pytest.mark.usefixtures("way")
X = torch.arange(15.0).view(5, 3)


def spec_of(mesh: Any) -> Any:
    return dtensor_spec(mesh, (Shard(0),), (5, 3), (3, 1), torch.float32)


def step(mesh: Any, backend: str = "aten") -> Any:
    run = sf.shard(lambda x, y: x * y, mesh, (P("a"), P()), backend=backend)
    for _ in range(3):
        x, y = dtensors([X.clone()], [spec_of(mesh)]), torch.ones(3)
        assert sf.full(run(*x, y)).equal(X)
    return run


def test_a_local_tensor_of_another_shape_or_dtype_is_refused_by_name(mesh: Any) -> None:
    run, y = step(mesh), torch.ones(3)
    for local, said in ((X[:4], "(4, 3)"), (X.double(), "torch.float64")):
        for _ in range(2):
            with pytest.raises(sf.PlacementError) as caught:
                run(*dtensors([local], [spec_of(mesh)]), y)
            text = str(caught.value)
            assert "argument x" in text and said in text and "(5, 3)" in text
            assert caught.value.arg_path == "x" and caught.value.fix
    assert sf.full(run(*dtensors([X], [spec_of(mesh)]), y)).equal(X)


def test_a_local_tensor_of_other_strides_is_read_as_it_lies(mesh: Any) -> None:
    run, y = step(mesh), torch.ones(3)
    strided = X.t().contiguous().t()
    assert strided.stride() != X.stride()
    for local in (strided, X, strided, X.repeat(1, 2)[:, :3]):
        assert sf.full(run(*dtensors([local], [spec_of(mesh)]), y)).equal(X)


def test_compiled_code_leaves_the_layout_of_arguments_to_the_call(mesh: Any) -> None:
    run, y = step(mesh, "inductor"), torch.ones(3)
    x = dtensors([X], [spec_of(mesh)])[0]
    code = run.compile(x, y).code
    assert "assert_size_stride(" not in code.partition("def call")[2]
    strided = X.t().contiguous().t()
    assert sf.full(run(*dtensors([strided], [spec_of(mesh)]), y)).equal(X)
    plain = sf.jit(lambda x: x + 1)
    assert plain(X).equal(X + 1) and plain(X.t()).equal(X.t() + 1)
