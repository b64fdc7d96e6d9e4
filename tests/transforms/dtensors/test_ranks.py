"""A function as the code of one rank: its arguments and results as global tensors of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equality import close
from stagings import counts
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from worlds import SimulatedTensor

import shardfn as sf

F64 = torch.float64
OWN = torch.arange(12.0, dtype=F64).view(4, 3).sin()


def test_gradients_go_back_to_arguments_and_to_what_the_code_closes_over() -> None:
    bias = torch.arange(3.0, dtype=F64).requires_grad_()
    plain = OWN.clone().requires_grad_()
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        w = distribute_tensor(OWN.T @ OWN, mesh, [Shard(0)]).requires_grad_()

        def loss(w: Any, x: Any) -> Any:
            y = DTensor.from_local(x + bias, mesh, [Replicate()]) @ w
            whole = y.full_tensor(grad_placements=[Replicate()])
            return (whole - x.detach()).square().mean()

        seen: list[Any] = []
        w.register_hook(lambda g: seen.append(g.placements))
        before = counts.copy()
        staged = sf.jit(loss, backend="aten")
        for _ in range(2):
            staged(w, plain).backward()
        made = {name: counts[name] - before[name] for name in ("captures", "partitions")}
        value = w.full_tensor().detach().requires_grad_()
        other, held = plain.detach().requires_grad_(), bias.detach().requires_grad_()
        (((other + held) @ value - OWN).square().mean() * 2).backward()
        assert w.grad.placements == (Shard(0),) and seen == [(Shard(0),)] * 2
        close(w.grad.full_tensor(), value.grad)
        for x, like in ((plain, other), (bias, held)):
            grad: Any = x.grad
            close(grad.shards, [like.grad] * 2)
        # of global tensors, of the code of one rank, and with gradients
        assert made == {"captures": 3, "partitions": 1}
        with torch.no_grad():
            assert not staged(w, plain).requires_grad
        once = staged(w, plain)
        once.backward()
        with pytest.raises(sf.ShardError, match="the autograd graph of the call is freed"):
            once.backward()
        with pytest.raises(sf.ShardError, match="the backward of the call is differentiated"):
            torch.autograd.grad(staged(w, plain), w, create_graph=True)


def test_each_rank_has_its_own_gradient_of_its_own_tensor() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        own = [OWN, OWN + 1]
        x = SimulatedTensor(own, followed=True).requires_grad_()
        fn = lambda x, _: DTensor.from_local(x.sin(), mesh, [Shard(0)]).sum().full_tensor()
        unread = OWN.clone().requires_grad_()
        total = sf.jit(fn, backend="aten")(x, unread)
        total /= 2
        total.backward()
        assert unread.grad is None
        close(x.grad.shards, [y.cos() / 2 for y in own])


def test_a_closed_over_dtensor_on_a_part_of_the_mesh_has_its_gradient_there() -> None:
    with sf.fake_world(4):
        part = sf.make_mesh((2, 2), ("dp", "tp"))["tp"]
        w = distribute_tensor(OWN.T, part, [Shard(1)]).requires_grad_()
        x = OWN + 1
        # the backward reads w
        fn = lambda x: (DTensor.from_local(x, part, [Replicate()]) @ w.sin()).full_tensor()
        (grad,) = torch.autograd.grad(sf.jit(fn, backend="aten")(x).square().sum(), w)
        value = OWN.T.clone().requires_grad_()
        (wanted,) = torch.autograd.grad((x @ value.sin()).square().sum(), value)
        assert grad.device_mesh == part and grad.placements == (Shard(1),)
        close(grad.full_tensor(), wanted)


def test_a_module_of_dtensors_as_an_argument_is_closed_over() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        net: Any = torch.nn.Linear(3, 4).to(F64)
        parallelize_module(net, mesh, ColwiseParallel(output_layouts=Replicate()))
        call = lambda net, x: net(x).square().sum()
        with pytest.raises(sf.TreeError, match="close over the module"):
            sf.jit(call, backend="aten")(net, OWN)
        sf.jit(call, static_argnums=0, backend="aten")(net, OWN).backward()
        assert net.weight.grad.placements == (Shard(0),)
