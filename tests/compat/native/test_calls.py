"""C++ and Python answer alike."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from support.stages.native import way, with_native
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardfn as sf
from shardfn import P, _compat
from shardfn._compat.distributed.groups import dtensor_spec, dtensors
from shardfn._compat.native import calls, library
from shardfn.simulated import remains_of

__all__ = ["way"]
ORDINARY = torch.ones(2, 3)


class Other(torch.Tensor):
    """A tensor of another class."""


OTHERS: dict[str, Any] = {
    "dtype": ORDINARY.double(),
    "shape": torch.ones(3, 2),
    "strides": torch.ones(3, 2).t(),
    "dims": torch.ones(2, 3, 1),
    "followed": torch.ones(2, 3, requires_grad=True),
    "parameter": torch.nn.Parameter(ORDINARY, requires_grad=False),
    "class": ORDINARY.as_subclass(Other),
    "device": ORDINARY.to("meta"),
    "sparse": ORDINARY.to_sparse(),
    "number": 3.0,
    "container": {"x": ORDINARY},
}


@pytest.mark.parametrize("name", OTHERS)
def test_one_other_tensor_is_seen(way: str, name: str) -> None:
    check = calls.SameTensors([ORDINARY, torch.ones(4)])
    for _ in range(2):  # C++'s record is made by the first call
        assert check([ORDINARY + 1, torch.zeros(4)])
    assert not check([OTHERS[name], torch.ones(4)])
    assert not check([torch.ones(4), ORDINARY])
    assert check([ORDINARY, torch.ones(4)])


def test_modes_and_bits_are_seen(way: str) -> None:
    plain = torch.ones(2, dtype=torch.complex64)
    check = calls.SameTensors([plain])
    assert check([plain]) and check([plain * 2])
    assert not check([plain.conj()])
    with torch.inference_mode():
        assert not check([plain * 2])
    seen: list[bool] = []
    torch.func.vmap(lambda x: (seen.append(check([x])), x)[1])(
        torch.ones(1, 2, dtype=torch.complex64)
    )
    assert seen == [False]


def placed() -> tuple[Any, list[Any], list[torch.Tensor]]:
    """A mesh, two specs, and two local tensors."""
    mesh = sf.make_mesh((2,), ("a",))
    specs = [
        dtensor_spec(mesh, (place,), (5, 3), (3, 1), torch.float32)
        for place in (Shard(0), Replicate())
    ]
    return mesh, specs, [torch.ones(3, 3), torch.ones(5, 3)]


def test_dtensors_of_the_same_specs_are_told_from_all_others(way: str) -> None:
    with sf.fake_world(2):
        mesh, specs, locals_ = placed()
        same = dtensors(locals_, specs)
        assert calls.are_dtensors(same, specs)
        assert not calls.are_dtensors(same[::-1], specs)
        assert not calls.are_dtensors([same[0], locals_[1]], specs)
        assert not calls.are_dtensors([same[0], {"x": same[1]}], specs)
        followed = dtensors(locals_, specs)[1].requires_grad_()
        assert not calls.are_dtensors([same[0], followed], specs)
        equal = dtensor_spec(mesh, (Shard(0),), (5, 3), (3, 1), torch.float32)
        assert equal == specs[0]
        assert not calls.are_dtensors(same, [equal, specs[1]])
        meta = sf.distribute(torch.ones(5, 3), mesh, P("a"))
        is_same = calls.are_dtensors([meta, same[1]], [meta._spec, specs[1]])
        assert not is_same, "its local tensor is no ordinary one"


def test_dtensors_are_opened_and_filled_again(way: str) -> None:
    with sf.fake_world(2):
        _, specs, locals_ = placed()
        spares = dtensors(locals_, specs)
        assert all(map(lambda x, y: x is y, calls.locals_of(spares), locals_))
        results = [torch.zeros(5, 3), torch.zeros(3, 3), torch.zeros(3, 3)]
        wanted = [specs[1], specs[0], specs[0]]
        made = calls.placed_again(results, wanted, spares, (1, 0, -1), dtensors)
        assert made[0] is spares[1] and made[1] is spares[0]
        assert type(made[2]) is DTensor and len(results) == 3
        for x, local, spec in zip(made, results, wanted, strict=True):
            assert x._local_tensor is local and x._spec is spec


KIND = remains_of("f")


def like(x: torch.Tensor) -> Any:
    """A donated tensor of an earlier call."""
    about = {"strides": x.stride(), "dtype": x.dtype, "device": x.device}
    return _compat.without_memory(KIND, [(tuple(x.shape), about)])[0]


def exchanged(mine: list[Any], rest: list[Any], earlier: list[Any], outside: Any = ()) -> Any:
    count = len(mine)
    taken, others = tuple(range(count)), tuple(range(count, count + len(rest)))
    return calls.exchanged([*mine, *rest], taken, others, outside, earlier, KIND, None)


def test_the_memory_goes_to_the_tensors_of_an_earlier_call() -> None:
    with_native()
    x, y, rest = torch.ones(3), torch.zeros(2, 2), torch.ones(1)
    places = x.data_ptr(), y.data_ptr()
    earlier = [like(x), like(y)]
    given = exchanged([x, y], [rest], earlier)
    assert [type(z) for z in given] == [torch.Tensor] * 3
    assert (given[0].data_ptr(), given[1].data_ptr()) == places
    assert given[0] is earlier[0] and given[2] is rest
    assert type(x) is KIND and type(y) is KIND
    with pytest.raises(sf.ShardError, match="was donated"):
        x.sum()


def holds_grad() -> torch.Tensor:
    x = torch.ones(3, requires_grad=True)
    x.sum().backward()
    return x.requires_grad_(False)


# Each makes a tensor that only Python can judge, and what else refers to it.
SHARED: dict[str, Any] = {
    "a view": lambda: (x := torch.ones(3), x[:1]),
    "a weak reference": lambda: (x := torch.ones(3), weakref.ref(x)),
    "its storage": lambda: (x := torch.ones(3), x.untyped_storage()),
    "numpy": lambda: (torch.from_numpy(torch.ones(3).numpy()), None),
    "an array": lambda: (x := torch.ones(3), x.numpy()),
    "other processes": lambda: (torch.ones(3).share_memory_(), None),
    "a graph": lambda: (x := torch.ones(3, requires_grad=True), x * 2),
    "a gradient": lambda: (holds_grad(), None),
    "a class": lambda: (torch.ones(3).as_subclass(Other), None),
    "a parameter": lambda: (torch.nn.Parameter(torch.ones(3)), None),
    "a sparse tensor": lambda: (torch.ones(3).to_sparse(), None),
    "a number": lambda: (3.0, None),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_tensor_that_something_else_sees_is_left_to_python(name: str) -> None:
    with_native()
    x, held = SHARED[name]()
    first, before = torch.ones(2), torch.ones(2)
    earlier = [like(first), like(torch.ones(3))]
    assert exchanged([first, x], [], earlier) is None
    assert type(first) is torch.Tensor and first.equal(before), held
    assert all(type(y) is KIND for y in earlier)


def test_a_tensor_that_is_passed_twice_is_left_to_python() -> None:
    with_native()
    x = torch.ones(3)
    for mine, rest, outside in (([x, x], [], ()), ([x], [x], ()), ([x], [], (x,))):
        earlier = [like(x) for _ in mine]
        assert exchanged(mine, rest, earlier, outside) is None
        assert type(x) is torch.Tensor and x.equal(torch.ones(3))


def test_an_earlier_tensor_that_is_held_or_has_attributes_is_left_alone() -> None:
    with_native()
    x = torch.ones(3)
    held = like(x)
    assert exchanged([x], [], [held]) is None
    watched = [like(x)]
    look = weakref.ref(watched[0])
    assert exchanged([x], [], watched) is None and look() is watched[0]
    tagged = [like(x)]
    tagged[0].tag = "mine"
    assert exchanged([x], [], tagged) is None
    assert exchanged([x], [], []) is None
    assert exchanged([x], [], [like(x)]) is not None


def test_without_cpp_nothing_is_exchanged() -> None:
    with library.only_python():
        x = torch.ones(3)
        assert exchanged([x], [], [like(x)]) is None
