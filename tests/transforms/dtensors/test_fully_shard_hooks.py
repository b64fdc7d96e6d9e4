"""Calls of modules of fully_shard inside of functions. tests/dtensors runs one on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf

X = torch.arange(30.0, dtype=torch.float64).view(6, 5).sin()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4)).double()


def test_a_step_of_training_in_shard_is_that_of_one_device() -> None:
    alone = net()
    alone(X).square().mean().backward()
    with simulated(dp=3) as mesh:
        module: Any = net()
        fully_shard(module[0], mesh=mesh)
        fully_shard(module, mesh=mesh)
        loss = sf.shard(lambda x: module(x).square().mean(), mesh, sf.P("dp"), backend="aten")
        value = loss(X)
        value.backward()
        assert_close(value.full_tensor(), alone(X).square().mean())
        for p, q in zip(module.parameters(), alone.parameters(), strict=True):
            assert p.grad.placements == p.placements == (Shard(0),)
            assert_close(p.grad.full_tensor(), q.grad)
        for each in (module, alone):
            torch.optim.SGD(each.parameters(), 0.1).step()
        after = sf.shard(module, mesh, sf.P("dp"), backend="aten")(X)
        assert_close(after.full_tensor(), alone(X))


def test_in_jit_it_takes_dtensors() -> None:
    with simulated(dp=2) as mesh, torch.no_grad():
        module = net()
        fully_shard(module, mesh=mesh)
        call = sf.jit(lambda x: module(x), backend="aten")
        out = call(distribute_tensor(X, mesh, [Shard(0)]))
        assert_close(out.full_tensor(), net()(X))


@pytest.mark.parametrize("factor", [None, 1.0])
def test_in_jit_each_rank_has_a_batch_of_its_own(factor: float | None) -> None:
    with simulated(dp=3) as mesh:
        eager, module = net(), net()
        for each in (eager, module):
            fully_shard(each[0], mesh=mesh)
            fully_shard(each, mesh=mesh)
            if factor is not None:
                each.set_gradient_divide_factor(factor)
        own = distribute_tensor(X, mesh, [Shard(0)]).to_local()
        loss = sf.jit(lambda x: module(x).square().mean(), backend="aten")
        value, wanted = loss(own), eager(own).square().mean()
        assert_close(value.shards, wanted.shards)
        value.backward()
        wanted.backward()
        for p, q in zip(module.parameters(), eager.parameters(), strict=True):
            assert p.grad.placements == p.placements == (Shard(0),)
            assert_close(p.grad.full_tensor(), q.grad.full_tensor())
        kinds = [c.kind for c in loss.lower(own).backward.collectives]
        assert "reduce_scatter" in kinds and "all_reduce" not in kinds


def _in_policy(mesh: Any, inner: MixedPrecisionPolicy, outer: MixedPrecisionPolicy) -> Any:
    """A module of float32, with the two layers in one group."""
    module: Any = net().float()
    fully_shard([module[0], module[2]], mesh=mesh, mp_policy=inner)
    fully_shard(module, mesh=mesh, mp_policy=outer)
    return module


@pytest.mark.parametrize("reduced", [torch.float64, torch.float32])
def test_a_policy_casts_parameters_inputs_and_results(reduced: torch.dtype) -> None:
    alone = net().float()
    cast = {name: p.double() for name, p in alone.named_parameters()}
    wanted = torch.func.functional_call(alone, cast, X).float()
    wanted.square().mean().backward()
    with simulated(dp=3) as mesh:
        inner = MixedPrecisionPolicy(torch.float64, reduced)
        outer = MixedPrecisionPolicy(torch.float64, reduced, torch.float32)
        module = _in_policy(mesh, inner, outer)
        loss = sf.shard(
            lambda x: (module(x), module(x).square().mean()), mesh, sf.P("dp"), backend="aten"
        )
        result, value = loss(X.float())
        value.backward()
        assert result.dtype == torch.float32
        assert_close(result.full_tensor(), wanted, rtol=1e-6, atol=1e-6)
        for p, q in zip(module.parameters(), alone.parameters(), strict=True):
            assert (p.dtype, p.grad.dtype) == (torch.float32, torch.float32)
            assert_close(p.grad.full_tensor(), q.grad)
        assert not any("shardfn" in name for name in vars(module._get_fsdp_state()))


@pytest.mark.parametrize(
    ("own", "compute", "reduced", "sent"),
    [
        (torch.float32, torch.bfloat16, None, 2),
        (torch.float32, torch.bfloat16, torch.float32, 4),
        (torch.bfloat16, None, torch.float32, 4),
    ],
)
def test_gradients_are_reduced_in_the_dtype_of_the_policy(
    own: torch.dtype, compute: Any, reduced: Any, sent: int
) -> None:
    x = X.repeat(40, 1).to(own)
    with simulated(dp=2) as mesh:
        module: Any = nn.Linear(5, 6, bias=False).to(own)
        policy = MixedPrecisionPolicy(compute, reduced)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        fn = sf.shard(lambda x: module(x).float().square().mean(), mesh, sf.P("dp"))
        lowered = fn.lower(x)
    _, forward, backward = str(lowered).split("shard(<lambda>)")
    assert f"; 1 reduce_scatter over dp, {30 * sent} B" in backward
    assert f"; 1 all_gather over dp, {30 * (compute or own).itemsize} B" in forward


@pytest.mark.parametrize(
    ("policy", "change", "refusal", "fix"),
    [
        (
            MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
            lambda module: None,
            "mp_policy has reduce_dtype=torch.bfloat16, but the parameters have dtype "
            "torch.float32, and the module computes in torch.float32",
            "try: reduce_dtype=torch.float32; or sf.bucketed_grad(fn, reduce_dtype=torch.bfloat16)",
        ),
        (
            MixedPrecisionPolicy(),
            lambda module: module.set_gradient_divide_factor(3.0),
            "a module with set_gradient_divide_factor(3.0)",
            "try: divide the loss inside the function",
        ),
        (
            MixedPrecisionPolicy(),
            lambda module: module.set_all_reduce_hook(print),
            "a module with set_all_reduce_hook",
            "try: change the gradients that sf.grad returns",
        ),
    ],
    ids=["reduce_dtype", "factor", "hook"],
)
def test_what_changes_gradients_otherwise_is_refused(
    policy: Any, change: Any, refusal: str, fix: str
) -> None:
    with simulated(dp=2) as mesh:
        module: Any = net().float()
        fully_shard(module, mesh=mesh, mp_policy=policy)
        change(module)
        with pytest.raises(sf.CaptureError) as caught:
            sf.shard(module, mesh, backend="aten")(X.float())
    text = str(caught.value)
    assert f"fully_shard: {refusal}" in text
    assert fix in text


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.float64)])
def test_its_modules_run_in_bodies_of_loops_and_branches(policy: Any) -> None:
    square = nn.Linear(5, 5)
    cast = {name: p.double() for name, p in square.named_parameters()}
    alone = lambda x: torch.func.functional_call(square, cast, x)
    wanted = alone(alone(X)), alone(X).sin()
    leaves = list(square.parameters())
    gradients = torch.autograd.grad(wanted[0].sum() + wanted[1].sum(), leaves)
    if policy.param_dtype is None:
        square = square.double()
    with simulated(dp=2) as mesh:
        module: Any = square
        fully_shard(module, mesh=mesh, mp_policy=policy)

        def fn(x: torch.Tensor) -> Any:
            twice, _ = sf.scan(lambda c, _: (module(c), None), x, None, length=2)
            sin, cos = (lambda x: module(x).sin()), (lambda x: module(x).cos())
            once: Any = torch.cond(x.sum() > -9, sin, cos, (x,))
            return twice, once, twice.sum() + once.sum()

        *found, loss = sf.shard(fn, mesh, sf.P("dp"), backend="aten")(X)
        loss.backward()
        for a, b in zip(found, wanted, strict=True):
            assert_close(a.full_tensor(), b)
        for p, g in zip(module.parameters(), gradients, strict=True):
            assert_close(p.grad.full_tensor().to(g.dtype), g)


def test_a_branch_reduces_gradients_in_the_dtype_of_the_policy() -> None:
    with simulated(dp=2) as mesh:
        module: Any = nn.Linear(5, 6, bias=False)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        cos = lambda x: module(x).cos()

        def loss(w: torch.Tensor, x: torch.Tensor) -> Any:
            call = lambda x: torch.func.functional_call(module, {"weight": w}, x)
            return torch.cond(x.sum() > -9, call, cos, (x,)).float().sum()

        x = X.float().repeat(40, 1)
        step = sf.shard(sf.grad(loss), mesh, (None, sf.P("dp")), backend="aten")
        lowered = step.lower(module.weight.detach(), x)
        (sent,) = [c.nbytes for c in lowered.collectives if c.kind == "reduce_scatter"]
    assert sent == 4 * 6 * 5


@pytest.mark.parametrize("compute", [None, torch.float64])
def test_functional_call_gives_it_other_parameters(compute: Any) -> None:
    alone = nn.Linear(5, 3).to(compute or torch.float32)
    x = X.to(alone.weight.dtype)
    given = {name: torch.ones_like(p) / 4 for name, p in alone.named_parameters()}

    def loss(module: Any, p: Any, x: torch.Tensor) -> Any:
        return torch.func.functional_call(module, p, x).square().mean()

    wanted = torch.func.grad(lambda p: loss(alone, p, x))(given)
    with simulated(dp=2) as mesh:
        module: Any = nn.Linear(5, 3)
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(compute))
        of = {name: p.float() for name, p in given.items()}
        placed = sf.distribute(of, mesh, sf.P("dp"))
        step = sf.grad(lambda p, x: loss(module, p, x))
        found = sf.shard(step, mesh, (None, sf.P("dp")), backend="aten")(placed, x)
        for name, g in found.items():
            assert_close(g.full_tensor(), wanted[name].float())


@pytest.mark.parametrize("transform", ["shard", "jit"])
def test_a_registered_method_is_called_as_the_forward(transform: str) -> None:
    class Doubled(nn.Linear):
        def generate(self, x: torch.Tensor) -> torch.Tensor:
            return self(x) * 2

    alone = Doubled(5, 3)
    cast = {name: p.double() for name, p in alone.named_parameters()}
    wanted = 2 * torch.func.functional_call(alone, cast, X)
    with simulated(dp=2) as mesh, torch.no_grad():
        module: Any = alone
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.float64))
        register_fsdp_forward_method(module, "generate")
        call = lambda x: module.generate(x)
        x = distribute_tensor(X, mesh, [Shard(0)])
        fn = sf.jit(call) if transform == "jit" else sf.shard(call, mesh)
        assert_close(fn(x).full_tensor(), wanted)


class _Nested(nn.Module):
    """The first of a group of two modules, which calls the second one in the middle."""

    def __init__(self, second: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 5))
        self.second = second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x @ self.weight) @ self.weight


def test_a_module_of_a_group_inside_of_another_one_of_it() -> None:
    second = nn.Linear(5, 5)
    module: Any = _Nested(second)
    cast = {name: p.double() for name, p in module.named_parameters()}
    wanted = torch.func.functional_call(module, cast, X)
    with simulated(dp=2) as mesh:
        policy = MixedPrecisionPolicy(torch.float64)
        fully_shard([module, second], mesh=mesh, mp_policy=policy)
        out = sf.shard(module, mesh, sf.P("dp"), backend="aten")(X)
        assert_close(out.full_tensor(), wanted)


PARTS = {
    "fsdp on one of two axes": ((2, 2), ("dp", "tp"), False),
    "fsdp on the last axis": ((2, 2), ("tp", "dp"), False),
    "beside an axis of one rank": ((4, 1), ("dp", "tp"), False),
    "tensor parallel on the other axis": ((2, 2), ("dp", "tp"), True),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_module_on_a_part_of_the_mesh_trains_as_one_device(name: str) -> None:
    shape, names, is_tensor_parallel = PARTS[name]
    x = torch.linspace(-1, 2, 24, dtype=torch.float64).view(8, 3)

    def even_net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).double()

    alone: Any = even_net()
    with simulated(**dict(zip(names, shape, strict=True))) as mesh:
        module: Any = even_net()
        if is_tensor_parallel:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(module, mesh["tp"], plan)
        fully_shard(module[0], mesh=mesh["dp"])
        fully_shard(module, mesh=mesh["dp"])
        rows = distribute_tensor(x, mesh["dp"], [Shard(0)]).to_local()  # each dp rank's batch
        loss = sf.jit(lambda x: module(x).square().mean(), backend="aten")(rows)
        loss.backward()
        at = mesh.mesh.movedim(names.index("dp"), 0)[:, 0].tolist()  # one rank of each batch
        chunks = x.chunk(len(at))
        for rank, chunk in zip(at, chunks, strict=True):
            assert_close(loss.shards[rank], alone(chunk).square().mean())
        alone(x).square().mean().backward()
        for p, q in zip(module.parameters(), alone.parameters(), strict=True):
            assert p.grad.placements == p.placements
            assert_close(p.grad.full_tensor(), q.grad)
