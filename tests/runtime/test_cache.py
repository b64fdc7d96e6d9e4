"""What is staged: shared by equal transforms of one function, and forgotten with it."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.runtime import cache


def doubled(x: torch.Tensor) -> torch.Tensor:
    return (2 * x).sum()


def staged(fn: Any) -> torch.Tensor:
    """The gradient of fn over two ranks."""
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        return sf.full(
            sf.shard(sf.grad(fn), mesh, (sf.P("dp"),), backend="aten")(
                torch.ones(3)
            )
        )


@pytest.mark.parametrize(
    "make", [lambda fn: fn, functools.partial], ids=["function", "partial"]
)
@pytest.mark.parametrize(
    "use", [lambda fn: sf.grad(fn)(torch.ones(3)), staged], ids=["alone", "sharded"]
)
def test_what_was_staged_for_a_function_goes_when_it_goes(
    make: Any, use: Any
) -> None:
    def local(x: torch.Tensor) -> torch.Tensor:
        return (3 * x).sum()

    assert torch.equal(use(make(local)), torch.full((3,), 3.0))
    gone = weakref.ref(local)
    del local
    gc.collect()
    assert gone() is None


def test_twenty_functions_leave_nothing_behind() -> None:
    def once(i: int) -> None:
        sf.value_and_grad(lambda x: (x * i).sum())(torch.ones(2))

    once(0)
    gc.collect()
    before = len(gc.get_objects())
    for i in range(1, 21):
        once(i)
    gc.collect()
    assert (
        len(gc.get_objects()) - before < 20 * 200
    )  # one small program is more than 2,000 objects


def test_equal_transforms_of_one_function_are_staged_once() -> None:
    sf.grad(doubled)(torch.ones(3))
    before = cache.counts["captures"]
    sf.grad(doubled)(torch.ones(3))
    assert cache.counts["captures"] == before


def test_clear_forgets_functions_that_live_on() -> None:
    fn = sf.grad(doubled)
    fn(torch.ones(3))
    cache.clear()
    fn(torch.ones(3))
    assert cache.counts["captures"] == 1


def test_a_wrapper_that_takes_over_attributes_does_not_take_over_programs() -> None:
    sf.grad(doubled)(torch.ones(3))

    @functools.wraps(doubled)
    def tripled(x: torch.Tensor) -> torch.Tensor:
        return (3 * x).sum()

    assert cache.CARRIED in tripled.__dict__
    assert torch.equal(sf.grad(tripled)(torch.ones(3)), torch.full((3,), 3.0))
    assert torch.equal(sf.grad(doubled)(torch.ones(3)), torch.full((3,), 2.0))


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda fn: pickle.loads(pickle.dumps(fn)),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_staged_partial_is_copied_without_its_programs(copied: Any) -> None:
    fn = functools.partial(doubled)
    sf.grad(fn)(torch.ones(3))
    other = copied(fn)
    assert torch.equal(sf.grad(other)(torch.ones(3)), torch.full((3,), 2.0))
    assert other.__dict__[cache.CARRIED].owner() is other


class Model(torch.nn.Module):
    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return (2 * x).sum()


def test_methods_stay_alive_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "ALIVE", 2)

    def used() -> weakref.ref[Model]:
        model = Model()
        assert torch.equal(
            sf.grad(model.loss)(torch.ones(3)), torch.full((3,), 2.0)
        )
        return weakref.ref(model)

    seen = [used() for _ in range(4)]
    gc.collect()
    assert [ref() is not None for ref in seen] == [False, False, True, True]


class Slim:
    __slots__ = ("__dict__",)  # no weak references

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return doubled(x)


@pytest.mark.parametrize(
    "fn",
    [Slim(), torch.sum, Model().loss],
    ids=["no weak references", "built in", "method"],
)
def test_a_callable_that_cannot_carry_a_record_is_staged_once_too(fn: Any) -> None:
    sf.grad(fn)(torch.ones(3))
    before = cache.counts["captures"]
    sf.grad(fn)(torch.ones(3))
    assert cache.counts["captures"] == before
