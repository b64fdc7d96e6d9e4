"""A call whose result autograd would follow in the plain function is followed, with the gradients
of plain autograd; every other one is right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import effort
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P

F64 = torch.float64
X = torch.tensor([0.5, -1.5, 2.0, 0.25], dtype=F64)
Held = Callable[[torch.Tensor], Callable[[], torch.Tensor]]  # a tensor -> how a function reads it


class Box:
    """An object with an attribute."""

    def __init__(self, w: torch.Tensor) -> None:
        self.w = w

    def read(self) -> torch.Tensor:
        return self.w


class Scaled(nn.Module):
    def __init__(self, w: torch.Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w


def of_dict(d: Any) -> Callable[[], torch.Tensor]:
    return lambda: d["k"]


def of_list(l: Any) -> Callable[[], torch.Tensor]:
    return lambda: l[1]


def of_box(box: Box) -> Callable[[], torch.Tensor]:
    return lambda: box.w


def by_default(w: torch.Tensor) -> Callable[[], torch.Tensor]:
    def read(w: torch.Tensor = w) -> torch.Tensor:
        return w

    return read


def by_keyword(w: torch.Tensor) -> Callable[[], torch.Tensor]:
    def read(*, w: torch.Tensor = w) -> torch.Tensor:
        return w

    return read


HELD: dict[str, Held] = {
    "cell": lambda w: lambda: w,
    "dict": lambda w: of_dict({"k": w}),
    "list": lambda w: of_list([0, w]),
    "attribute": lambda w: of_box(Box(w)),
    "bound method": lambda w: Box(w).read,
    "default": by_default,
    "keyword default": by_keyword,
    "partial": lambda w: functools.partial(lambda w: w, w),
}
USES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "product": lambda x, w: x * w,
    "view": lambda x, w: x * w.view(2, 2).reshape(-1),
    "in place": lambda x, w: x.clone().mul_(w),
    "written": lambda x, w: torch.cat([(x * 2).add_(w)[:2], x[2:]]),
    "index": lambda x, w: x * w[0],
    "detached": lambda x, w: x * w.detach(),
    "shape": lambda x, w: x * w.shape[0],
    "compared": lambda x, w: torch.where(w > 0, x, -x),
}
SILENT = ("detached", "shape", "compared")


def without(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x * w


USES["under no_grad"] = without


def fold(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: sf.scan(lambda c, row: (f(c) + row, c), x, torch.stack([x, x]))[0]


TRANSFORMS: dict[
    str, tuple[Callable[..., Any], Callable[..., Any]]
] = {  # ours, and torch's for a plain f
    "jit": (lambda f, mesh: sf.jit(f, backend="aten"), lambda f: f),
    "grad": (
        lambda f, mesh: sf.grad(lambda x: f(x).square().sum()),
        lambda f: torch.func.grad(lambda x: f(x).square().sum()),
    ),
    "vmap": (
        lambda f, mesh: lambda x: sf.vmap(f)(torch.stack([x, x])),
        lambda f: lambda x: torch.stack([f(x), f(x)]),
    ),
    "jvp": (
        lambda f, mesh: lambda x: sf.jvp(f, (x,), (x,))[1],
        lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[1],
    ),
    "checkpoint": (lambda f, mesh: sf.checkpoint(f), lambda f: f),
    "shard": (lambda f, mesh: sf.shard(f, mesh, P("a"), backend="aten"), lambda f: f),
    "shard of grad": (
        lambda f, mesh: sf.shard(
            sf.grad(lambda x: f(x).square().sum()), mesh, P("a"), backend="aten"
        ),
        lambda f: torch.func.grad(lambda x: f(x).square().sum()),
    ),
    "bucketed_grad": (
        lambda f, mesh: lambda x: sf.bucketed_grad(lambda x: f(x).square().sum())(x)[1],
        lambda f: torch.func.grad(lambda x: f(x).square().sum()),
    ),
}


@effort.examples(40)
@given(
    st.sampled_from(list(HELD)),
    st.sampled_from(list(USES)),
    st.sampled_from(list(TRANSFORMS)),
    st.booleans(),
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=4),
)
def test_a_call_is_right_and_followed_whatever_was_called_before(
    held: str, use: str, transform: str, made: bool, calls: list[tuple[bool, bool]]
) -> None:
    leaf = torch.tensor([1.5, -0.5, 3.0, 2.0], dtype=F64)
    w = (leaf.clone().requires_grad_() * 2) if made else leaf  # a result of autograd, or a leaf
    read = HELD[held](w)
    ours, theirs = TRANSFORMS[transform]

    def f(x: torch.Tensor) -> torch.Tensor:
        return USES[use](x, read())

    with simulated(a=2) as mesh:
        call = ours(f, mesh)
        for followed, requires in calls:
            if not made:
                w.requires_grad_(requires)
            with torch.set_grad_enabled(followed):
                wanted = theirs(f)(X)
                if wanted.requires_grad:
                    assert use not in (*SILENT, "under no_grad")
                    got = sf.full(call(X))
                    assert_close(got, wanted)
                    gradients = [
                        torch.autograd.grad(y.sum(), w, retain_graph=True) for y in (got, wanted)
                    ]
                    assert_close(*gradients)
                else:
                    got = sf.full(call(X))
                    assert not got.requires_grad
                    assert_close(got, wanted.detach())


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    return module


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)),
    "norm": lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)),
    "tied": tied,
    "scaled": lambda: nn.Sequential(Scaled(torch.tensor([0.5, 1.0, 1.5, 2.0])), nn.Linear(4, 2)),
}
HOOKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "scaled": lambda g: g * 3,
    "clipped": lambda g: g / (1 + g.norm()),
    "seen": lambda g: None,
}


def loss_of(fn: Any, buffers: Any) -> Callable[..., Any]:
    return lambda p, x: fn(p, buffers, x)[0].square().sum()


def sharded(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    mesh = sf.make_mesh((2,), ("a",))
    return sf.shard(f, mesh, (None, P("a")), backend="aten", **options)


WAYS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "grad": sf.grad,
    "jit": lambda f: sf.jit(sf.grad(f), backend="aten"),
    "torch.func": torch.func.grad,
    "shard": lambda f: sharded(sf.grad(f)),
    "buckets": lambda f: lambda p, x: sharded(sf.bucketed_grad(f))(p, x)[1],
    "checkpoint": lambda f: sf.grad(sf.checkpoint(f)),
    "twice": lambda f: sf.grad(lambda p, x: f(p, x[:4]) + f(p, x[4:])),
    "vmap": lambda f: sf.grad(
        lambda p, x: sf.vmap(f, in_axes=(None, 0))(p, x.reshape(2, 4, 4)).sum()
    ),
}


def judged(module: nn.Module, way: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradients of plain autograd."""
    parts = (x[:4], x[4:]) if way in ("twice", "vmap") else (x,)
    total = sum(module(part).square().sum() for part in parts)
    total.backward() if total.requires_grad else None
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@effort.examples(20)
@given(
    st.sampled_from(list(MODULES)),
    st.sampled_from(list(WAYS)),
    st.lists(st.sampled_from(["free", "free", "frozen", *HOOKS]), min_size=6, max_size=6),
)
def test_functionalize_keeps_to_frozen_parameters_and_hooks(
    name: str, way: str, marks: list[str]
) -> None:
    torch.manual_seed(5)
    module = MODULES[name]().double()
    for p, mark in zip(module.parameters(), marks, strict=False):
        if mark in HOOKS:
            p.register_hook(HOOKS[mark])
        p.requires_grad_(mark != "frozen")
    x = torch.randn(8, 4, dtype=F64)
    fn, params, buffers = sf.functionalize(module)
    with sf.fake_world(2):
        grads = sf.full(WAYS[way](loss_of(fn, buffers))(params, x))
    assert_close(grads, judged(module, way, x), rtol=1e-10, atol=1e-12)
    stepped = sf.tree_map(lambda p, g: p - 0.1 * g, params, grads)
    assert (
        list(stepped)
        == list(params)
        == [k for k, p in module.named_parameters() if p.requires_grad]
    )
