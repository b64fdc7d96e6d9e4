"""Values that all ranks have and use alike: their gradient is that of one device, in stacks of
tensor parallel blocks, in loops and in second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardfn as sf

F64 = torch.float64
X = torch.arange(30.0, dtype=F64).view(6, 5).sin()
T = torch.arange(24.0, dtype=F64).view(6, 4).cos()
PLAN: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Block(nn.Module):
    """Its norm is a plain module, and so is the sum with its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def stack(mesh: Any = None) -> nn.Module:
    """Three blocks; on a mesh tensor parallel."""
    torch.manual_seed(0)
    net = nn.Sequential(Block(), Block(), Block(), nn.Linear(5, 4)).to(F64)
    for block in list(net)[:3] if mesh is not None else []:
        parallelize_module(block, mesh, PLAN)
    return net


@pytest.fixture(name="mesh")
def _mesh() -> Iterator[Any]:
    with sf.fake_world(2):
        yield sf.make_mesh((2,), ("tp",))


def whole(x: Any) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x.shards[0]


def close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_a_stack_of_tensor_parallel_blocks_has_the_gradients_of_one_device(mesh: Any) -> None:
    alone, net = stack(), stack(mesh)
    loss = lambda net: lambda x, t: (net(x) - t).square().mean()
    loss(alone)(X, T).backward()
    sf.jit(loss(net), backend="aten")(X, T).backward()
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        close(whole(p.grad), q.grad)


Call = Callable[[torch.Tensor], torch.Tensor]


def in_a_scan(call: Call, x: Any, t: Any) -> Any:
    step = lambda c, row: (c + (call(row[0]) - row[1]).square().mean(), None)
    return sf.scan(step, t.sum() * 0, (x[:, None], t[:, None]))[0]


def carried(call: Call, x: Any, t: Any) -> Any:
    wider = lambda c: torch.nn.functional.pad(call(c), (0, 1))
    step = lambda c, row: (wider(c).tanh() + row, call(c))
    return (sf.scan(step, x, torch.stack([x, 2 * x]))[1] - t).square().mean()


def of_a_derivative(call: Call, x: Any, t: Any) -> Any:
    scaled = lambda s: (call(s * x) - t).square().mean()
    return sf.grad(scaled)(torch.ones((), dtype=F64))


def by_a_rule(call: Call, x: Any, t: Any) -> Any:
    mean = sf.custom_vjp(lambda h: h.square().mean())
    mean.defvjp(lambda h: (h.square().mean(), h), lambda h, g: (g * 2 * h / h.numel(),))
    return mean(call(x) - t)


@pytest.mark.parametrize("fn", [in_a_scan, carried, of_a_derivative, by_a_rule])
def test_in_loops_and_derivatives_it_is_that_of_one_device(mesh: Any, fn: Any) -> None:
    alone, net = Pair(), Pair()
    values = {name: p.detach() for name, p in alone.named_parameters()}
    parallelize_module(net, mesh, PLAN)
    placed = {name: p.detach() for name, p in net.named_parameters()}

    def gradients(module: nn.Module, given: Any) -> Any:
        of = lambda p, x: torch.func.functional_call(module, p, (x,))
        loss = lambda p, x, t: fn(lambda x: of(p, x), x, t)
        return sf.jit(sf.grad(loss), backend="aten")(given, X, T)

    wanted = gradients(alone, values)
    for name, got in gradients(net, placed).items():
        close(whole(got), wanted[name])


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(5, 8, dtype=F64), nn.Linear(8, 4, dtype=F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def test_a_value_that_is_used_alike_and_not_is_refused_where_it_is_differentiated(
    mesh: Any,
) -> None:
    x, w = torch.eye(4, dtype=F64) + 1, torch.arange(16.0, dtype=F64).view(4, 4).sin()

    def loss(first: Any, second: Any, x: Any, v: Any) -> Any:
        alike = DTensor.from_local(first * x, mesh, [Replicate()]) @ v
        own = v.to_local() * (second * x).mean()
        rest = DTensor.from_local(own, mesh, [Shard(0)])
        return alike.square().mean().full_tensor() + rest.square().mean().full_tensor()

    def in_one(d: Any, v: Any, x: Any) -> Any:
        y = d.full_tensor()
        return loss(y, y, x, v)

    def in_two(d: Any, v: Any, x: Any) -> Any:
        terms = d.full_tensor(grad_placements=[Partial()])
        return loss(d.full_tensor(), terms, x, v)

    of_one = lambda w, v: ((w * x) @ v).square().mean() + (v * (w * x).mean()).square().mean()
    d, v = (distribute_tensor(w, mesh, [Shard(dim)]) for dim in (1, 0))
    staged = lambda fn: sf.jit(sf.grad(fn, argnums=(0, 1)), backend="aten")(d, v, x)
    sf.jit(in_one, backend="aten")(d, v, x)  # without a gradient
    with pytest.raises(sf.CaptureError) as caught:
        staged(in_one)
    text = str(caught.value)
    assert "a value that all ranks of tp have meets each rank's own values" in text
    assert "test_uses.py" in text and "try: two calls of to_local" in text
    wanted = torch.func.grad(of_one, argnums=(0, 1))(w, w)
    for got, gradient in zip(staged(in_two), wanted, strict=True):
        close(got.full_tensor(), gradient)


def test_an_end_that_all_ranks_have_beside_values_that_differ_is_refused(mesh: Any) -> None:
    w = torch.arange(16.0, dtype=F64).view(4, 4).sin()
    d, v = (distribute_tensor(w, mesh, [Shard(dim)]) for dim in (1, 0))

    def fn(d: Any, v: Any, x: Any) -> Any:
        y = d.full_tensor()
        own = v.to_local() * (y * x).mean()
        rest = DTensor.from_local(own, mesh, [Shard(0)]).full_tensor()
        return (y * x).square().mean() + rest.square().mean()

    with pytest.raises(sf.CaptureError, match="which have terms of it"):
        sf.jit(sf.grad(fn), backend="aten")(d, v, w)
