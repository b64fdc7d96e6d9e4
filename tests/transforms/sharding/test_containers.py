"""Classes that hold tensors, as arguments and results of `jit`, `shard` and `shard_map`: the same
class comes back, or it is refused by name; and gradients of what per-rank code closes over.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P

X = torch.arange(8.0, dtype=torch.float64).reshape(4, 2)
TRANSFORMS = ("jit", "shard", "shard_map")


class Pair(NamedTuple):
    a: Any
    b: Any


class Config(dict[str, Any]):
    pass


class Noted(UserDict[str, Any]):
    """A mapping with attributes, of which one is a constant."""

    def __init__(self, items: Any = (), **more: Any) -> None:
        super().__init__(items, **more)
        self.note = "n"
        self.kept: list[int] = []


class Named(dict[str, Any]):
    """A dict whose items are attributes, as in many configurations."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


@dataclasses.dataclass
class Registered:
    a: Any
    b: Any
    scale: int = 2

    def __getitem__(self, key: Any) -> Any:
        return getattr(self, key)


torch.utils._pytree.register_dataclass(Registered)


class Row(list[Any]):
    pass


class Record(tuple[Any, ...]):
    pass


@dataclasses.dataclass
class Plain:
    a: Any
    b: Any


TREES: dict[str, Callable[[Any, Any], Any]] = {
    "NamedTuple": Pair,
    "OrderedDict": lambda a, b: OrderedDict(b=b, a=a),
    "defaultdict": lambda a, b: defaultdict(list, {"a": a, "b": b}),
    "Config": lambda a, b: Config(a=a, b=b),
    "Named": lambda a, b: Named(a=a, b=b),
    "Noted": lambda a, b: Noted(a=a, b=b),
    "Registered": Registered,
}
OTHERS: dict[str, Callable[[Any, Any], Any]] = {
    "Row": lambda a, b: Row([a, b]),
    "Record": lambda a, b: Record((a, b)),
    "Plain": Plain,
}


def staged(transform: str, fn: Callable[..., Any], mesh: Any) -> Any:
    if transform == "jit":
        return sf.jit(fn, backend="aten")
    if transform == "shard":
        return sf.shard(fn, mesh, P("dp"), backend="aten")
    places = P("dp")
    return sf.shard_map(fn, mesh, in_placements=places, out_placements=places)


def first(x: Any) -> Any:
    is_named = isinstance(x, (dict, UserDict, Registered))
    return x["a"] if is_named else x[0]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", TREES)
def test_a_tree_keeps_its_class(name: str, transform: str) -> None:
    make = TREES[name]
    kind = type(make(1, 2))

    def fn(tree: Any) -> Any:
        scale = 2 if type(tree) is kind else 5
        return make(first(tree) * scale, first(tree) + 1)

    with simulated(dp=2) as mesh:
        out = sf.full(staged(transform, fn, mesh)(make(X, X + 1)))
    assert type(out) is kind
    assert getattr(kind, "default_factory", 0) == 0 or out.default_factory is list
    wanted = make(X * 2, X + 1)
    assert attributes(out) == attributes(wanted)
    assert_close(values(out), values(wanted), rtol=0, atol=0)


def values(x: Any) -> Any:
    """What a container holds, in its order."""
    if isinstance(x, (dict, UserDict)):
        return dict(x)
    return vars(x) if isinstance(x, Registered) else list(x)


def attributes(x: Any) -> Any:
    """The attributes of a mapping."""
    return (x.note, x.kept) if isinstance(x, Noted) else ()


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", OTHERS)
def test_another_class_is_refused_by_name(name: str, transform: str) -> None:
    make = OTHERS[name]
    with simulated(dp=2) as mesh:
        takes = staged(transform, lambda c: first(c) * 2, mesh)
        with pytest.raises(sf.TreeError, match=f"argument c: a {name}\n") as caught:
            takes(make(X, X))
        assert f"  at: {__file__}:" in str(caught.value) and caught.value.fix
        gives = staged(transform, lambda x: make(x * 2, x), mesh)
        with pytest.raises(sf.CaptureError, match=f"result is a {name}\n") as found:
            gives(X)
        assert found.value.fix


MAPPINGS = ("Config", "Named", "Noted")


@pytest.mark.parametrize("name", MAPPINGS)
def test_a_mapping_has_gradients_placements_and_copies_of_its_own(name: str) -> None:
    make = TREES[name]
    w = torch.full((2,), 3.0, dtype=torch.float64)
    loss = lambda w, tree: (tree["a"] @ w * tree["b"].sum()).sum()
    wanted = torch.func.grad(loss)(w, make(X, X + 1))
    parts = ["kept"] if name == "Noted" else []
    by_tree = torch.func.grad(lambda a: loss(w, {"a": a, "b": X + 1}))(X)

    def changes(tree: Any) -> Any:
        tree["c"] = tree.pop("a") * 2
        return tree

    with simulated(dp=3) as mesh:
        prefix = {"a": P("dp"), "b": P(), **dict.fromkeys(parts, P())}
        step = sf.shard(sf.grad(loss), mesh, (P(), prefix))
        assert_close(sf.full(step(w, make(X, X + 1))), wanted)
        whole = sf.distribute(make(X, X + 1), mesh, P("dp"))
        assert type(whole) is type(make(X, X))
        found = sf.grad(lambda tree: loss(w, tree))(sf.full(whole))
        assert type(found) is type(whole)
        assert_close(found["a"], by_tree)
        p = w.clone().requires_grad_()
        sf.shard(loss, mesh, (P(), P("dp")))(p, make(X, X + 1)).backward()
        assert_close(p.grad, wanted)
        given = make(X, X)
        after = sf.full(sf.shard(changes, mesh, P("dp"))(given))
    assert list(given) == ["a", "b"] and list(after) == ["b", "c"]
    assert_close(after["c"], 2 * X)


def test_a_part_that_is_no_tensor_is_named() -> None:
    wrong = Noted(a=X, b=X)
    wrong.note = object()  # type: ignore[assignment]
    with pytest.raises(sf.TreeError, match=r"argument tree\['note'\]: a object"):
        sf.jit(lambda tree: tree["a"], backend="aten")(wrong)


def test_gradients_of_tensors_that_per_rank_code_closes_over() -> None:
    w = torch.full((4, 2), 3.0, dtype=torch.float64, requires_grad=True)
    whole = torch.full((2, 2), 3.0, dtype=torch.float64, requires_grad=True)
    places: Any = {"in_placements": P("dp"), "out_placements": P()}
    with simulated(dp=2) as mesh:
        total = lambda x: sf.psum((x * w[:2]).sum(), "dp")
        summed = sf.shard_map(total, mesh, **places)
        wanted = torch.cat([X[:2] + X[2:], torch.zeros_like(X[:2])])
        for fn in (summed, sf.jit(summed, backend="aten")):
            w.grad = None
            fn(X).backward()
            assert w.grad is not None
            assert_close(w.grad, wanted)
        x = X.clone().requires_grad_()
        summed(x).backward()
        assert_close(x.grad, torch.full_like(X, 3.0))
        closed = lambda x: sf.psum((x * whole).sum(), "dp")
        sf.shard_map(closed, mesh, **places)(X).backward()
        assert_close(whole.grad, X[:2] + X[2:])
        whole.grad = None
        at = lambda x, whole: sf.psum((x * whole).sum(), "dp")
        both: Any = {**places, "in_placements": (P("dp"), P())}
        sf.shard_map(at, mesh, **both)(X, whole).backward()
        assert_close(whole.grad, X[:2] + X[2:])


def test_gradients_of_a_module_that_per_rank_code_closes_over() -> None:
    layer = torch.nn.Linear(2, 2).double()
    layer(X).square().sum().backward()
    wanted = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    with simulated(dp=2) as mesh:
        places: Any = {"in_placements": P("dp"), "out_placements": P()}
        fn = lambda x: sf.psum(layer(x).square().sum(), "dp")
        sf.shard_map(fn, mesh, **places)(X).backward()
        for found, grad in zip(layer.parameters(), wanted, strict=True):
            assert_close(found.grad, grad)
        with torch.no_grad():
            same = staged("shard_map", lambda x: layer(x), mesh)
            assert_close(sf.full(same(X)), layer(X))


def popped(batch: Any) -> Any:
    y = batch.pop("y")
    return batch["x"] * 2 + y, "y" in batch


def stored(batch: Any) -> Any:
    batch["z"] = batch.pop("x") + batch["y"]
    batch["rows"][0].append(batch["z"])
    return batch


def emptied(batch: Any) -> Any:
    rows, total = batch["rows"][0], batch["x"] * 0
    while rows:
        total = total * 3 + rows.pop()
    return total, batch["rows"]


def differentiated(batch: Any) -> Any:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return (x * batch.pop("y")).sum()

    return sf.grad(loss)(batch["x"]), "y" in batch


def plainly_differentiated(batch: Any) -> Any:
    return batch["y"], False


@pytest.mark.parametrize("transform", ["jit", "shard"])
@pytest.mark.parametrize(
    ("fn", "plain"),
    [
        (popped, popped),
        (stored, stored),
        (emptied, emptied),
        (differentiated, plainly_differentiated),
    ],
)
def test_a_function_may_change_the_dicts_and_lists_of_its_arguments(
    fn: Callable[..., Any], plain: Callable[..., Any], transform: str
) -> None:
    make = lambda: {"x": X, "y": X + 1, "rows": ([X * 2, X * 3],)}
    with simulated(dp=3) as mesh:
        sharded = sf.shard(fn, mesh, P("dp"), backend="aten")
        call = sharded if transform == "shard" else sf.jit(fn, backend="aten")
        batch = make()
        for _ in range(2):
            found = sf.full(call(batch))
            assert_close(found, plain(make()))
            assert list(batch) == ["x", "y", "rows"], "that of the caller stays"
            assert len(batch["rows"][0]) == 2
