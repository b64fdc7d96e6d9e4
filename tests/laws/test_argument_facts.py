"""What a function asks of its argument tensors besides their values, flags, attributes and class,
has the answers of the arguments, in each call, or is refused by name.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stagings import counts
from torch import nn

import shardfn as sf
from shardfn import P

Tree = dict[str, torch.Tensor]
X = torch.arange(1.0, 6.0, dtype=torch.float64)


def weighed(p: torch.Tensor, yes: Any) -> torch.Tensor:
    return (3.0 if yes else 1.0) * p.square().sum()


def hooked(p: torch.Tensor) -> torch.Tensor:
    if p.requires_grad:
        p = p * 1.0
        p.register_hook(lambda g: 2 * g)
    return p.square().sum()


def adapted(p: torch.Tensor) -> torch.Tensor:
    """A step of MAML, which follows what does not require grad."""
    w = p if p.requires_grad else p.detach().requires_grad_()
    (g,) = torch.autograd.grad(w.square().sum(), w, create_graph=True)
    return (w - 0.1 * g).square().sum()


ASKING: dict[str, Callable[[Tree], torch.Tensor]] = {
    "requires_grad": lambda d: sum_of(weighed(p, p.requires_grad) for p in d.values()),
    "requires_grad of a view": lambda d: sum_of(
        weighed(p, p[1:].requires_grad) for p in d.values()
    ),
    "only what requires grad": lambda d: sum_of(
        p.square().sum() if p.requires_grad else 0 * p.sum() for p in d.values()
    ),
    "is_leaf": lambda d: sum_of(weighed(p, p.is_leaf) for p in d.values()),
    "a hook": lambda d: sum_of(map(hooked, d.values())),
    "a step of MAML": lambda d: sum_of(map(adapted, d.values())),
    "a tag": lambda d: sum_of(weighed(p, getattr(p, "_no_decay", False)) for p in d.values()),
    "whether it has a tag": lambda d: sum_of(
        weighed(p, hasattr(p, "_no_decay")) for p in d.values()
    ),
    "the value of a tag": lambda d: sum_of(p.sum() * getattr(p, "scale", 1.0) for p in d.values()),
    "isinstance": lambda d: sum_of(weighed(p, isinstance(p, nn.Parameter)) for p in d.values()),
    "type": lambda d: sum_of(weighed(p, type(p) is nn.Parameter) for p in d.values()),
    "whether it has a gradient": lambda d: sum_of(weighed(p, p.grad is None) for p in d.values()),
    "identity": lambda d: weighed(d["a"], d["a"] is d["b"]) + d["b"].sum(),
    "a set": lambda d: sum_of(p.square().sum() for p in {id(p): p for p in d.values()}.values()),
}


# these ask what autograd follows, which it does nothing of under no_grad
FOLLOWED = ("requires_grad of a view", "a hook", "a step of MAML")


def sum_of(xs: Any) -> torch.Tensor:
    return torch.stack(list(xs)).sum()


def plain() -> Tree:
    return {"a": X.clone(), "b": X.flip(0)}


def parameters() -> Tree:
    return {name: nn.Parameter(x) for name, x in plain().items()}


def tagged() -> Tree:
    tree = parameters()
    tree["a"]._no_decay = True  # type: ignore[attr-defined]
    tree["b"].scale = 0.5  # type: ignore[attr-defined]
    return tree


def frozen() -> Tree:
    return {"a": nn.Parameter(X.clone(), requires_grad=False), "b": X.flip(0).requires_grad_()}


TREES = (plain, parameters, tagged, frozen, plain)


def value_and_gradients(fn: Callable[[Tree], Any], tree: Tree) -> list[Any]:
    loss = sf.full(fn(tree))
    if loss.requires_grad:
        loss.backward()
    return [loss.detach(), *(None if x.grad is None else sf.full(x.grad) for x in tree.values())]


@pytest.mark.parametrize("name", ASKING)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_each_call_has_the_answers_of_its_arguments(name: str, is_sharded: bool) -> None:
    fn = ASKING[name]
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        staged = sf.shard(fn, mesh, P("dp"), backend="aten") if is_sharded else sf.jit(
            fn, backend="aten"
        )  # fmt: skip
        for make in TREES:
            wanted = value_and_gradients(fn, make())
            torch.testing.assert_close(value_and_gradients(staged, make()), wanted)
        with torch.no_grad():
            for make in (plain, parameters, frozen) if name not in FOLLOWED else ():
                torch.testing.assert_close(sf.full(staged(make())), fn(make()))


REFUSED: dict[str, Callable[[Tree], torch.Tensor]] = {
    "a gradient": lambda d: sum_of(p.grad.norm() for p in d.values() if p.grad is not None),
    "a tensor of its own": lambda d: sum_of(p.sum() * p.mask.sum() for p in d.values()),  # type: ignore[attr-defined]
    "identity": ASKING["identity"],
    "a set": ASKING["a set"],
    "set()": lambda d: sum_of(p.square().sum() for p in set(d.values())),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_value_of_an_argument_is_refused_by_name(name: str) -> None:
    fn = REFUSED[name]
    a = nn.Parameter(X.clone())
    a.mask = X > 2  # type: ignore[attr-defined]
    a.square().sum().backward()
    tree: Tree = {"a": a, "b": a}
    fn(tree)
    with pytest.raises(sf.CaptureError, match="the function reads the .grad, an inner tensor"):
        sf.jit(fn, backend="aten")(tree)


def test_a_function_that_asks_nothing_is_captured_once() -> None:
    step = sf.jit(lambda d: sum_of(p.square().sum() for p in d.values()), backend="aten")
    with torch.no_grad():
        step(plain())
        before = counts["captures"]
        for make in TREES:
            step(make())
    assert counts["captures"] == before


def test_attributes_that_it_does_not_ask_for_make_no_program() -> None:
    step = sf.jit(lambda d: ASKING["a tag"](d), backend="aten")
    captures = []
    for i in range(3):
        tree = parameters()
        tree["a"].number, tree["b"].of = i, object()  # type: ignore[attr-defined]
        step(tree)
        captures.append(counts["captures"])
    assert len({*captures}) == 1


def test_no_program_keeps_its_arguments_alive() -> None:
    tree = parameters()
    step = sf.jit(ASKING["requires_grad"], backend="aten")
    step(tree)
    held = weakref.ref(tree["a"])
    tree.clear()
    gc.collect()
    assert held() is None


OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "product": lambda x: x * 2,
    "view": lambda x: x.view(5, 1),
    "slice": lambda x: x[1:],
    "detached": lambda x: x.detach(),
    "clone": lambda x: x.clone().mul_(2),
    "integer": lambda x: x.long(),
    "like": torch.zeros_like,
    "split": lambda x: x.split(2)[1],
    "itself": lambda x: x,
    "diagonal": lambda x: x[:4].view(2, 2).diagonal(),
}
MODES: dict[str, Callable[[], Any]] = {
    "as called": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
}


@pytest.mark.parametrize("inner", MODES)
@pytest.mark.parametrize("op", OPS)
def test_a_computed_tensor_requires_grad_as_in_eager_torch(op: str, inner: str) -> None:
    def fn(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        x = x * 1.0 if op == "itself" else x
        with MODES[inner]():
            y = OPS[op](x)
            inside = y.requires_grad
        flags = inside, y.requires_grad, (y * 1.0).requires_grad, y.is_leaf
        return z * sum(2.0**k for k, flag in enumerate(flags) if flag)

    one = torch.ones((), dtype=torch.float64)
    jitted = sf.jit(fn, backend="aten")
    for outer in (contextlib.nullcontext, torch.no_grad):
        for is_followed in (True, False):
            x = X.clone().requires_grad_(is_followed)
            with outer():
                assert jitted(x, one) == fn(x, one)
