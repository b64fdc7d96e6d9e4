"""The arguments of a first call are flattened once, their paths are read once, and their signature
is bound once: all stages take the one record that is made of them.
"""

from __future__ import annotations

import collections
import inspect
import sys
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import nn

import shardfn as sf
from shardfn import P, _tree, tree_pairs
from shardfn.errors import is_inside

# the functions that walk a tree, and their parameter that takes it
WALKS = {
    _tree.flatten: "tree",
    _tree.leaves: "tree",
    _tree.map_held: "tree",
    _tree.tree_map: "tree",
    _tree.holders: "tree",
    _tree.named_leaves: "tree",
    _tree.learn: "tree",
    _tree.learn_registered: "tree",
    _tree.quick_leaves: "tree",
    _tree.refill: "tree",
    _tree.paths: "tree",
    tree_pairs.pair: "like",
    tree_pairs.classes: "tree",
}
PATHS = {_tree.argument_paths, _tree.call_paths}
FIRST = {"walks": 1, "paths": 1, "binds": 1}

G = torch.Generator().manual_seed(0)
X = torch.randn(7, 3, generator=G)
W = torch.randn(3, 5, generator=G)
B = torch.randn(5, generator=G)


class Counter:
    """Counts the walks over trees that have one of these tensors, as functions are called."""

    def __init__(self, arguments: Any) -> None:
        self.tensors = {id(x) for x in _leaves(arguments) if isinstance(x, torch.Tensor)}
        self.walks = {fn.__code__: name for fn, name in WALKS.items()}
        self.paths = {fn.__code__ for fn in PATHS}
        self.outer: Any = None  # the frame of the walk at work
        self.counts: collections.Counter[str] = collections.Counter()

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        if event == "return" and frame is self.outer:
            self.outer = None
        kind = self.kind(frame) if event == "call" and self.outer is None else None
        if kind is not None:
            self.outer = frame
            self.counts[kind] += 1

    def kind(self, frame: Any) -> str | None:
        """The kind of a call, if it counts."""
        code = frame.f_code
        if code is inspect.Signature.bind.__code__:
            return "binds" if is_inside(frame.f_back.f_code.co_filename) else None
        if code in self.paths:
            return "paths"
        if code not in self.walks:
            return None
        tree = frame.f_locals[self.walks[code]]
        return "walks" if self.tensors & {*map(id, _leaves(tree))} else None


def _leaves(tree: Any) -> list[Any]:
    return optree.tree_leaves(tree, none_is_leaf=True, namespace=_tree.NAMESPACE)


def counted(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, int]:
    """The counts of a call."""
    counter = Counter((args, kwargs))
    before = sys.getprofile()
    sys.setprofile(counter)
    try:
        fn(*args, **kwargs)
    finally:
        sys.setprofile(before)
    return dict(counter.counts)


def step(params: Any, batch: Any) -> Any:
    x, y = batch
    moved = params["w"] - 0.1 * (x @ params["w"]).sum()
    return {"w": moved, "b": params["b"] + y}


def loss(params: Any, x: Any) -> Any:
    return ((x @ params["w"] + params["b"]) ** 2).sum()


def params() -> dict[str, torch.Tensor]:
    return {"w": W.clone(), "b": B.clone()}


def scaled(params: Any, n: int) -> Any:
    return {k: x * n for k, x in params.items()}


def module(mesh: Any) -> Any:
    fn, own, buffers = sf.functionalize(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
    return sf.shard(fn, mesh, backend="aten"), (own, buffers, X), {}


def followed(mesh: Any) -> Any:
    own = {k: x.requires_grad_() for k, x in params().items()}
    return sf.shard(loss, mesh, backend="aten"), (own, X), {}


def sharded(fn: Callable[..., Any], *args: Any, **options: Any) -> Callable[[Any], Any]:
    """A maker of a function under shard, its arguments and its keyword arguments."""
    named = options.pop("kwargs", {})
    return lambda mesh: (sf.shard(fn, mesh, **{"backend": "aten", **options}), args, named)


def placed(mesh: Any) -> Any:
    return sf.shard(step, mesh, backend="aten"), (sf.distribute(params(), mesh, P()), (X, B)), {}


def donated(mesh: Any) -> Any:
    _, args, kwargs = placed(mesh)
    return sf.shard(step, mesh, donate_argnums=0, backend="aten"), args, kwargs


PLAIN = {
    "tensors": sharded(step, params(), (X, B)),
    "DTensors": placed,
    "keyword arguments": sharded(step, params(), kwargs={"batch": (X, B)}),
    "donated arguments": donated,
    "all dims dynamic": sharded(step, params(), (X, B), dynamic=True),
    "static arguments": sharded(scaled, params(), 3, static_argnums=1),
    "a module": module,
    "a gradient": sharded(sf.value_and_grad(loss), params(), X),
    "followed by autograd": followed,
    "Inductor": sharded(scaled, params(), 2, backend="inductor"),
}
# a prefix tree is spread over the arguments: one walk more; placements by parameter count the
# leaves of each argument, and walk each that has a part
PREFIXED = {
    "in_placements": sharded(step, params(), (X, B), in_placements=(None, (P("dp"), None))),
    "dynamic by position": sharded(step, params(), (X, B), dynamic=(None, ({0}, None))),
    "dynamic by name": sharded(step, params(), (X, B), dynamic={"batch": ({0}, None)}),
}


@pytest.mark.parametrize("case", [*PLAIN, *PREFIXED])
def test_a_first_call_flattens_its_arguments_once(case: str) -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        fn, args, kwargs = {**PLAIN, **PREFIXED}[case](mesh)
        found = counted(fn, *args, **kwargs)
    more = 4 if case == "in_placements" else int(case in PREFIXED)
    assert found == {**FIRST, "walks": 1 + more}


def test_a_second_call_flattens_its_arguments_once_and_a_third_walks_them_in_one_check() -> None:
    with sf.fake_world(2):
        fn = sf.shard(step, sf.make_mesh((2,), ("dp",)), backend="aten")
        found = [counted(fn, params(), (X, B)) for _ in range(4)]
    assert found == [FIRST, {"walks": 1}, {}, {}]


def test_jit_and_grad_flatten_their_arguments_once() -> None:
    for fn in (sf.jit(loss, backend="aten"), sf.grad(loss), sf.value_and_grad(loss)):
        assert counted(fn, params(), X) == FIRST
        assert counted(fn.trace, params(), X) == FIRST
        assert counted(fn.lower, params(), X) == FIRST
