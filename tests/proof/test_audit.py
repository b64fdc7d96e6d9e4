"""`audit` names the parameter, the ratio and the cause; it says nothing of right programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import shardfn as sf

G = torch.Generator().manual_seed(1)
X = torch.randn(8, 3, dtype=torch.float64, generator=G)
Y = torch.randn(8, 2, dtype=torch.float64, generator=G)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def train(m: nn.Module, x: torch.Tensor, y: torch.Tensor, lr: float = 0.1, steps: int = 2) -> Any:
    opt = torch.optim.SGD(m.parameters(), lr)
    for _ in range(steps):
        opt.zero_grad()
        loss = F.mse_loss(m(x), y)
        loss.backward()
        opt.step()
    return loss, m


def own(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def single(x: torch.Tensor, y: torch.Tensor) -> Any:
    return train(model(), x, y)


def ddp(x: torch.Tensor, y: torch.Tensor) -> Any:
    return train(DistributedDataParallel(model()), own(x), own(y))


def fsdp(x: torch.Tensor, y: torch.Tensor) -> Any:
    m = model()
    fully_shard(m[0])
    return train(fully_shard(m), own(x), own(y))


def causes(audit: sf.Audit) -> set[str]:
    return {row.cause for row in audit}


@pytest.mark.parametrize("step", [ddp, fsdp])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_right_programs_have_no_rows(step: Callable[..., Any], world: int) -> None:
    rows = 12 if world == 3 else 8  # a mean of equal parts
    x, y = X.repeat(2, 1)[:rows], Y.repeat(2, 1)[:rows]
    audit = sf.audit(step, single, x, y, world=world)
    assert audit.ok and not audit.notes, audit
    assert str(audit).endswith("equal those of one device") and audit.compared > 12


def test_a_learning_rate_that_is_divided_is_named() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        n = dist.get_world_size()
        return train(DistributedDataParallel(model()), own(x), own(y), lr=0.1 / n)

    audit = sf.audit(step, single, X, Y, world=4)
    assert [row.name for row in audit] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert {row.kind for row in audit} == {"parameter after the step"}
    assert causes(audit) == {
        "the update is x 1/4 on every rank = 1 / size of world: learning rate divided once more"
    }
    assert all(row.ratio == pytest.approx(0.25) for row in audit)


def test_parts_of_other_sizes_are_a_mean_of_means() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        sizes, r = [3, 3, 2], dist.get_rank()
        return train(DistributedDataParallel(model()), x.split(sizes)[r], y.split(sizes)[r])

    audit = sf.audit(step, single, X, Y, world=3)
    assert causes(audit) == {
        "a mean of means: the losses of the ranks of world need the weights 3, 3, 2"
    }
    assert audit.notes == (
        "the loss of step 0 is a mean of means: the losses of the ranks of world need the weights "
        "3, 3, 2",
    )


def test_a_reduction_that_is_missing_is_named_by_its_axis() -> None:
    def step(x: torch.Tensor, y: torch.Tensor, mesh: Any) -> Any:
        m, dp = model(), mesh["dp"]
        x, y = (a.chunk(dp.size())[dp.get_local_rank()] for a in (x, y))
        F.mse_loss(m(x), y).backward()
        for p in (*m[0].parameters(), m[2].weight):
            dist.all_reduce(p.grad, dist.ReduceOp.AVG, group=dp.get_group())
        return m

    def alone(x: torch.Tensor, y: torch.Tensor) -> Any:
        m = model()
        F.mse_loss(m(x), y).backward()
        return m

    (row,) = sf.audit(step, alone, X, Y, world=4, mesh={"dp": 2, "tp": 2})
    assert (row.name, row.kind, row.ranks) == ("2.bias", "gradient", (0, 1, 2, 3))
    assert row.cause == "each rank its own: not reduced over dp"


def test_a_loss_that_is_returned_is_differentiated() -> None:
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model()(x), y)

    def doubled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss(x, y) * 2

    assert sf.audit(loss, loss, X, Y, world=2).ok
    audit = sf.audit(doubled, loss, X, Y, world=2)
    assert [row.ratio for row in audit] == [pytest.approx(2.0)] * 4


def test_parameters_are_found_by_their_values_where_names_are_of_a_rank() -> None:
    """Experts of a rank have the names that it gives them."""

    def experts(n: int) -> nn.ModuleList:
        torch.manual_seed(3)
        return nn.ModuleList([nn.Linear(3, 2).double() for _ in range(n)])

    def alone(x: torch.Tensor) -> Any:
        m = experts(4)
        sum(layer(x).pow(2).sum() * (i + 1) for i, layer in enumerate(m)).backward()
        return m

    def step(x: torch.Tensor, factor: float = 1.0) -> Any:
        r = dist.get_rank()
        mine = nn.ModuleList([*experts(4)][2 * r : 2 * r + 2])
        losses = (layer(x).pow(2).sum() * (2 * r + i + 1) for i, layer in enumerate(mine))
        (sum(losses) * factor).backward()
        return mine

    assert sf.audit(step, alone, X, world=2).ok
    audit = sf.audit(lambda x: step(x, 2.0), alone, X, world=2, mesh={"ep": 2})
    assert [row.name for row in audit] == [f"{i}.{x}" for i in range(4) for x in ("weight", "bias")]
    assert all("= size of ep: reduced twice" in row.cause for row in audit)


def test_starts_that_differ_are_said_with_what_to_do() -> None:
    def unseeded(x: torch.Tensor, y: torch.Tensor) -> Any:
        torch.manual_seed(dist.get_rank())
        return train(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), x, y)

    audit = sf.audit(unseeded, single, X, Y, world=2)
    assert {row.kind for row in audit} == {"start"} and {row.ranks for row in audit} == {(1,)}
    assert "that differ between ranks: use the same seed on all ranks" in next(iter(audit)).cause

    def otherwise(x: torch.Tensor, y: torch.Tensor) -> Any:
        torch.manual_seed(7)
        return train(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), x, y)

    audit = sf.audit(otherwise, single, X, Y, world=2)
    assert {row.ranks for row in audit} == {(0, 1)}
    assert "call torch.manual_seed(0) in both steps" in next(iter(audit)).cause


def test_dropout_is_noted() -> None:
    def dropped(x: torch.Tensor, y: torch.Tensor) -> Any:
        return train(nn.Sequential(model(), nn.Dropout(0.5)), x, y)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        net = DistributedDataParallel(nn.Sequential(model(), nn.Dropout(0.5)))
        return train(net, own(x), own(y))

    audit = sf.audit(step, dropped, X, Y, world=2)
    assert not audit.ok and "draw random numbers" in audit.notes[-1]


# Bad input


def test_a_mesh_of_other_ranks_is_refused() -> None:
    with pytest.raises(
        sf.TreeError, match="mesh {'dp': 2} has 2 ranks, but world is 8\n.*\n.*world=2"
    ):
        sf.audit(ddp, single, X, Y, world=8, mesh={"dp": 2})


def test_a_step_that_does_nothing_is_refused() -> None:
    with pytest.raises(sf.TreeError, match="distributed called no module, took no gradient"):
        sf.audit(lambda x, y: None, single, X, Y, world=2)
    with pytest.raises(sf.TreeError, match="the single-device step called no module"):
        sf.audit(ddp, lambda x, y: None, X, Y, world=2)


@pytest.mark.parametrize("flat", [True, False])
def test_flattened_parameters_are_refused(flat: bool) -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        cpu = torch.device("cpu")
        m = FullyShardedDataParallel(model(), device_id=cpu, use_orig_params=not flat)
        return train(m, own(x), own(y))

    with pytest.raises(sf.TreeError, match=r"flattens parameters.*\n.*\n.*fully_shard"):
        sf.audit(step, single, X, Y, world=2)


def test_steps_with_other_losses_are_refused() -> None:
    def other(x: torch.Tensor, y: torch.Tensor) -> Any:
        m = model()
        F.l1_loss(m(x), y).backward()
        return m

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        m = DistributedDataParallel(model())
        F.mse_loss(m(own(x)), own(y)).backward()
        return m

    with pytest.raises(sf.DivergenceError, match="the single-device step has the loss .* has"):
        sf.audit(step, other, X, Y, world=2)


def test_ranks_that_take_other_branches_are_named() -> None:
    def branch(x: torch.Tensor, y: torch.Tensor) -> Any:
        if dist.get_rank() == 1:
            dist.broadcast(x, 0)
        else:
            dist.all_reduce(x)
        return ddp(x, y)

    with pytest.raises(sf.DivergenceError) as error:
        sf.audit(branch, single, X, Y, world=3)
    assert "rank 1 of the group: broadcast([8, 3], 0) at" in str(error.value)
    assert "ranks 0, 2 of the group: all_reduce([8, 3], SUM) at" in str(error.value)
    assert "test_audit.py" in str(error.value)


def test_ranks_that_take_other_steps_are_named() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        return train(model(), x, y, steps=1 + dist.get_rank())

    with pytest.raises(
        sf.DivergenceError, match="one device takes 2 optimizer steps, but ranks take 1"
    ):
        sf.audit(step, single, X, Y, world=2)


def test_an_error_of_a_rank_is_raised_with_its_rank() -> None:
    def fails(x: torch.Tensor, y: torch.Tensor) -> Any:
        if dist.get_rank() == 1:
            raise ValueError("no data")
        return ddp(x, y)

    with pytest.raises(ValueError, match="no data") as error:
        sf.audit(fails, single, X, Y, world=3)
    assert error.value.__notes__ == ["raised on simulated rank 1 of 3"]


def test_the_process_is_as_before() -> None:
    before = torch.get_rng_state()
    sf.audit(ddp, single, X, Y, world=2)
    assert torch.equal(before, torch.get_rng_state()) and not dist.is_initialized()


class Normed(nn.Module):
    """A norm before layers of tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up = nn.LayerNorm(3).double(), nn.Linear(3, 4).double()
        self.down = nn.Linear(4, 2).double()


def test_a_gradient_that_a_dtensor_leaves_partial_is_read_as_its_sum() -> None:
    """As an optimizer does. That of a norm with SequenceParallel is Partial."""

    def stepped(m: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        opt = torch.optim.AdamW(m.parameters(), 0.1)
        F.mse_loss(m.down(torch.tanh(m.up(m.norm(x)))), y).backward()
        opt.step()
        return m

    def alone(x: torch.Tensor, y: torch.Tensor) -> Any:
        return stepped(Normed(), x, y)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(),
        }
        m = stepped(parallelize_module(Normed(), mesh, plan), own(x), y)
        assert m.norm.weight.grad.placements == (Partial(),)
        return m

    audit = sf.audit(step, alone, X, Y, world=2)
    assert audit.ok and audit.compared == 18, audit


def test_a_scale_of_each_rank_is_written_by_rank() -> None:
    def alone(x: torch.Tensor) -> Any:
        m = model()
        m(x).sum().backward()
        return m

    def step(x: torch.Tensor) -> Any:
        m = model()
        m(x).sum().backward()
        if dist.get_rank() == 2:
            m[0].weight.grad.mul_(0.25)
        return m

    (row,) = sf.audit(step, alone, X, world=3)
    assert (row.name, row.ratio, row.ranks) == ("0.weight", None, (2,))
    assert row.cause == "each rank another scale: x 1 on rank 0, x 1 on rank 1, x 0.25 on rank 2"


# Computing in 16 bits: rounding is measured, and is no difference


def narrow_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(5, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    return nn.Sequential(*layers).to(dtype)


def narrow(
    m: nn.Module, x: torch.Tensor, y: torch.Tensor, autocast: bool, factor: float = 1
) -> Any:
    opt = torch.optim.AdamW(m.parameters(), 0.01)
    for _ in range(3):
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.mse_loss(m(x).float(), y.float())
        (loss * factor).backward()
        opt.step()
    return loss, m


def narrow_alone(x: torch.Tensor, y: torch.Tensor) -> Any:
    return narrow(narrow_model(), x, y, True)


def wide_alone(x: torch.Tensor, y: torch.Tensor) -> Any:
    return narrow(narrow_model(), x, y, False)


def all_narrow_alone(x: torch.Tensor, y: torch.Tensor) -> Any:
    return narrow(narrow_model(torch.bfloat16), x.bfloat16(), y, False)


def autocast_ddp(x: torch.Tensor, y: torch.Tensor, factor: float = 1) -> Any:
    return narrow(DistributedDataParallel(narrow_model()), own(x), own(y), True, factor)


def narrow_fsdp(x: torch.Tensor, y: torch.Tensor, factor: float = 1) -> Any:
    m, policy = narrow_model(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in (m[0], m[3], m):
        fully_shard(layer, mp_policy=policy)
    return narrow(m, own(x), own(y), False, factor)


def all_narrow_ddp(x: torch.Tensor, y: torch.Tensor, factor: float = 1) -> Any:
    m = DistributedDataParallel(narrow_model(torch.bfloat16))
    return narrow(m, own(x).bfloat16(), own(y), False, factor)


PAIRS = [
    (autocast_ddp, narrow_alone),
    (narrow_fsdp, narrow_alone),
    (narrow_fsdp, wide_alone),
    (all_narrow_ddp, all_narrow_alone),
]


@pytest.mark.parametrize(("step", "alone"), PAIRS)
def test_rounding_to_16_bits_is_no_difference(step: Any, alone: Any) -> None:
    g = torch.Generator().manual_seed(2)
    x, y = torch.randn(24, 5, generator=g), torch.randn(24, 4, generator=g)
    audit = sf.audit(step, alone, x, y, world=4)
    assert audit.ok and audit.compared > 30, audit


@pytest.mark.parametrize(("step", "alone"), PAIRS)
def test_a_factor_of_4_is_found_under_the_rounding_of_16_bits(step: Any, alone: Any) -> None:
    g = torch.Generator().manual_seed(2)
    x, y = torch.randn(24, 5, generator=g), torch.randn(24, 4, generator=g)
    audit = sf.audit(lambda x, y: step(x, y, 4), alone, x, y, world=4)
    names = {f"{layer}.{part}" for layer in (0, 2, 3) for part in ("weight", "bias")}
    assert {row.name for row in audit} == names, audit
    assert all("= size of " in row.cause for row in audit), audit
    assert all(row.ratio == pytest.approx(4, rel=0.05) for row in audit), audit


# Optimizers whose states are shared among ranks


def adam(x: torch.Tensor, y: torch.Tensor) -> None:
    train_by(model(), x, y, lambda m: torch.optim.AdamW(m.parameters(), 0.1))


def train_by(m: nn.Module, x: torch.Tensor, y: torch.Tensor, made: Any, sent: Any = None) -> None:
    opt = made(m)
    for _ in range(3):
        m.zero_grad()
        F.mse_loss(m(x), y).backward()
        opt.step()
        if sent is not None:
            sent(m)


def test_steps_of_optimizers_in_optimizers_are_counted_once() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        m = DistributedDataParallel(model())
        shared = lambda m: ZeroRedundancyOptimizer(m.parameters(), torch.optim.AdamW, lr=0.1)
        train_by(m, own(x), own(y), shared)

    assert sf.audit(step, adam, X, Y, world=2).ok


@pytest.mark.parametrize("steps", [None, 1, 2])
@pytest.mark.parametrize("lost", [None, "0.bias"])
def test_parameters_that_are_sent_after_a_step_are_compared_on_all_ranks(
    steps: int | None, lost: str | None
) -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        r, n = dist.get_rank(), dist.get_world_size()

        def sent(m: Any) -> None:
            for i, (name, p) in enumerate(m.module.named_parameters()):
                if name != lost:
                    dist.broadcast(p.data, i % n)

        some = lambda m: torch.optim.AdamW([*m.parameters()][r::n], 0.1)
        train_by(DistributedDataParallel(model()), own(x), own(y), some, sent)

    audit = sf.audit(step, adam, X, Y, world=2, steps=steps)
    assert [row.name for row in audit] == [lost] * (lost is not None)
    assert causes(audit) <= {"differs between replicas: rank 0 | rank 1"}


def test_updates_by_hand_are_compared() -> None:
    def by_hand(m: nn.Module, x: torch.Tensor, y: torch.Tensor, lr: float) -> None:
        F.mse_loss(m(x), y).backward()
        with torch.no_grad():
            for p in m.parameters():
                p -= lr * p.grad

    def alone(x: torch.Tensor, y: torch.Tensor) -> None:
        by_hand(model(), x, y, 0.1)

    def step(x: torch.Tensor, y: torch.Tensor, lr: float) -> None:
        by_hand(DistributedDataParallel(model()), own(x), own(y), lr)

    assert sf.audit(lambda x, y: step(x, y, 0.1), alone, X, Y, world=2).ok
    audit = sf.audit(lambda x, y: step(x, y, 0.2), alone, X, Y, world=2)
    assert {row.kind for row in audit} == {"parameter after the step"} and len(audit.rows) == 4


def test_what_one_rank_does_after_the_steps_does_not_hold_the_others() -> None:
    """A rank evaluates alone, and the others wait for it."""

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        m = DistributedDataParallel(model())
        train(m, own(x), own(y), steps=2)
        if dist.get_rank() == 0:
            m.module(x)
        dist.barrier()

    assert sf.audit(step, single, X, Y, world=2, steps=2).ok


class ReducingSGD(torch.optim.Optimizer):
    """An optimizer that reduces the gradients it reads."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad, dist.ReduceOp.AVG)
                p -= group["lr"] * p.grad


def sgd(x: torch.Tensor, y: torch.Tensor) -> None:
    train_by(model(), x, y, lambda m: torch.optim.SGD(m.parameters(), 0.1))


def test_gradients_that_an_optimizer_reduces_are_right() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        train_by(model(), own(x), own(y), lambda m: ReducingSGD(m.parameters(), 0.1))

    def averaged(m: nn.Module) -> None:
        for p in m.parameters():
            dist.all_reduce(p.data, dist.ReduceOp.AVG)

    def later(x: torch.Tensor, y: torch.Tensor) -> None:
        plain = lambda m: torch.optim.SGD(m.parameters(), 0.1)
        train_by(model(), own(x), own(y), plain, averaged)

    assert sf.audit(step, sgd, X, Y, world=2).ok
    assert sf.audit(later, sgd, X, Y, world=2).ok


def test_optimizers_in_the_backward_are_one_step() -> None:
    def in_backward(x: torch.Tensor, y: torch.Tensor, names: Any, reduced: bool) -> None:
        m = model()
        optimizers = {p: torch.optim.SGD([p], 0.1) for p in m.parameters()}

        def hook(p: Any) -> None:
            if reduced and p.dim() in names:
                dist.all_reduce(p.grad, dist.ReduceOp.AVG)
            optimizers[p].step()

        for p in m.parameters():
            p.register_post_accumulate_grad_hook(hook)
        F.mse_loss(m(x), y).backward()

    alone = lambda x, y: in_backward(x, y, (), False)
    right = lambda x, y: in_backward(own(x), own(y), (1, 2), True)
    wrong = lambda x, y: in_backward(own(x), own(y), (2,), True)
    assert sf.audit(right, alone, X, Y, world=2).ok
    assert {row.name for row in sf.audit(wrong, alone, X, Y, world=2)} == {"0.bias", "2.bias"}


def test_a_step_after_the_first_is_named() -> None:
    def step(x: torch.Tensor, y: torch.Tensor, wrap: Any, is_kept: bool) -> None:
        m = wrap(model())
        opt = torch.optim.SGD(m.parameters(), 0.1)
        for i in range(3):
            if i == 0 or not is_kept:
                opt.zero_grad()
            F.mse_loss(m(x), y).backward()
            opt.step()

    alone = lambda x, y: step(x, y, lambda m: m, False)
    kept = lambda x, y: step(own(x), own(y), DistributedDataParallel, True)
    audit = sf.audit(kept, alone, X, Y, world=2)
    assert {row.step for row in audit} == {1} and "gradient of 4 parameters at step 1: " in str(
        audit
    )


def test_copies_of_a_model_have_their_own_names() -> None:
    def step(x: torch.Tensor, y: torch.Tensor, wrap: Any, keep: Any) -> Any:
        m = wrap(model())
        plain = getattr(m, "module", m)
        mean = torch.optim.swa_utils.AveragedModel(plain)
        train(m, x, y, steps=1)
        if keep():
            mean.update_parameters(plain)
        return {"mean": mean}

    alone = lambda x, y: step(x, y, lambda m: m, lambda: True)
    of_one = lambda x, y: step(own(x), own(y), DistributedDataParallel, lambda: not dist.get_rank())
    audit = sf.audit(of_one, alone, X, Y, world=2)
    assert {row.name.rpartition(".")[0] for row in audit if row.kind != "buffer"} <= {
        "mean.0",
        "mean.2",
    }
    assert not audit.ok


def test_parameters_of_no_elements_are_compared() -> None:
    def step(x: torch.Tensor, y: torch.Tensor, mesh: Any) -> None:
        m = fully_shard(model(), mesh=mesh)
        m.set_requires_all_reduce(False)
        F.mse_loss(m(own(x)), own(y)).backward()

    def alone(x: torch.Tensor, y: torch.Tensor) -> None:
        F.mse_loss(model()(x), y).backward()

    audit = sf.audit(step, alone, X, Y, mesh={"replicas": 2, "shards": 4})
    assert not audit.ok


def test_a_step_without_another_is_compared_with_itself_on_one_rank() -> None:
    assert sf.audit(ddp, None, X, Y, world=4).ok
    half = lambda x, y: train(
        DistributedDataParallel(model()), own(x), own(y), 0.1 * dist.get_world_size()
    )
    audit = sf.audit(half, None, X, Y, world=2)
    assert not audit and {row.ratio for row in audit if row.ratio} != set()


def test_many_rows_of_one_cause_are_written_together() -> None:
    doubled = lambda x, y: train(model(), x, y, 0.2)
    text = str(sf.audit(doubled, single, X, Y, world=2))
    assert "parameter after the step of 4 parameters: the update is x 2.0 on every rank" in text
    assert "\n    0.weight, 0.bias, 2.weight, 2.bias" in text


def test_where_no_cause_is_known_the_loss_and_the_batch_tell_more() -> None:
    def shorter(x: torch.Tensor, y: torch.Tensor) -> Any:
        rows = 1 if dist.get_world_size() > 1 else 8
        return train(DistributedDataParallel(model()), own(x)[:rows], own(y)[:rows])

    def clipped(x: torch.Tensor, y: torch.Tensor) -> Any:
        m = model()
        F.mse_loss(m(own(x)), own(y)).backward()
        for p in m.parameters():
            limit = 1e-2 if dist.get_world_size() > 1 else 1e9
            p.grad.clamp_(-limit, limit)
            dist.all_reduce(p.grad, dist.ReduceOp.AVG)
        return m

    notes = " ".join(sf.audit(shorter, single, X, Y, world=2).notes)
    assert "the first batch has 8 rows on one device, but 2 rows on all ranks together" in notes
    assert "the loss of step 0 is" in notes and "as the mean over ranks" in notes
    notes = " ".join(sf.audit(clipped, None, X, Y, world=2).notes)
    assert notes == "the loss of step 0 is right: the difference is in the backward"


@pytest.mark.parametrize("lr", [0.0, 1e-6, 1e-3])
def test_a_small_update_does_not_hide_a_gradient_that_is_not_reduced(lr: float) -> None:
    """As in the warm-up of a learning rate, or in float32."""

    def step(x: torch.Tensor, y: torch.Tensor, cut: Any) -> Any:
        return train(model().float(), cut(x).float(), cut(y).float(), lr, steps=1)

    audit = sf.audit(
        lambda x, y: step(x, y, own), lambda x, y: step(x, y, lambda a: a), X, Y, world=2
    )
    assert {row.cause for row in audit} == {"each rank its own: not reduced over world"}
    assert len(audit.rows) == 4


def test_a_gradient_that_one_device_has_not_is_named() -> None:
    def step(x: torch.Tensor, y: torch.Tensor, wrap: Any, cut: Any, frozen: bool) -> Any:
        m = model()
        m[0].bias.requires_grad_(not frozen)
        m = wrap(m)
        F.mse_loss(m(cut(x)), cut(y)).backward()
        return m

    alone = lambda x, y: step(x, y, lambda m: m, lambda a: a, True)
    right = lambda x, y: step(x, y, DistributedDataParallel, own, True)
    wrong = lambda x, y: step(x, y, DistributedDataParallel, own, False)
    assert sf.audit(right, alone, X, Y, world=2).ok
    (row,) = sf.audit(wrong, alone, X, Y, world=2)
    assert (row.name, row.kind) == (
        "0.bias",
        "gradient",
    ) and "on one device this parameter has no gradient" in row.cause


def test_results_that_are_not_compared_are_noted_and_nothing_at_all_is_refused() -> None:
    alone = lambda x, y: {"a": x.sum(0), "b": x}
    other = lambda x, y: {"a": x.sum(0), "b": x[:, :2].reshape(-1)[:5]}
    last = lambda x, y: {"a": x.sum(0), **({"b": x} if dist.get_rank() else {})}
    (note,) = sf.audit(other, alone, X, Y, world=2).notes
    assert note.startswith("result b, [8, 3] on one device, is not compared on ranks 0, 1")
    audit = sf.audit(last, alone, X, Y, world=2)
    assert audit.ok and "not compared on rank 0:" in audit.notes[0] and audit.compared == 2
    with pytest.raises(sf.TreeError, match="no parameter name or result name in common"):
        sf.audit(lambda x, y: {"c": x}, alone, X, Y, world=2)
