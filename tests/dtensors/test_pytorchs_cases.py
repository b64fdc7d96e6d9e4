"""S2: what PyTorch's own tests of compiled DTensors try, next to one device: in a simulated world
of 2 and of 8, and on 2 Gloo processes. Eager DTensors are the oracle in test_inside.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import close
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint
from worlds import SimulatedTensor

import shardfn as sf

S, R = Shard(0), Replicate()


def draw(*shape: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=made, dtype=torch.float64)


def staged(fn: Callable[..., Any], *args: Any) -> Any:
    """The result on rank 0, under the stages."""
    out = sf.jit(fn, backend="aten")(*args)
    return [_mine(x) for x in out] if isinstance(out, tuple | list) else _mine(out)


def _mine(x: Any) -> Any:
    x = x.full_tensor() if isinstance(x, DTensor) else x
    return x.shards[0] if isinstance(x, SimulatedTensor) else x


def a_result_that_is_not_contiguous(mesh: Any) -> None:
    x = draw(8, 6)

    def fn(d: Any) -> Any:
        return d.redistribute(mesh, [R]).to_local().t() + 0

    close(staged(fn, distribute_tensor(x, mesh, [S])), x.t())
    got = staged(lambda d: d.t(), distribute_tensor(x, mesh, [S]))
    close(got, x.t())


def terms_into_a_product(mesh: Any) -> None:
    x, w, right = draw(3, 8), draw(8, 5), draw(5, 4)

    def fn(x: Any, w: Any) -> Any:
        terms = x @ w
        y = terms @ distribute_tensor(right, mesh, [R])
        return y.full_tensor(), [type(p) is Partial for p in terms.placements]

    args = distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(w, mesh, [S])
    y, is_partial = staged(fn, *args)
    assert is_partial
    close(y, x @ w @ right)


def shards_of_different_sizes(mesh: Any) -> None:
    x = draw(257)

    def fn(d: Any) -> Any:
        return d * 2, d.redistribute(mesh, [R]).to_local().sum(), d.shape[0]

    d = distribute_tensor(x, mesh, [S])
    doubled, total, n = staged(fn, d)
    assert n == 257
    close(doubled, x * 2)
    close(total, x.sum())
    close(staged(sf.grad(lambda d: fn(d)[1].sin()), d), x.sum().cos().expand(257))


def a_gradient_placed_otherwise_than_the_value(mesh: Any) -> None:
    x, w = draw(8, 3), draw(3, 2)

    def loss(w: Any, x: Any) -> Any:
        return (x @ w).square().sum().full_tensor()

    args = distribute_tensor(w, mesh, [R]), distribute_tensor(x, mesh, [S])
    gradient = sf.jit(sf.grad(loss), backend="aten")(*args)
    assert gradient.placements == (R,)  # each rank has a term, and they are summed
    close(_mine(gradient), 2 * x.t() @ x @ w)


def the_backward_of_a_redistribution(mesh: Any) -> None:
    x = draw(8, 3)

    def loss(d: Any) -> Any:
        y = d.redistribute(mesh, [R]).to_local()
        return (y * (1 + mesh.get_local_rank())).square().sum()

    d = distribute_tensor(x, mesh, [S])
    gradient = sf.jit(sf.grad(loss), backend="aten")
    kinds = [c.kind for c in gradient.lower(d).collectives]
    assert kinds == ["all_gather", "reduce_scatter"]
    weights = sum((1 + rank) ** 2 for rank in range(mesh.size()))
    close(_mine(gradient(d)), 2 * x * weights)
    computed = sf.jit(sf.grad(lambda d: loss(d.sin())), backend="aten")
    kinds = [c.kind for c in computed.lower(d).collectives]
    assert kinds == ["all_gather", "reduce_scatter"]
    close(_mine(computed(d)), 2 * x.sin() * x.cos() * weights)


def an_embedding_by_rows(mesh: Any) -> None:
    table, index = draw(19, 4), torch.arange(24).view(4, 6) % 19

    def loss(table: Any) -> Any:
        rows = F.embedding(distribute_tensor(index, mesh, [R]), table)
        return rows.full_tensor().square().sum()

    d = distribute_tensor(table, mesh, [S])
    close(staged(loss, d), table[index].square().sum())
    counts = torch.bincount(index.flatten(), minlength=19)
    close(staged(sf.grad(loss), d), 2 * table * counts[:, None])


class Placements:
    """A sequence of placements of a class of its own."""

    def __init__(self, *placements: Any) -> None:
        self.held = placements

    def __iter__(self) -> Any:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


def attributes_and_methods(mesh: Any) -> None:
    x = draw(8, 3)

    def fn(d: Any) -> Any:
        y = d * 2
        mine = y._local_tensor + (1 if y.placements[0].is_shard() else 2)
        said = hasattr(d, "_local_tensor"), hasattr(mine, "_local_tensor")
        rows: Any = Placements(S)
        same: Any = Placements(R)
        again = DTensor.from_local(mine, mesh, rows)
        moved = DTensor.redistribute(again, mesh, same)
        return DTensor.to_local(moved), DTensor.full_tensor(y), said

    to_local, full, said = sf.jit(fn, backend="aten")(distribute_tensor(x, mesh, [S]))
    assert said == (True, False)
    close(_mine(to_local), 2 * x + 1)
    close(_mine(full), 2 * x)


def pieces(mesh: Any) -> None:
    x = draw(16, 4)

    def fn(d: Any, size: int) -> Any:
        whole = lambda y: y.redistribute(d.device_mesh, [R]).to_local()
        both = torch.cat((d, d.cos()), dim=0)
        return [whole(y) for y in (*torch.split(d, size), both)]

    for size in (3, 4):
        found = staged(fn, distribute_tensor(x, mesh, [S]), size)
        wanted = [*torch.split(x, size), torch.cat((x, x.cos()))]
        for got, y in zip(found, wanted, strict=True):
            close(got, y)


def a_hook_that_takes_a_dtensor_apart(mesh: Any) -> None:
    layer, x = nn.Linear(4, 4).double().requires_grad_(False), draw(5, 4)
    wanted = layer(x) + 2

    def hook(module: Any, args: Any, out: Any) -> Any:
        local = out.to_local(grad_placements=out.placements) + 2
        return DTensor.from_local(local, mesh, out.placements, run_check=False)

    layer.register_forward_hook(hook)
    for name in ("weight", "bias"):
        placed = distribute_tensor(getattr(layer, name).detach(), mesh, [R])
        setattr(layer, name, nn.Parameter(placed, requires_grad=False))
    close(staged(layer, distribute_tensor(x, mesh, [R])), wanted)


def _pair() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 6)).double()


def _parallel(mesh: Any, into: Any, out: Any) -> None:
    net, x = _pair(), draw(8, 6)
    wanted = net(x).detach()
    plan: dict[str, Any] = {
        "0": ColwiseParallel(input_layouts=into),
        "2": RowwiseParallel(output_layouts=out, use_local_output=False),
    }
    net = parallelize_module(net, mesh, plan)
    with torch.no_grad():
        given = distribute_tensor(x, mesh, [into])
        got = sf.jit(lambda d: net(d), backend="aten")(given)
    assert got.placements == (out,)
    close(_mine(got), wanted)


def tensor_parallel(mesh: Any) -> None:
    _parallel(mesh, R, R)


def tensor_and_sequence_parallel(mesh: Any) -> None:
    _parallel(mesh, S, S)


def fully_sharded_tensor_parallel_checkpoint(mesh: Any) -> None:
    grid = sf.make_mesh((mesh.size() // 2, 2), ("dp", "tp"))
    values = {"up": draw(6, 16), "down": draw(16, 6)}
    x = draw(8, 6)

    def block(x: Any, up: Any, down: Any) -> Any:
        whole = [up.redistribute(grid, [R, Shard(1)]), down.redistribute(grid, [R, Shard(0)])]
        return torch.tanh(x @ whole[0]) @ whole[1]

    def loss(p: Any, x: Any) -> Any:
        y = checkpoint(block, x, p["up"], p["down"], use_reentrant=False)
        return y.square().mean().full_tensor()

    placed = {
        "up": distribute_tensor(values["up"], grid, [S, Shard(1)]),
        "down": distribute_tensor(values["down"], grid, [Shard(1), S]),
    }
    plain = lambda p: (torch.tanh(x @ p["up"]) @ p["down"]).square().mean()
    batch = distribute_tensor(x, grid, [S, R])
    for wrap in (sf.value_and_grad, sf.bucketed_grad):
        value, gradient = sf.jit(wrap(loss), backend="aten")(placed, batch)
        close(_mine(value), plain(values))
        for name, wanted in torch.func.grad(plain)(values).items():
            assert gradient[name].placements == placed[name].placements
            close(_mine(gradient[name]), wanted)


def a_loss_of_sharded_classes(mesh: Any) -> None:
    """The tutorial's loss_parallel: plain labels, which all ranks have."""
    x, labels = draw(6, 16), torch.arange(6) * 2
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def loss(d: Any, labels: Any) -> Any:
        with loss_parallel():
            both = F.cross_entropy(d, labels, reduction="sum") + criterion(d, labels)
        return both.full_tensor()

    of_one = lambda x: F.cross_entropy(x, labels, reduction="sum") + criterion(x, labels)
    d = distribute_tensor(x, mesh, [Shard(1)])
    close(staged(loss, d, labels), of_one(x))
    close(staged(sf.grad(loss), d, labels), torch.func.grad(of_one)(x))


def a_module_of_fully_shard(mesh: Any) -> None:
    alone, net, x = _pair(), _pair(), draw(8, 6)
    alone(x).square().mean().backward()
    fully_shard(net, mesh=mesh)
    mean = lambda x: net(x).square().mean()
    value: Any = sf.shard(mean, mesh, sf.P("dp"), backend="aten")(x)
    value.backward()
    close(value.full_tensor(), alone(x).square().mean())
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        gradient: Any = p.grad
        close(gradient.full_tensor(), q.grad)


def a_policy_of_mixed_precision(mesh: Any) -> None:
    """Parameters in float32, computed with in float64; on real ranks also as FSDP computes it."""
    policy = MixedPrecisionPolicy(torch.float64, torch.float64)
    alone, net, eager = (_pair().float() for _ in range(3))
    x = draw(8, 6).float()
    cast = {name: p.double() for name, p in alone.named_parameters()}
    torch.func.functional_call(alone, cast, x.double()).square().mean().backward()
    for module in (net, eager):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    mean = lambda x: net(x).square().mean()
    value: Any = sf.shard(mean, mesh, sf.P("dp"), backend="aten")(x)
    value.backward()
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        gradient: Any = p.grad
        assert gradient.dtype == torch.float32
        close(gradient.full_tensor(), q.grad)
    if torch.distributed.get_backend() != "gloo":
        return
    eager.set_force_sum_reduction_for_comms(True)  # Gloo has no mean
    own = x.chunk(mesh.size())[mesh.get_local_rank()]
    eager(own).square().mean().backward()
    for p, q in zip(net.parameters(), eager.parameters(), strict=True):
        close(p.grad.to_local(), q.grad.to_local())


CASES = (
    a_module_of_fully_shard,
    a_policy_of_mixed_precision,
    a_loss_of_sharded_classes,
    a_result_that_is_not_contiguous,
    terms_into_a_product,
    shards_of_different_sizes,
    a_gradient_placed_otherwise_than_the_value,
    the_backward_of_a_redistribution,
    an_embedding_by_rows,
    attributes_and_methods,
    pieces,
    a_hook_that_takes_a_dtensor_apart,
    tensor_parallel,
    tensor_and_sequence_parallel,
    fully_sharded_tensor_parallel_checkpoint,
)


every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)


@every_case
def test_s2_2_a_case_of_pytorchs_tests(case: Any) -> None:
    with sf.fake_world(2):
        case(sf.make_mesh((2,), ("dp",)))


@every_case
def test_s2_2_a_case_of_pytorchs_tests_on_eight_ranks(case: Any) -> None:
    with sf.fake_world(8):
        case(sf.make_mesh((8,), ("dp",)))


@pytest.mark.parametrize("ranks", [3])
def test_s2_2_257_elements_over_3_ranks(ranks: int) -> None:
    with sf.fake_world(ranks):
        shards_of_different_sizes(sf.make_mesh((ranks,), ("dp",)))


def _on_a_rank(case: Any) -> None:
    case(sf.make_mesh((2,), ("dp",)))


@every_case
def test_s2_2_a_case_on_real_ranks(case: Any) -> None:
    run_ranks(2, _on_a_rank, case)
