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
        return sf.full(sf.shard(sf.grad(fn), mesh, (sf.P("dp"),), backend="aten")(torch.ones(3)))


@pytest.mark.parametrize("make", [lambda fn: fn, functools.partial], ids=["function", "partial"])
@pytest.mark.parametrize(
    "use", [lambda fn: sf.grad(fn)(torch.ones(3)), staged], ids=["alone", "sharded"]
)
def test_what_was_staged_for_a_function_goes_when_it_goes(make: Any, use: Any) -> None:
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
    assert len(gc.get_objects()) - before < 20 * 200  # one small program is more than 2,000 objects


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
        assert torch.equal(sf.grad(model.loss)(torch.ones(3)), torch.full((3,), 2.0))
        return weakref.ref(model)

    seen = [used() for _ in range(4)]
    gc.collect()
    assert [ref() is not None for ref in seen] == [False, False, True, True]


class Slim:
    __slots__ = ("__dict__",)  # no weak references

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return doubled(x)


@pytest.mark.parametrize(
    "fn", [Slim(), torch.sum, Model().loss], ids=["no weak references", "built in", "method"]
)
def test_a_callable_that_cannot_carry_a_record_is_staged_once_too(fn: Any) -> None:
    sf.grad(fn)(torch.ones(3))
    before = cache.counts["captures"]
    sf.grad(fn)(torch.ones(3))
    assert cache.counts["captures"] == before


def captures_of(*transformed: Any) -> int:
    """How many programs are captured for functions that are called one after the other on two
    meshes.
    """
    before = cache.counts["captures"]
    x = torch.arange(6.0).reshape(2, 3)
    for n, fn in enumerate(transformed):
        with sf.fake_world(n + 2):
            mesh = sf.make_mesh((n + 2,), ("dp",))
            sf.shard(fn, mesh, sf.P("dp"), backend="aten")(x)
    return cache.counts["captures"] - before


def with_attribute(fn: Any) -> Any:
    made = sf.grad(fn)
    made.note = "a field of the user's"
    return made


# (what makes a function from another, twice; how many captures the two need)
MADE: dict[str, tuple[Any, Any, int]] = {
    "grad": (sf.grad, sf.grad, 1),
    "value_and_grad": (sf.value_and_grad, sf.value_and_grad, 1),
    "vmap of jacrev": (lambda f: sf.vmap(sf.jacrev(f)), lambda f: sf.vmap(sf.jacrev(f)), 1),
    "other transforms": (sf.jacrev, sf.jacfwd, 2),
    "a transform more": (sf.grad, lambda f: sf.vmap(sf.grad(f)), 2),
    "other options": (lambda f: sf.vmap(f, out_axes=0), lambda f: sf.vmap(f, out_axes=-1), 2),
    "options that Python takes for equal": (
        lambda f: sf.grad(f, argnums=0),
        lambda f: sf.grad(f, argnums=(0,)),
        2,
    ),
    "options that may change": (
        lambda f: sf.vmap(f, in_axes=[0]),
        lambda f: sf.vmap(f, in_axes=[0]),
        2,
    ),
    "an attribute that is not an option": (sf.grad, with_attribute, 2),
    "a subclass": (sf.grad, lambda f: Sub((f,), 0, False), 2),
    "a partial": (
        lambda f: sf.grad(functools.partial(f)),
        lambda f: sf.grad(functools.partial(f)),
        2,
    ),
    "checkpoint, whose policy may be any function": (
        lambda f: sf.grad(sf.checkpoint(f)),
        lambda f: sf.grad(sf.checkpoint(f)),
        2,
    ),
}


class Sub(type(sf.grad(doubled))):  # type: ignore[misc]
    """A transform that is not known."""


@pytest.mark.parametrize("name", MADE)
def test_equal_transforms_inside_shard_share_the_captures_of_their_function(name: str) -> None:
    first, second, count = MADE[name]

    def local(x: torch.Tensor) -> torch.Tensor:
        return (x * x).sum()

    assert captures_of(first(local), second(local)) == count


def test_equal_transforms_of_two_functions_share_nothing() -> None:
    def local(k: float) -> Any:
        return lambda x: (k * x).sum()

    assert captures_of(sf.grad(local(2.0)), sf.grad(local(2.0))) == 2


def test_a_shared_capture_is_for_what_the_function_closes_over_now() -> None:
    k = 2.0

    def local(x: torch.Tensor) -> torch.Tensor:
        return (k * x).sum()

    for k, count in ((2.0, 1), (2.0, 0), (3.0, 1), (2.0, 0)):
        before = cache.counts["captures"]
        got = staged(local)
        assert torch.equal(got, torch.full((3,), k))
        assert cache.counts["captures"] - before == count
