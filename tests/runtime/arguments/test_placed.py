"""The metadata of an argument for capture."""

from __future__ import annotations

from types import SimpleNamespace

import torch

import shardfn as sf
from shardfn.runtime.arguments.placed import Placed, aval_of, device_of

CUDA = SimpleNamespace(device_type="cuda")


def test_a_tensor_keeps_its_layout() -> None:
    x = torch.ones(2, 3, dtype=torch.float16).t()
    aval = aval_of(x, None)
    assert (aval.shape, aval.stride, aval.dtype, aval.device) == (
        (3, 2), (1, 3), torch.float16, "cpu",
    )  # fmt: skip


def test_a_shape_is_contiguous_on_the_device_of_the_mesh() -> None:
    aval = aval_of(sf.ShapeDtype((2, 3), torch.float64), CUDA)
    assert (aval.shape, aval.stride, aval.device) == ((2, 3), (3, 1), "cuda")
    assert aval_of(sf.ShapeDtype((2,)), None).device == "cpu"


def test_without_a_mesh_a_program_runs_where_its_arguments_live() -> None:
    on = lambda *places: SimpleNamespace(
        mesh=None, avals=[SimpleNamespace(device=x) for x in places]
    )
    device = Placed.device.fget
    assert device is not None
    assert device(on()) == device(on("cpu")) == "cpu"
    assert device(on("cpu", "cuda:1")) == "cuda:1"
    assert device(SimpleNamespace(mesh=CUDA, avals=[])) == "cuda"


def test_a_tensor_without_values_stands_for_one_on_the_device_of_the_mesh() -> None:
    assert device_of(torch.device("meta"), CUDA) == "cuda"
    assert device_of(torch.device("meta"), None) == "cpu"
    assert device_of(torch.device("cpu"), CUDA) == "cpu"
    with torch.device("meta"):  # of a module that is made without memory
        assert device_of(torch.device("meta"), None) == "cpu"
