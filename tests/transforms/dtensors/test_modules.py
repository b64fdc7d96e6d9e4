"""Calls of modules of fully_shard inside of functions. tests/dtensors runs one on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import shardfn as sf

X = torch.arange(30.0, dtype=torch.float64).view(6, 5).sin()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4)).double()


def test_a_step_of_training_in_shard_is_that_of_one_device() -> None:
    alone = net()
    alone(X).square().mean().backward()
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("dp",))
        module: Any = net()
        fully_shard(module[0], mesh=mesh)
        fully_shard(module, mesh=mesh)
        loss = sf.shard(lambda x: module(x).square().mean(), mesh, sf.P("dp"), backend="aten")
        value = loss(X)
        value.backward()
        torch.testing.assert_close(value.full_tensor(), alone(X).square().mean())
        for p, q in zip(module.parameters(), alone.parameters(), strict=True):
            assert p.grad.placements == p.placements == (Shard(0),)
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)
        for each in (module, alone):
            torch.optim.SGD(each.parameters(), 0.1).step()
        after = sf.shard(module, mesh, sf.P("dp"), backend="aten")(X)
        torch.testing.assert_close(after.full_tensor(), alone(X))


def test_in_jit_it_takes_dtensors() -> None:
    with sf.fake_world(2), torch.no_grad():
        mesh = sf.make_mesh((2,), ("dp",))
        module = net()
        fully_shard(module, mesh=mesh)
        call = sf.jit(lambda x: module(x), backend="aten")
        out = call(distribute_tensor(X, mesh, [Shard(0)]))
        torch.testing.assert_close(out.full_tensor(), net()(X))
        with pytest.raises(sf.CaptureError, match="of a DTensor and a plain tensor"):
            call(X)


def test_a_policy_of_mixed_precision_is_refused() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        module = net()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        with pytest.raises(sf.CaptureError) as caught:
            sf.shard(module, mesh, backend="aten")(X)
    text = str(caught.value)
    assert "fully_shard: a module with a policy of mixed precision" in text
    assert "try: sf.mixed_precision(fn, compute=torch.bfloat16)" in text
