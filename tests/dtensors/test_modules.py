"""Modules from parallelize_module, and DTensors that a function closes over: inside `jit` as
eager torch computes them on real ranks.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from equality import close
from ranks import run_ranks
from stagings import counts
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing import assert_close
from worlds import SimulatedTensor, simulated

import shardfn as sf
from shardfn import P
from tests.dtensors.compared import assert_same, of_rank

PLANS: dict[str, dict[str, Any]] = {
    "tensor parallel": {"0": ColwiseParallel(), "2": RowwiseParallel()},
    "sequence parallel": {
        "0": ColwiseParallel(input_layouts=Shard(0)),
        "2": RowwiseParallel(output_layouts=Shard(0)),
    },
    "results as DTensors": {
        "0": ColwiseParallel(use_local_output=False),
        "2": RowwiseParallel(use_local_output=False),
    },
}


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 5)).double()


def _x(plan: str, rank: int) -> torch.Tensor:
    """The rows of one rank, or in plain tensor parallel those of all."""
    made = torch.Generator().manual_seed(rank if plan.startswith("seq") else 0)
    return torch.randn(4, 3, generator=made, dtype=torch.float64)


def _local(x: Any) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _staged(net: nn.Module, x: Any) -> Any:
    with torch.no_grad():
        return sf.jit(lambda x: net(x), backend="aten")(x)


def _on_a_rank(plan: str) -> Any:
    mesh, rank = sf.make_mesh((2,), ("tp",)), torch.distributed.get_rank()
    net = parallelize_module(_net(), mesh, copy.deepcopy(PLANS[plan]))
    x = _x(plan, rank)
    eager = _local(net(x)).detach().clone()  # of one that is still arriving, which waits
    gradients = [_gradients(net, fn, x) for fn in (net, _jitted(net))]
    return eager, _local(_staged(net, x)), gradients


def _jitted(net: nn.Module) -> Any:
    return sf.jit(lambda x: net(x), backend="aten")


def _gradients(net: nn.Module, fn: Any, x: Any) -> list[Any]:
    """The gradients of a module, and their placements: of this rank, by `backward()`."""
    net.zero_grad()
    for _ in range(2):  # they add up
        fn(x).square().sum().backward()
    grads: list[Any] = [p.grad for p in net.parameters()]
    return [(_local(g), str(g.placements)) for g in grads]


@pytest.mark.parametrize("plan", PLANS)
def test_s2_1_a_module_of_parallelize_module(plan: str) -> None:
    real = run_ranks(2, _on_a_rank, plan)
    for eager, staged, (wanted, found) in real:
        close(staged, eager)
        assert_same(found, wanted)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        net = parallelize_module(_net(), mesh, copy.deepcopy(PLANS[plan]))
        out = _local(_staged(net, SimulatedTensor([_x(plan, r) for r in range(2)])))
        own = SimulatedTensor([_x(plan, r) for r in range(2)])
        found = _gradients(net, _jitted(net), own)
        for rank, (eager, _, (wanted, _)) in enumerate(real):
            close(out.shards[rank], eager)
            assert_same(of_rank(found, rank), wanted)


class TwoHeads(nn.Module):
    """Each result depends on the trunk and on one head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.first, self.second = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Any) -> Any:
        y = self.trunk(x)
        return self.first(y).square().sum(), self.second(y).floor().sum()


def _heads_on_a_rank() -> Any:
    """For each result: the gradients of eager torch and of `jit`, and the refusal of a second
    derivative.
    """
    torch.manual_seed(0)
    mesh = sf.make_mesh((2,), ("tp",))
    pair = ColwiseParallel(output_layouts=Replicate())
    styles = dict.fromkeys(("trunk", "first", "second"), pair)
    net = parallelize_module(TwoHeads().double(), mesh, styles)
    x = torch.randn(3, 4, dtype=torch.float64)
    found = []
    for k in range(2):
        rows = []
        for fn in (net, sf.jit(lambda x: net(x), backend="aten")):
            loss = fn(x)[k]
            refusal = _second_derivative(loss, net) if fn is not net else ""
            net.zero_grad()
            loss.backward()  # which the refusal has left as it was
            grads: list[Any] = [p.grad for p in net.parameters()]
            rows.append([g if g is None else _local(g).clone() for g in grads])
        found.append((*rows, refusal))
    return found


def _second_derivative(loss: torch.Tensor, net: nn.Module) -> str:
    try:
        torch.autograd.grad(loss, list(net.parameters()), create_graph=True, allow_unused=True)
    except sf.ShardError as error:
        return str(error)
    return ""


def test_parameters_without_a_part_in_a_result_have_no_gradient() -> None:
    for rank in run_ranks(2, _heads_on_a_rank):
        for k, (eager, staged, refusal) in enumerate(rank):
            other = range(4, 6) if k == 0 else range(2, 4)
            assert [i for i, g in enumerate(eager) if g is None] == list(other)
            assert [g is None for g in staged] == [g is None for g in eager]
            for a, b in zip(staged, eager, strict=True):
                assert_close(a, b) if b is not None else None
            assert "the backward of the call is differentiated, by create_graph" in refusal
            assert "try: use sf.grad or sf.hessian inside" in refusal


def test_a_pair_of_layers_sends_one_all_reduce() -> None:
    with simulated(tp=2) as mesh, torch.no_grad():
        net = parallelize_module(_net(), mesh, PLANS["tensor parallel"])
        lowered = sf.jit(lambda x: net(x), backend="aten").lower(_x("", 0))
        assert [c.kind for c in lowered.collectives] == ["all_reduce"]


def test_s2_1_a_dtensor_that_a_function_closes_over() -> None:
    x = torch.arange(10.0).view(5, 2)  # uneven over 2 ranks
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        held = {"w": distribute_tensor(x, mesh, [Shard(0)])}

        def fn(y: torch.Tensor) -> Any:
            w = held["w"]
            return (w * 2, w.placements, w.full_tensor() + y)

        staged = sf.jit(fn, backend="aten")
        doubled, placements, total = staged(torch.ones(2))
        assert_close(sf.full(doubled), x * 2)
        assert placements == (Shard(0),)
        assert_close(total.shards, [x + 1] * 2)
        before = counts["captures"]
        held["w"].add_(1)  # in place: it is read at each call
        assert_close(staged(torch.ones(2))[2].shards, [x + 2] * 2)
        assert counts["captures"] == before
        held["w"] = distribute_tensor(x * 3, mesh, [Replicate()])
        doubled, placements, _ = staged(torch.ones(2))
        assert_close(sf.full(doubled), x * 6)
        assert placements == (Replicate(),)
        assert counts["captures"] == before + 1


def test_in_shard_it_is_a_global_tensor_with_placements() -> None:
    x = torch.arange(10.0).view(5, 2)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        w = distribute_tensor(x, mesh, [Shard(0)])
        out = sf.shard(lambda y: w * 2 + y, mesh, P("dp"), backend="aten")(x)
        assert_close(sf.full(out), x * 3)


@pytest.mark.parametrize("plan", PLANS)
def test_in_shard_a_module_of_parallelize_module_is_refused_with_what_works(plan: str) -> None:
    x, net = _x("", 0), _net()
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        styles = copy.deepcopy(PLANS[plan])
        module = parallelize_module(_net(), mesh, styles)
        with pytest.raises(sf.ShardError) as caught:
            sf.shard(lambda x: module(x), mesh, backend="aten")(x)
        assert str(caught.value).startswith("a module of parallelize_module, DTensor.")
        fix = "sf.placements(params, plan, axis='tp', module=module)"
        assert fix in str(caught.value) and "try: use sf.jit(fn)" in str(caught.value)
        params = dict(net.named_parameters())
        where = sf.placements(params, PLANS[plan], axis="tp", module=net)
        call = lambda params, x: torch.func.functional_call(net, params, x)
        out = sf.shard(call, mesh, (where, P()), backend="aten")(params, x)
        assert_close(sf.full(out), net(x))


def test_a_closed_over_dtensor_of_another_mesh_or_world_is_refused() -> None:
    with sf.fake_world(2):
        mesh, other = sf.make_mesh((2,), ("dp",)), sf.make_mesh((2,), ("tp",))
        w = distribute_tensor(torch.ones(4), other, [Shard(0)])
        with pytest.raises(sf.PlacementError, match=r"the mesh used here is \(tp=2\)"):
            sf.shard(lambda x: x + w, mesh, P("dp"))(torch.ones(4))
    with sf.fake_world(2), pytest.raises(sf.PlacementError, match="has ended"):
        sf.jit(lambda x: w * 2)(torch.ones(4))


class Counted(nn.Linear):
    """A layer that counts its calls."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.calls.add_(1)
        return super().forward(x)


def test_buffers_that_code_of_one_rank_writes_are_refused_with_what_works() -> None:
    with sf.fake_world(2):
        net: Any = Counted()
        parallelize_module(net, sf.make_mesh((2,), ("tp",)), ColwiseParallel())

        def returned(x: Any) -> Any:
            buffers = {name: b.clone() for name, b in net.named_buffers()}
            return torch.func.functional_call(net, buffers, x).sum(), buffers

        with pytest.raises(sf.CaptureError, match=r"functional_call\(module, buffers"):
            sf.jit(net, backend="aten")(torch.ones(2, 3))
        loss, buffers = sf.jit(returned, backend="aten")(torch.ones(2, 3))
        loss.backward()
        assert_close(sf.full(buffers["calls"]), torch.ones(()))
        assert_close(sf.full(net.weight.grad), torch.full((4, 3), 2.0))


def test_its_gradient_comes_back_with_its_placements() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        w = distribute_tensor(torch.ones(5), mesh, [Shard(0)]).requires_grad_()
        whole = lambda: (w * w).full_tensor(grad_placements=[Replicate()])
        call = sf.jit(lambda x: whole() * x, backend="aten")
        call(torch.ones(5) * 3).sum().backward()
        assert w.grad is not None and w.grad.placements == (Shard(0),)
        assert_close(w.grad.full_tensor(), torch.ones(5) * 6)
