"""Around the code of one rank: each rank's own tensors as DTensors of all, and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from worlds import simulated

import shardfn as sf
from shardfn.runtime import Request
from shardfn.transforms.dtensors import _outside

X = torch.arange(6.0).view(2, 3)


def fn(x: Any, y: Any = None, *, k: Any = None) -> Any: ...


REQUEST = Request("f", fn, fn)


@pytest.fixture(name="mesh")
def _mesh() -> Iterator[Any]:
    with simulated(dp=2, tp=2) as mesh:
        yield mesh


def enter(mesh: Any, *args: Any, request: Request = REQUEST, **kwargs: Any) -> Any:
    return _outside.entering(request, mesh, args, kwargs)


def test_a_tensor_that_requires_grad_is_refused_by_its_path(mesh: Any) -> None:
    with pytest.raises(sf.ShardError) as caught:
        enter(mesh, {"w": X.clone().requires_grad_()})
    text = str(caught.value)
    assert text.startswith("f, argument x['w']: the argument requires grad")
    with torch.no_grad():
        enter(mesh, {"w": X.clone().requires_grad_()})
