"""S7.3: autograd.Functions that communicate by hand, with the user's backward: as on one device in
shard_map, and as eager torch on two Gloo processes in the code of one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from ranks import run_ranks
from torch.testing import assert_close
from worlds import SimulatedTensor

import shardfn as sf
from shardfn import P
from tests.transforms.control_flow.regions import REGIONS, given, own_of

SPECS = P(), P(None, "tp"), P("tp", None), P()
ALL = (0, 1, 2)
Fn = Callable[..., Any]


def _close(got: Any, wanted: Any) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert_close(sf.full(a), b, rtol=1e-10, atol=1e-10)


def _mapped(loss: Fn, mesh: Any) -> Fn:
    group = mesh.get_group("tp")
    return sf.shard_map(lambda *args: loss(*args, group), mesh, SPECS, P())


def _again(loss: Fn, *args: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(loss, *args, use_reentrant=False)


# (a transform of a loss of the code of one rank, the same of one device)
AROUND: dict[str, tuple[Fn, Fn]] = {
    "grad": (
        lambda loss, mesh: sf.grad(_mapped(loss, mesh), ALL),
        lambda loss: torch.func.grad(loss, ALL),
    ),
    "shard": (
        lambda loss, mesh: sf.shard(sf.grad(_mapped(loss, mesh), ALL), mesh),
        lambda loss: torch.func.grad(loss, ALL),
    ),
    "checkpoint": (
        lambda loss, mesh: sf.grad(_mapped(lambda *args: _again(loss, *args), mesh), ALL),
        lambda loss: torch.func.grad(loss, ALL),
    ),
    "bucketed_grad": (
        lambda loss, mesh: (
            lambda *args: sf.bucketed_grad(_mapped(loss, mesh), argnums=ALL)(*args)[1]
        ),
        lambda loss: torch.func.grad(loss, ALL),
    ),
    "grad of grad": (
        lambda loss, mesh: sf.grad(_squared(sf.grad(_mapped(loss, mesh))), ALL),
        lambda loss: torch.func.grad(_squared(torch.func.grad(loss)), ALL),
    ),
}


def _squared(fn: Fn) -> Fn:
    return lambda *args: (fn(*args) ** 2).sum()


@pytest.mark.parametrize("name", REGIONS)
def test_s7_3_a_communicating_function_has_the_users_backward(name: str) -> None:
    loss, plain = REGIONS[name]
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        group = mesh.get_group("tp")
        inside = sf.grad(lambda *args: loss(*args, group), ALL)
        wanted = torch.func.grad(plain, ALL)(*given())
        _close(sf.grad(_mapped(loss, mesh), ALL)(*given()), wanted)
        got = sf.shard_map(inside, mesh, SPECS, SPECS[:3])(*given())
        _close(got, wanted)


@pytest.mark.parametrize("around", AROUND)
def test_a_communicating_function_under_other_transforms(around: str) -> None:
    loss, plain = REGIONS["copy and reduce"]
    staged, eager = AROUND[around]
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        _close(staged(loss, mesh)(*given()), eager(plain)(*given()))


def _on_a_rank() -> dict[str, Any]:
    mesh, rank = sf.make_mesh((2,), ("tp",)), dist.get_rank()
    group = mesh.get_group("tp")
    found = {}
    for name, (loss, _) in REGIONS.items():
        args = own_of(rank, 2)
        leaves = [x.clone().requires_grad_() for x in args[:3]]
        value = loss(*leaves, args[3], group)
        eager = torch.autograd.grad(value, leaves, materialize_grads=True)
        staged = sf.jit(_of_group(loss, group), backend="aten")(*args)
        found[name] = [value.detach(), *eager], [staged[0], *staged[1]]
    return found


def _of_group(loss: Fn, group: Any) -> Fn:
    return sf.value_and_grad(lambda *args: loss(*args, group), ALL)


def test_s7_3_communicating_functions_answer_as_eager_torch() -> None:
    answers = run_ranks(2, _on_a_rank)
    with sf.fake_world(2):
        group = sf.make_mesh((2,), ("tp",)).get_group("tp")
        columns = zip(own_of(0, 2), own_of(1, 2), strict=True)
        args = [SimulatedTensor([*column]) for column in columns]
        for name, (loss, _) in REGIONS.items():
            value, gradients = sf.jit(_of_group(loss, group), backend="aten")(*args)
            for rank, found in enumerate(answers):
                eager, staged = found[name]
                _close(staged, eager)
                _close([x.shards[rank] for x in (value, *gradients)], eager)


class Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


class Several(torch.autograd.Function):
    """Saves, marks and ignores what a context takes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, k: int, names: Any, y: Any) -> Any:
        ctx.k, ctx.own = k, [x * 2, {"y": y}]
        ctx.save_for_backward(x, None, y)
        ctx.set_materialize_grads(False)
        found = (x * y).round()
        ctx.mark_non_differentiable(found)
        total = x * y
        dist.all_reduce(total)
        return total, found, "text"

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, _: Any, __: Any) -> Any:
        _, none, _ = ctx.saved_tensors
        twice, rest = ctx.own
        assert none is None
        assert ctx.needs_input_grad[0]
        return g * rest["y"] * ctx.k, None, None, g * twice


def test_a_context_takes_what_torchs_takes() -> None:
    def loss(x: torch.Tensor, y: torch.Tensor) -> Any:
        total, found, text = Several.apply(x, 3, ["a"], y)
        assert text == "text"
        return total.sum() + sf.psum(found.sum(), "tp")

    x, *_ = given()
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        mapped = sf.shard_map(loss, mesh, (P("tp"), P("tp")), P())
        _close(sf.grad(mapped, (0, 1))(x, x.cos()), (x.cos() * 3, x * 2))


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: Added.apply(x).sum(),
        lambda x: _read_later(x * 2),
        lambda x: _view_read_later(x * 2),
    ],
)
def test_a_forward_that_writes_to_an_argument_read_later_is_refused(loss: Fn) -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        mapped = sf.shard_map(loss, mesh, P(), P())
        with pytest.raises(sf.CaptureError, match="writes in place to an argument") as caught:
            sf.grad(mapped)(given()[0])
    assert "Added.apply(x.clone())" in str(caught.value)


def _read_later(y: torch.Tensor) -> torch.Tensor:
    return (Added.apply(y) * y).sum()


def _view_read_later(y: torch.Tensor) -> torch.Tensor:
    row = y[0]
    return Added.apply(y).sum() + row.sum()


class OwnFactor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * (1 + dist.get_rank())


def test_s7_3_the_rank_in_a_backward_is_each_ranks_own() -> None:
    loss = lambda x: OwnFactor.apply(x).sum()
    x = given()[0]
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        found = sf.jit(sf.grad(loss))(x)
        for rank in range(2):
            _close([found.shards[rank]], [torch.full_like(x, 1 + rank)])
        with pytest.raises(sf.ShardError, match="get_rank: the call belongs to code of one rank"):
            sf.shard(sf.grad(loss), mesh, P("tp"))(x)


def test_a_communicating_function_in_a_module_that_runs_is_refused() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return OwnFactor.apply(x).sum()

    with sf.fake_world(2):
        fn, params, buffers = sf.functionalize(Net())
        mesh = sf.make_mesh((2,), ("tp",))
        loss = lambda x: fn(params, buffers, x)[0]
        with pytest.raises(sf.CaptureError, match="inside a functionalized module"):
            sf.shard(sf.grad(loss), mesh, P("tp"))(given()[0])


def test_a_changed_constant_of_a_communicating_function_is_read_again() -> None:
    factor = [2.0]

    class Factored(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            g = g * factor[0]
            dist.all_reduce(g)
            return g

    x = given()[0]
    with sf.fake_world(2):
        gradient = sf.jit(sf.grad(lambda x: Factored.apply(x).sum()))
        _close([gradient(x).shards[1]], [torch.full_like(x, 4)])
        factor[0] = 3.0
        _close([gradient(x).shards[1]], [torch.full_like(x, 6)])


def _of(backward: Any) -> Any:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

    Own.backward = staticmethod(backward)
    return lambda x, w: sf.psum(torch.tanh(Own.apply(x) @ w).sum(), "tp")


@torch.autograd.function.once_differentiable
def _once(ctx: Any, g: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(g)
    return g


def _no_grad(ctx: Any, g: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        g = g.clone()
        dist.all_reduce(g)
        return g


def _listed(ctx: Any, g: torch.Tensor) -> torch.Tensor:
    every = [torch.empty_like(g) for _ in range(2)]
    dist.all_gather(every, g.contiguous())
    return every[0] + every[1]


def _through_a_view(ctx: Any, g: torch.Tensor) -> torch.Tensor:
    flat = g.clone().view(-1)
    dist.all_reduce(flat)
    return flat.view_as(g)


@pytest.mark.parametrize("backward", [_once, _no_grad, _listed, _through_a_view])
def test_a_summed_cotangent_is_summed_once_or_refused(backward: Any) -> None:
    x, w, *_ = given()
    wanted = torch.func.grad(lambda x: torch.tanh(x @ w).sum())(x)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        gradient = sf.grad(sf.shard_map(_of(backward), mesh, SPECS[:2], P()))
        if backward is _through_a_view:
            with pytest.raises(sf.CaptureError, match="into a part of a tensor"):
                gradient(x, w)
        else:
            _close([gradient(x, w)], [wanted])
