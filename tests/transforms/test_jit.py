"""jit: a function compiled whole equals the function, is compiled once, keeps placements, and
refuses by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import close
from stagings import counts, forget
from torch import Tensor
from torch.distributed.tensor import DTensor

import shardfn as sf
from shardfn import P

F64 = torch.float64
X = torch.randn(5, 3, generator=torch.Generator().manual_seed(2), dtype=F64)
W = torch.randn(3, 7, generator=torch.Generator().manual_seed(3), dtype=F64)
HERE = re.compile(re.escape(__file__) + r":\d+")


def layer(p: dict[str, Tensor], x: Tensor, *, k: float = 2.0) -> dict[str, Any]:
    y = (x @ p["w"]).tanh() * k
    return {"y": y, "mean": y.mean(), "k": k, "none": None}


def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return layer(p, x)["y"].square().sum()


def refusal(call: Callable[[], Any], kind: type[sf.ShardError]) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return HERE.sub("HERE", str(caught.value))


@pytest.mark.parametrize("backend", ["inductor", "aten"])
def test_it_equals_the_function_and_is_compiled_once(backend: str) -> None:
    fn = sf.jit(sf.value_and_grad(loss), backend=backend)
    forget()  # both backends share one capture
    for k in (1.0, 2.0, 3.0):
        close(fn({"w": W * k}, X), torch.func.grad_and_value(loss)({"w": W * k}, X)[::-1])
    made = {name: counts[name] for name in ("captures", "compilations")}
    assert made == {"captures": 1, "compilations": backend == "inductor"}
    assert fn.compile({"w": W}, X).backend == backend


def test_results_keep_their_tree_and_constants() -> None:
    got = sf.jit(layer, backend="aten")({"w": W}, X, k=0.5)
    assert list(got) == ["y", "mean", "k", "none"] and (got["k"], got["none"]) == (0.5, None)
    close(got["y"], layer({"w": W}, X, k=0.5)["y"])


def test_it_prints_and_decorates() -> None:
    @sf.jit
    def plain(x: Tensor) -> Tensor:
        return x * 2

    @sf.jit(backend="aten")
    def chosen(x: Tensor) -> Tensor:
        return x * 2

    close(chosen(X), X * 2)
    assert (repr(plain), repr(chosen), repr(sf.jit(sf.grad(loss)))) == (
        "jit(plain)",
        "jit(chosen)",
        "jit(grad(loss))",
    )
    assert str(chosen.trace(X)).startswith("jit(chosen): 1 ops over global shapes")


ORDERS: dict[str, Callable[[], Any]] = {
    "grad of jit": lambda: sf.grad(sf.jit(loss)),
    "jit of grad": lambda: sf.jit(sf.grad(loss), backend="aten"),
    "jit of jit": lambda: sf.jit(sf.jit(sf.grad(sf.jit(loss))), backend="aten"),
    "vmap inside": lambda: sf.jit(
        lambda p, x: sf.grad(lambda p: sf.vmap(sf.jit(loss), in_axes=(None, 0))(p, x).sum())(p),
        backend="aten",
    ),
}


@pytest.mark.parametrize("order", ORDERS)
def test_inside_another_transform_it_is_the_function(order: str) -> None:
    close(ORDERS[order]()({"w": W}, X), torch.func.grad(loss)({"w": W}, X))


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 4)], ids=str)
def test_dtensors_keep_their_placements_and_the_program_is_cut_around_them(
    shape: tuple[int, ...],
) -> None:
    names = ("a", "b")[: len(shape)]
    with sf.fake_world(torch.Size(shape).numel()):
        mesh = sf.make_mesh(shape, names)
        x, p = (
            sf.distribute(X, mesh, P("a")),
            sf.distribute({"w": W}, mesh, P(None, names[-1]) if len(shape) == 2 else None),
        )
        step = sf.jit(sf.value_and_grad(loss), backend="aten")
        value, grads = step(p, x)
        assert isinstance(value, DTensor) and grads["w"].placements == p["w"].placements
        wanted = torch.func.grad_and_value(loss)({"w": W}, X)[::-1]
        close(sf.full((value, grads)), wanted)
        assert {c.axis for c in step.lower(p, x).collectives} <= set(names)
        inside = sf.shard(sf.jit(loss), mesh, (None, P("a")), backend="aten")
        close(sf.full(inside({"w": W}, X)), wanted[0])


class Config:
    """An object that is equal to others of the same number."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.n == other.n

    def __hash__(self) -> int:
        return hash(self.n)


def test_static_arguments_may_be_objects_and_are_compared() -> None:
    fn = sf.jit(lambda c, x, *, d=None: x * c.n, static_argnums=0, backend="aten")
    before = counts["captures"]
    for n in (2, 2, 3, 2):
        close(fn(Config(n), X), X * n)
    assert counts["captures"] == before + 2
    last = sf.jit(lambda x, c, s: x * c.n + len(s), static_argnums=(1, 2), backend="aten")
    close(last(X, Config(3), ("a", "b")), X * 3 + 2)


def test_wrong_options_are_refused_when_it_is_made() -> None:
    assert (
        refusal(lambda: sf.jit(loss, backend="c"), sf.ShardError)
        == "jit(loss): backend is 'c'\n  needed: one of aten, inductor"
    )
    assert (
        refusal(lambda: sf.jit(3), sf.TreeError)
        == "jit: a int\n  at: HERE\n  needed: a function\n  try: jit(fn)"
    )
    assert refusal(lambda: sf.jit(loss)({"w": W}), sf.TreeError) == (
        "jit(loss): missing a required argument: 'x'\n  at: HERE\n"
        "  try: the arguments of (p: 'dict[str, Tensor]', x: 'Tensor') -> 'Tensor'"
    )


def test_a_module_trains_under_jit() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    ).double()
    fn, params, buffers = sf.functionalize(module)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)

    def error(params: Any, buffers: Any, x: Tensor) -> Any:
        out, buffers = fn(params, buffers, x)
        return out.square().mean(), buffers

    @sf.jit(backend="aten")
    def step(params: Any, buffers: Any, x: Tensor) -> Any:
        grads, buffers = sf.grad(error, has_aux=True)(params, buffers, x)
        return sf.tree_map(lambda p, g: p - 0.1 * g, params, grads), buffers

    for _ in range(3):
        params, buffers = step(params, buffers, X)
        optimizer.zero_grad()
        module(X).square().mean().backward()
        optimizer.step()
    close(params, {k: p.detach() for k, p in module.named_parameters()})
    close(buffers, dict(module.named_buffers()))
