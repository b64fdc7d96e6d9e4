"""The gradient of what all ranks have: of each rank or a sum, as `grad_placements` says, in stacks
of tensor parallel blocks, in loops and in second derivatives. It is refused where the code does not
say which, or says both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from equality import close
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from worlds import SimulatedTensor

import shardfn as sf
from shardfn.capture.shard_map.varying_facts import (
    CERTAIN,
    DIFFERENTIABLE,
    EQUAL,
    Fact,
    axes_in,
    joint_facts,
    reasons_to_vary,
)
from shardfn.ops.shard_map import CONTRADICTED, SUMMED, UNDECIDED

F64 = torch.float64
R, S = Replicate(), Shard(0)
W = torch.arange(8.0, dtype=F64).reshape(4, 2).sin()
X = torch.arange(12.0, dtype=F64).reshape(3, 4).cos()
T = torch.arange(6.0, dtype=F64).reshape(3, 2).sin()  # labels
SAID: dict[str, Any] = {"grad_placements": [R]}
TERMS: dict[str, Any] = {"grad_placements": [Partial()]}


@pytest.fixture(name="mesh")
def _mesh() -> Iterator[Any]:
    with sf.fake_world(4):
        yield sf.make_mesh((2, 2), ("dp", "tp"))


def loss(mesh: Any, **options: Any) -> Callable[..., Any]:
    """A loss of tensor parallelism on the last axis, of plain labels."""
    part = mesh["tp"]

    def fn(w: Any, x: Any, t: Any) -> Any:
        y = (DTensor.from_local(x, part, [R]) @ w).redistribute(part, [R])
        return (y.to_local(**options) - t).square().sum()

    return fn


def of_one(w: Any, x: Any = X, t: Any = T) -> Any:
    return (x @ w - t).square().sum()


WANTED = torch.func.grad(of_one)(W)


def gradient(fn: Any, w: Any, x: Any = X, t: Any = T) -> torch.Tensor:
    return sf.full(sf.jit(sf.grad(fn), backend="aten")(w, x, t))


def in_a_scan(fn: Any) -> Any:
    step = lambda w: lambda c, row: (c + fn(w, row[0][None], row[1][None]), None)
    return lambda w, x, t: sf.scan(step(w), t.sum() * 0, (x, t))[0]


def in_a_vmap(fn: Any) -> Any:
    row = lambda w: lambda x, t: fn(w, x[None], t[None])
    return lambda w, x, t: sf.vmap(row(w))(x, t).sum()


AROUND: dict[str, Any] = {
    "alone": lambda fn: fn,
    "checkpoint": sf.checkpoint,
    "scan": in_a_scan,
    "vmap": in_a_vmap,
}


@pytest.mark.parametrize("case", AROUND)
def test_where_the_code_says_that_it_is_equal_it_counts_once(mesh: Any, case: str) -> None:
    w = distribute_tensor(W, mesh["tp"], [Shard(1)])
    close(gradient(AROUND[case](loss(mesh, **SAID)), w), WANTED)


@pytest.mark.parametrize("case", AROUND)
def test_where_the_code_does_not_say_it_is_refused_by_name(mesh: Any, case: str) -> None:
    w = distribute_tensor(W, mesh["tp"], [Shard(1)])
    with pytest.raises(sf.CaptureError) as caught:
        gradient(AROUND[case](loss(mesh)), w)
    text = str(caught.value)
    assert text.startswith("DTensor.to_local: a value that is equal on all ranks of tp")
    assert "try: to_local or full_tensor with grad_placements=[Replicate()]" in text
    assert caught.value.source is not None and "test_gradients.py" in caught.value.source


def test_without_a_gradient_nothing_is_refused(mesh: Any) -> None:
    w = distribute_tensor(W, mesh["tp"], [Shard(1)])
    other = SimulatedTensor([T + rank % 2 for rank in range(4)])
    value = sf.jit(loss(mesh), backend="aten")(w, X, other)
    close(value.shards[1], of_one(W, X, T + 1))
    of_labels = sf.jit(sf.grad(loss(mesh), argnums=2), backend="aten")(w, X, other)
    close(of_labels.shards[1], torch.func.grad(of_one, argnums=2)(W, X, T + 1))


def test_labels_that_the_code_calls_replicated_need_no_more(mesh: Any) -> None:
    part = mesh["tp"]
    w = distribute_tensor(W, part, [Shard(1)])
    same = lambda t: DTensor.from_local(t, part, [R]).to_local()
    fn = loss(mesh)
    close(gradient(lambda w, x, t: fn(w, x, same(t)), w), WANTED)


def test_a_derivative_of_the_gradient(mesh: Any) -> None:
    w = distribute_tensor(W, mesh["tp"], [Shard(1)])
    fn = loss(mesh, **SAID)
    norm = lambda *args: sf.grad(fn)(*args).square().sum().full_tensor()
    of_norm = lambda w: torch.func.grad(of_one)(w).square().sum()
    close(gradient(norm, w), torch.func.grad(of_norm)(W))


def test_with_partial_gradients_it_is_the_sum(mesh: Any) -> None:
    w = distribute_tensor(W, mesh["tp"], [Shard(1)])
    close(gradient(loss(mesh, **TERMS), w), 2 * WANTED)


def test_where_ranks_differ_for_certain_it_is_the_sum(mesh: Any) -> None:
    whole = [R, R]
    x = distribute_tensor(torch.cat([X, X + 1, X, X]), mesh, [S, S])
    t = torch.cat([T] * 4)

    def of_shards(w: Any, x: Any, t: Any) -> Any:
        rows = x.to_local() @ w.to_local() - t[:3]
        return DTensor.from_local(rows, mesh, [S, S]).square().sum().full_tensor()

    def reduced(w: Any, x: Any, t: Any) -> Any:
        y = (w.to_local(grad_placements=[Partial(), R]) * t.sum()).sum()
        dist.all_reduce(y, group=mesh.get_group("dp"))
        return y

    w = distribute_tensor(W, mesh, whole)
    wanted = torch.func.grad(of_one)(W, sf.full(x), t)
    close(gradient(of_shards, w, x, t), wanted)
    total = 2 * T.sum() * torch.ones_like(W)  # over dp a sum, over tp one value
    close(gradient(reduced, w, x, T), total)


def test_an_equal_gradient_where_ranks_have_terms_is_refused(mesh: Any) -> None:
    part = mesh["tp"]
    w = distribute_tensor(W, part, [R])

    def reduced(w: Any, x: Any, t: Any) -> Any:
        y = (w.to_local(**SAID) * t.sum()).sum()
        dist.all_reduce(y, group=mesh.get_group("tp"))
        return y

    def of_a_shard(w: Any, x: Any, t: Any) -> Any:
        own = distribute_tensor(x, part, [Shard(1)]).to_local()
        return (w.to_local(**SAID) * t.sum() * own.sum()).sum()

    def written(w: Any, x: Any, t: Any) -> Any:
        y = w.to_local(**SAID) * t.sum()
        y.add_(distribute_tensor(x, part, [Shard(1)]).to_local().sum())
        return y.sum()

    for fn in (reduced, of_a_shard, written):
        with pytest.raises(
            sf.CaptureError, match="grad_placements states an equal gradient on all ranks of tp"
        ):
            gradient(fn, w)


PLAN: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel(use_local_output=False)}
ROWS = torch.arange(30.0, dtype=F64).view(6, 5).sin()
LABELS = torch.arange(24.0, dtype=F64).view(6, 4).cos()


def local(x: Any) -> torch.Tensor:
    return x.to_local(**SAID) if isinstance(x, DTensor) else x


class Block(nn.Module):
    """Its norm is a plain module, and so is the sum with its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + local(self.down(torch.tanh(self.up(self.norm(x)))))


def stack(mesh: Any = None) -> nn.Module:
    """Three blocks; on a mesh tensor parallel."""
    torch.manual_seed(0)
    net = nn.Sequential(Block(), Block(), Block(), nn.Linear(5, 4)).to(F64)
    for block in list(net)[:3] if mesh is not None else []:
        parallelize_module(block, mesh, PLAN)
    return net


@pytest.fixture(name="line")
def _line() -> Iterator[Any]:
    with sf.fake_world(2):
        yield sf.make_mesh((2,), ("tp",))


def whole(x: Any) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x.shards[0]


def test_a_stack_of_tensor_parallel_blocks_has_the_gradients_of_one_device(line: Any) -> None:
    alone, net = stack(), stack(line)
    loss = lambda net: lambda x, t: (net(x) - t).square().mean()
    loss(alone)(ROWS, LABELS).backward()
    sf.jit(loss(net), backend="aten")(ROWS, LABELS).backward()
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        close(whole(p.grad), q.grad)


Call = Callable[[torch.Tensor], torch.Tensor]


def in_steps(call: Call, x: Any, t: Any) -> Any:
    step = lambda c, row: (c + (call(row[0]) - row[1]).square().mean(), None)
    return sf.scan(step, t.sum() * 0, (x[:, None], t[:, None]))[0]


def carried(call: Call, x: Any, t: Any) -> Any:
    wider = lambda c: torch.nn.functional.pad(call(c), (0, 1))
    step = lambda c, row: (wider(c).tanh() + row, call(c))
    return (sf.scan(step, x, torch.stack([x, 2 * x]))[1] - t).square().mean()


def by_a_rule(call: Call, x: Any, t: Any) -> Any:
    mean = sf.custom_vjp(lambda h: h.square().mean())
    mean.defvjp(lambda h: (h.square().mean(), h), lambda h, g: (g * 2 * h / h.numel(),))
    return mean(call(x) - t)


def of_a_derivative(call: Call, x: Any, t: Any) -> Any:
    scaled = lambda s: (call(s * x) - t).square().mean()
    return sf.grad(scaled)(torch.ones((), dtype=F64))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(5, 8, dtype=F64), nn.Linear(8, 4, dtype=F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return local(self.down(torch.tanh(self.up(x))))


@pytest.mark.parametrize("fn", [in_steps, carried, by_a_rule, of_a_derivative])
def test_in_loops_and_derivatives_it_is_that_of_one_device(line: Any, fn: Any) -> None:
    alone, net = Pair(), Pair()
    values = {name: p.detach() for name, p in alone.named_parameters()}
    parallelize_module(net, line, PLAN)
    placed = {name: p.detach() for name, p in net.named_parameters()}
    same = lambda x: DTensor.from_local(x, line, [R]).to_local()

    def gradients(module: nn.Module, given: Any, entering: Any) -> Any:
        of = lambda p, x: torch.func.functional_call(module, p, (x,))
        loss = lambda p, x, t: fn(lambda x: of(p, x), entering(x), entering(t))
        return sf.jit(sf.grad(loss), backend="aten")(given, ROWS, LABELS)

    wanted = gradients(alone, values, lambda x: x)
    entering = same if fn is of_a_derivative else lambda x: x
    for name, got in gradients(net, placed, entering).items():
        close(whole(got), wanted[name])


def test_a_sum_over_ranks_inside_of_a_replicated_dtensor_is_refused(line: Any) -> None:
    """The derivative by s is summed over ranks, as their rows may differ; the module says that
    they do not.
    """
    net = Pair()
    parallelize_module(net, line, PLAN)
    fn = lambda x, t: of_a_derivative(net, x, t)
    with pytest.raises(sf.CaptureError) as caught:
        sf.jit(fn, backend="aten")(ROWS, LABELS)
    text = str(caught.value)
    assert "a replicated DTensor is made from values that may differ" in text
    assert "try: DTensor.from_local(x, mesh, [Replicate()]).to_local()" in text


def test_a_value_that_enters_both_ways_is_refused_where_it_is_differentiated(line: Any) -> None:
    x, w = torch.eye(4, dtype=F64) + 1, torch.arange(16.0, dtype=F64).view(4, 4).sin()

    def loss(first: Any, second: Any, x: Any, v: Any) -> Any:
        equal = DTensor.from_local(first * x, line, [R]) @ v
        own = v.to_local() * (second * x).mean()
        rest = DTensor.from_local(own, line, [S])
        return equal.square().mean().full_tensor() + rest.square().mean().full_tensor()

    def in_one(options: Any) -> Any:
        def fn(d: Any, v: Any, x: Any) -> Any:
            y = d.full_tensor(**options)
            return loss(y, y, x, v)

        return fn

    def in_two(d: Any, v: Any, x: Any) -> Any:
        return loss(d.full_tensor(**SAID), d.full_tensor(**TERMS), x, v)

    of_one = lambda w, v: ((w * x) @ v).square().mean() + (v * (w * x).mean()).square().mean()
    d, v = (distribute_tensor(w, line, [Shard(dim)]) for dim in (1, 0))
    staged = lambda fn: sf.jit(sf.grad(fn, argnums=(0, 1)), backend="aten")(d, v, x)
    for options, why in (
        ({}, "is combined with plain tensors"),
        (SAID, "grad_placements states an equal gradient on all ranks of tp"),
        (TERMS, "a replicated DTensor is made from values"),
    ):
        sf.jit(in_one(options), backend="aten")(d, v, x)  # without a gradient
        with pytest.raises(sf.CaptureError, match=why):
            staged(in_one(options))
    wanted = torch.func.grad(of_one, argnums=(0, 1))(w, w)
    for got, gradient in zip(staged(in_two), wanted, strict=True):
        close(got.full_tensor(), gradient)


def test_how_values_meet() -> None:
    plain = frozenset({"a"})
    shard = frozenset({"a", Fact(CERTAIN, "a")})
    equal, unsaid = (frozenset({Fact(name, "a"), DIFFERENTIABLE}) for name in (EQUAL, UNDECIDED))
    reasons = reasons_to_vary
    assert reasons(equal, plain) == {EQUAL: plain} and reasons(unsaid, plain) == {UNDECIDED: plain}
    for facts in (equal, unsaid, frozenset()):
        assert reasons(facts, shard) == {SUMMED: plain}
    assert reasons(frozenset(), plain) == {SUMMED: plain}
    both = joint_facts(equal, plain)
    assert axes_in(both) == plain and reasons(both, plain) == {}
    assert reasons(both, shard) == {CONTRADICTED: plain} and reasons(plain, shard) == {}
    assert Fact(SUMMED, "a") in joint_facts(equal, shard) and Fact(SUMMED, "a") not in both
    assert Fact(SUMMED, "a") not in joint_facts(frozenset(), plain)  # a constant
