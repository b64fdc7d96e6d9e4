"""Around the code of one rank: each rank's own tensors as DTensors of all, and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardfn as sf
from shardfn import _compat
from shardfn.runtime import Request
from shardfn.runtime.arguments import OWN
from shardfn.runtime.arguments.dynamic import ATTRIBUTE
from shardfn.simulated import SimulatedTensor, UnreadTensor
from shardfn.transforms.dtensors import _outside
from tests.compat.dynamo.test_shells import Scaled

X = torch.arange(6.0).view(2, 3)


def fn(x: Any, y: Any = None, *, k: Any = None) -> Any: ...


REQUEST = Request("f", fn, fn)


@pytest.fixture(name="mesh")
def _mesh() -> Iterator[Any]:
    with sf.fake_world(4):
        yield sf.make_mesh((2, 2), ("dp", "tp"))


def enter(mesh: Any, *args: Any, request: Request = REQUEST, **kwargs: Any) -> Any:
    return _outside.entering(request, mesh, args, kwargs)


def test_a_plain_tensor_has_an_element_for_each_rank(mesh: Any) -> None:
    ((x,), _) = enter(mesh, X.T)
    assert isinstance(x, DTensor) and getattr(x, OWN) is True
    assert x.shape == (4, 3, 2) and x.stride() == (6, 1, 3)
    assert x.placements == (Shard(0), Shard(0))
    local = _compat.local_tensor(x)
    assert isinstance(local, SimulatedTensor)
    assert [y.tolist() for y in local.shards] == [[X.T.tolist()]] * 4


def test_dtensors_and_constants_enter_as_they_are(mesh: Any) -> None:
    d = distribute_tensor(X, mesh, [Replicate(), Replicate()])
    (args, kwargs) = enter(mesh, {"d": d, "n": 3}, k="mode")
    assert args[0]["d"] is d and args[0]["n"] == 3 and kwargs == {"k": "mode"}


def test_each_ranks_own_tensors_stay_its_own(mesh: Any) -> None:
    own = SimulatedTensor([X + r for r in range(4)], 0)
    ((x,), _) = enter(mesh, own)
    shards = _compat.local_tensor(x).shards
    assert [float(y[0, 0, 0]) for y in shards] == [0, 1, 2, 3]
    assert _outside.leaving((x, ("",))).shards[3].tolist() == (X + 3).tolist()


def test_a_shape_enters_without_values(mesh: Any) -> None:
    ((x,), _) = enter(mesh, sf.ShapeDtype((2, 3), torch.float64))
    assert x.shape == (4, 2, 3) and x.dtype == torch.float64


def test_a_fake_world_has_no_values() -> None:
    with sf.fake_world(4, numerics=False):
        mesh = sf.make_mesh((4,), ("dp",))
        ((x,), _) = enter(mesh, X)
        assert isinstance(_compat.local_tensor(x), UnreadTensor)


def test_a_tensor_that_holds_others_enters_by_its_parts(mesh: Any) -> None:
    ((held,), _) = enter(mesh, Scaled(X, torch.ones(1), "note"))
    assert held.shape == (4, 2, 3) and isinstance(held.data_, DTensor)
    out = _outside.leaving((held, ("",)))
    assert out.shape == (2, 3) and out.note == "note"
    assert torch.equal(out.data_.shards[0], X)


def test_a_tensor_that_holds_dtensors_alone_is_global(mesh: Any) -> None:
    d = distribute_tensor(X, mesh, [Replicate(), Replicate()])
    pair = Scaled(d, d, None)
    (entered,) = enter(mesh, pair)[0]
    assert entered is pair
    with pytest.raises(sf.TreeError) as caught:
        enter(mesh, Scaled(d, X, None))
    assert "a Scaled of DTensors and other tensors" in str(caught.value)


def test_a_tensor_that_requires_grad_is_refused_by_its_path(mesh: Any) -> None:
    with pytest.raises(sf.ShardError) as caught:
        enter(mesh, {"w": X.clone().requires_grad_()})
    text = str(caught.value)
    assert text.startswith("f, argument x['w']: it requires grad")
    with torch.no_grad():
        enter(mesh, {"w": X.clone().requires_grad_()})


def test_dims_that_change_come_after_the_ranks(mesh: Any) -> None:
    x = X.clone()
    torch._dynamo.mark_dynamic(x, 1)
    ((entered, other), _) = enter(mesh, x, X)
    assert getattr(entered, ATTRIBUTE) == {2: True}
    assert getattr(other, ATTRIBUTE) == {}


def test_a_result_is_the_ranks_own_unless_it_is_a_dtensor(mesh: Any) -> None:
    ((x,), _) = enter(mesh, X)
    out = _outside.leaving(({"own": x, "d": x, "n": 3}, (" ", "", "")))
    assert out["own"] is x and out["n"] == 3
    assert isinstance(out["d"], SimulatedTensor) and out["d"].shape == (2, 3)


def test_placements_of_the_arguments(mesh: Any) -> None:
    d = distribute_tensor(X, mesh, [Shard(0), Replicate()])
    assert _outside.placed((X, d), {"k": 3}) == ("", "dp=S0,tp=R", "")
