"""Modules that return objects of classes of their own, as those of Hugging Face do."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils import _pytree

import shardfn as sf
from shardfn import P

X = torch.arange(6.0, dtype=torch.float64).view(3, 2)


@dataclasses.dataclass
class Output(OrderedDict):
    """A dict whose items are attributes."""

    loss: Any = None
    logits: Any = None
    cache: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


_pytree.register_pytree_node(
    Output,
    lambda x: (list(x.values()), list(x)),
    lambda values, names: Output(**dict(zip(names, values, strict=True))),
    serialized_type_name="tests.Output",
    flatten_with_keys_fn=lambda x: (
        [(_pytree.MappingKey(key), child) for key, child in x.items()],
        list(x),
    ),
)


class Cache:
    """An object of tensors, numbers, a class and other objects."""

    kind: type

    def __init__(self, keys: torch.Tensor, below: Any = None) -> None:
        self.keys, self.below, self.count, self.kind = keys, below, 2, dict


class Slotted:
    """An object that is more than its `__dict__`."""

    __slots__ = ("x",)

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Counted:
    """An object that changes what it is given."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value + 1)


class Circle:
    """An object that leads back to itself."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.below = x, [{"me": self}]


@dataclasses.dataclass
class Doubled(OrderedDict):
    """A dict whose constructor changes what it is given."""

    loss: Any = None

    def __post_init__(self) -> None:
        self["loss"] = 2 * self.loss


class Pair(NamedTuple):
    """A tuple of two."""

    a: Any
    b: Any


class Net(nn.Module):
    """A layer, and what `returns` makes of its input and its result."""

    def __init__(self, returns: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.returns = nn.Linear(2, 4).double(), returns

    def forward(self, x: torch.Tensor) -> Any:
        return self.returns(x, self.layer(x))


def output(x: Any, y: Any) -> Output:
    return Output(loss=y.square().mean(), logits=y, cache=Cache(x + 1, [Cache(y)]))


def shared(x: Any, y: Any) -> Any:
    cache = Cache(y)
    return [cache, {"again": cache}]


def written_in_one_place(out: Any) -> Any:
    out[0].keys = out[0].keys * 3
    return out[1]["again"].keys.square().sum()


READS = {
    "an attribute": (output, lambda out: out.loss),
    "an item": (output, lambda out: out["logits"].sum() * out["loss"]),
    "an object": (output, lambda out: (out.cache.keys * out.cache.count).sum() * out.loss),
    "an object in it": (output, lambda out: out.cache.below[0].keys.square().sum()),
    "a named tuple of one": (
        lambda x, y: Pair(x, {"out": output(x, y)}),
        lambda out: out.b["out"].loss + out.a.sum(),
    ),
    "an object in two places": (shared, written_in_one_place),
    "its class": (output, lambda out: out.loss * (2 if isinstance(out.cache, Cache) else 3)),
}


def _loss(returns: Any, read: Any) -> Any:
    fn, params, buffers = sf.functionalize(Net(returns))
    return lambda p, x: read(fn(p, buffers, x)[0]), params


def _wanted(returns: Any, read: Any) -> Any:
    net = Net(returns)
    loss = read(net(X))
    loss.backward()
    zero = lambda p: torch.zeros_like(p) if p.grad is None else p.grad
    return loss.detach(), {name: zero(p) for name, p in net.named_parameters()}


@pytest.mark.parametrize("case", READS)
def test_what_a_function_reads_of_a_result(case: str) -> None:
    loss, params = _loss(*READS[case])
    wanted = _wanted(*READS[case])
    torch.testing.assert_close(sf.value_and_grad(loss)(params, X), wanted)
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("dp",))
        step = sf.shard(sf.value_and_grad(loss), mesh, (P(), P("dp")), backend="aten")
        torch.testing.assert_close(sf.full(step(params, X)), wanted)


def _on_two_ranks() -> None:
    loss, params = _loss(*READS["an item"])
    mesh = sf.make_mesh((2,), ("dp",))
    step = sf.shard(sf.value_and_grad(loss), mesh, (P(), P("dp")))
    wanted = _wanted(*READS["an item"])
    torch.testing.assert_close(sf.full(step(params, X)), wanted)


def test_on_real_ranks() -> None:
    run_ranks(2, _on_two_ranks)


def test_an_object_that_torchs_pytree_knows_is_a_result() -> None:
    fn = lambda x: Output(loss=x.sum(), logits={"y": x * 2})
    out = sf.jit(fn, backend="aten")(X)
    assert type(out) is Output
    torch.testing.assert_close(out.loss, X.sum())
    torch.testing.assert_close(out["logits"]["y"], X * 2)
    gradient, aux = sf.grad(lambda x: (x.sum(), fn(x)), has_aux=True)(X)
    assert type(aux) is Output
    torch.testing.assert_close(gradient, torch.ones_like(X))
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("dp",))
        placed = sf.shard(fn, mesh, P("dp"), backend="aten")(X)
        torch.testing.assert_close(sf.full(placed["logits"]["y"]), X * 2)
        lowered = sf.shard(fn, mesh, P("dp"), backend="aten").lower(X)
        assert "result.logits.y = " in str(lowered)


def test_it_is_a_tree_from_the_first_time_on() -> None:
    @dataclasses.dataclass
    class Other(Output):
        """A class that nothing has met before."""

    _pytree.register_pytree_node(
        Other,
        lambda x: (list(x.values()), list(x)),
        lambda values, names: Other(**dict(zip(names, values, strict=True))),
        serialized_type_name="tests.Other",
        flatten_with_keys_fn=lambda x: (
            [(_pytree.MappingKey(key), child) for key, child in x.items()],
            list(x),
        ),
    )
    out = sf.tree_map(lambda x: x + 1, Other(loss=X))
    assert type(out) is Other
    torch.testing.assert_close(out.loss, X + 1)


@pytest.mark.parametrize(
    ("returns", "said"),
    [
        (lambda x, y: {x}, "the module returns a set"),
        (lambda x, y: [x, Slotted(y)], "the module returns a Slotted at [1]"),
        (
            lambda x, y: Output(cache=Cache(x, {"at": Slotted(y)})),
            "the module returns a Slotted at cache.below.at",
        ),
        (lambda x, y: Counted(y), "the module returns a Counted"),
        (lambda x, y: Circle(y), "the module returns a Circle"),
        (lambda x, y: Doubled(y), "the module returns a Doubled"),
    ],
    ids=["a set", "slots", "slots inside", "changes", "a circle", "constructed"],
)
def test_what_is_more_than_its_attributes_is_refused(returns: Any, said: str) -> None:
    fn, params, buffers = sf.functionalize(Net(returns))
    with pytest.raises(sf.CaptureError) as caught:
        sf.jit(lambda p, x: fn(p, buffers, x)[0], backend="aten")(params, X)
    assert said in str(caught.value)


def test_an_object_that_no_pytree_knows_is_no_result_of_a_call() -> None:
    fn, params, buffers = sf.functionalize(Net(output))
    with pytest.raises(sf.CaptureError, match="result.cache is a Cache"):
        sf.jit(lambda p, x: fn(p, buffers, x)[0], backend="aten")(params, X)
