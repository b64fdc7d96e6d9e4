"""The inputs of a capture: fakes for tensors, and objects that are closed over."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn import _compat
from shardfn.capture.inputs import Inputs, holding


def inputs(*args: object, device: str = "cpu") -> Inputs:
    paths = [f"args[{i}]" for i in range(len(args))]
    return Inputs.like(args, {}, paths, device, _compat.FakeTensorMode(), "f")


def test_a_fake_has_the_shape_the_strides_and_the_dtype_of_its_tensor() -> None:
    found = inputs(torch.ones(2, 3).t(), 5)
    (fake, number) = found.fakes
    assert (fake.shape, fake.stride(), number) == ((3, 2), (1, 3), 5)
    assert _compat.is_fake(fake)
    assert found.tensor_paths == ["args[0]"] and found.tensor_names == {0: "args[0]"}


def test_a_shape_stands_for_a_tensor_on_the_device_of_the_program() -> None:
    found = inputs(sf.ShapeDtype((2, 3), torch.float16), torch.ones(2, device="meta"))
    assert [(x.shape, x.dtype, str(x.device)) for x in found.tensors] == [
        ((2, 3), torch.float16, "cpu"),
        ((2,), torch.float32, "cpu"),
    ]


def test_a_tensor_without_strides_is_refused_by_its_path() -> None:
    with pytest.raises(sf.CaptureError, match=r"args\[0\] is torch.sparse_coo"):
        inputs(torch.ones(2).to_sparse())


class Config:
    scale = 3


def test_objects_are_closed_over_and_their_places_are_empty() -> None:
    fn, args, kwargs = holding(lambda x, c, *, other: (x, c, other), (1, Config), {"other": Config})
    assert args == (1, None) and kwargs == {"other": None}
    assert fn(*args, **kwargs) == (1, Config, Config)


def test_without_objects_nothing_changes() -> None:
    fn = lambda x: x
    assert holding(fn, (torch.ones(1), [3]), {"k": "text"})[0] is fn
