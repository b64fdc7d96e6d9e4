"""Deep copies inside captured code, where tensors have no memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardfn as sf
from shardfn.errors import CaptureError


class Copies(nn.Module):
    """A module that copies tensors, as one does that makes another module in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(3.0))
        self.scale = nn.Buffer(torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        twice = [copy.deepcopy({"scale": self.scale, "same": self.scale}), torch.tensor(2.0)]
        first, two = copy.deepcopy(twice)
        assert first["scale"] is first["same"]
        return (self.w * x).sum() * two + first["scale"]


def test_a_module_copies_tensors() -> None:
    module, x = Copies(), torch.ones(3)
    forward, params, buffers = sf.functionalize(module)
    y, _ = sf.jit(forward, backend="aten")(params, buffers, x)
    torch.testing.assert_close(y, module(x).detach())


def test_a_function_that_copies_a_tensor_is_refused_by_name() -> None:
    """The search for the user's error runs the function on fake tensors."""
    with pytest.raises(CaptureError, match="deepcopy"):
        sf.jit(lambda x: copy.deepcopy(torch.tensor(0.0)) + x, backend="aten")(torch.ones(3))


def test_a_constructor_copies_a_module() -> None:
    """nn.TransformerEncoder copies the layer that it gets, as many others do."""
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        made = lambda: nn.Sequential(*(copy.deepcopy(Copies()) for _ in range(2)))
        _, params, buffers = sf.init(made, mesh, sf.P(), sf.random.key(0), backend="aten")
        assert list(params) == ["0.w", "1.w"]
        assert list(buffers) == ["0.scale", "1.scale"]
        torch.testing.assert_close(sf.full(params)["1.w"], torch.arange(3.0))
        torch.testing.assert_close(sf.full(buffers)["1.scale"], torch.tensor(3.0))


def test_a_frozen_parameter_stays_one_in_a_copy() -> None:
    def made() -> nn.Module:
        module = Copies()
        module.w.requires_grad_(False)
        return copy.deepcopy(module)

    _, params, buffers = sf.init(made, key=sf.random.key(0), backend="aten")
    assert not params
    assert {*buffers} == {"w", "scale"}
    torch.testing.assert_close(buffers["w"], torch.arange(3.0))
    torch.testing.assert_close(buffers["scale"], torch.tensor(3.0))
