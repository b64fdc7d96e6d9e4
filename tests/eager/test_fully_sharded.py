"""Modules of fully_shard that are called outside of functions. tests/simulated/test_dtensor.py
compares two scripts of them with real ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import shardfn as sf

F64 = torch.float64
X = torch.arange(30.0, dtype=F64).view(6, 5).sin()


@pytest.fixture
def mesh() -> Iterator[Any]:
    with sf.fake_world(3):
        yield sf.make_mesh((3,), ("dp",))


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4)).to(F64)


def own(mesh: Any) -> Any:
    """Two rows of X on each rank."""
    return distribute_tensor(X, mesh, [Shard(0)]).to_local()


def gradients(module: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    """Of the parameters. Equal batches have the mean of their gradients."""
    loss.backward()
    found: list[Any] = [p.grad for p in module.parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in found]


def test_the_gradient_is_the_mean_over_ranks(mesh: Any) -> None:
    module, alone = net(), net()
    fully_shard(module[0], mesh=mesh)
    fully_shard(module, mesh=mesh)
    found = gradients(module, module(own(mesh)).square().mean())
    wanted = gradients(alone, alone(X).square().mean())
    torch.testing.assert_close(found, wanted)
    again = gradients(module, module(X).square().mean())  # the same on all ranks
    torch.testing.assert_close(again, [2 * g for g in wanted])
    module.zero_grad()
    module.set_gradient_divide_factor(1.0)  # of its own parameters, not of those of module[0]
    added = gradients(module, module(own(mesh)).square().mean())
    torch.testing.assert_close(added[2:], [3 * g for g in wanted[2:]])


def test_a_policy_casts_and_frozen_parameters_have_no_gradient(mesh: Any) -> None:
    module, alone = net().float(), net().float()
    alone[0].weight.requires_grad_(False)
    module[0].weight.requires_grad_(False)
    fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(F64, F64, F64))
    loss = module(own(mesh).float()).square().mean()
    assert loss.dtype == F64
    found = gradients(module, loss)
    cast = {name: p.double() for name, p in alone.named_parameters()}
    wanted = torch.func.functional_call(alone, cast, X.float().double()).square().mean()
    assert found[0] is None and found[1].dtype == torch.float32
    torch.testing.assert_close(found, gradients(alone, wanted))


def test_modules_have_their_parameters_back(mesh: Any) -> None:
    module = net()
    fully_shard(module, mesh=mesh)
    before = [*module.parameters()]
    with torch.no_grad():
        torch.testing.assert_close(module(X), net()(X))
    assert all(a is b for a, b in zip(module.parameters(), before, strict=True))
    module.unshard()
    assert torch.equal(module[0].weight, net()[0].weight)
    module.reshard()
    repeat: Callable[..., Any] = torch.utils.checkpoint.checkpoint
    repeat(module, X, use_reentrant=False).sum().backward()
    assert all(a is b for a, b in zip(module.parameters(), before, strict=True))
    twice = {name: 2 * p for name, p in module.state_dict().items()}
    module.load_state_dict(twice, assign=True)
    torch.testing.assert_close(
        module(X),
        torch.func.functional_call(
            net(), {name: 2 * p for name, p in net().state_dict().items()}, X
        ),
    )


def test_what_changes_gradients_on_real_ranks_alone_is_refused(mesh: Any) -> None:
    module = net()
    fully_shard(module, mesh=mesh)
    module.set_all_reduce_hook(print)
    with pytest.raises(sf.ShardError, match="set_all_reduce_hook is not supported"):
        module(X)


def test_with_tensor_parallel_batches_are_those_of_all_ranks() -> None:
    module, alone = net(), net()
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        parallelize_module(module, mesh["tp"], {"0": ColwiseParallel()})
        fully_shard(module, mesh=mesh["dp"])
        assert len(module[0].weight.placements) == 2
        torch.testing.assert_close(module[0].weight.full_tensor(), alone[0].weight)
        local = distribute_tensor(X, mesh, [Shard(0), Shard(1)]).to_local()
        with pytest.raises(sf.PlacementError, match="hold different values"):
            module(local)
