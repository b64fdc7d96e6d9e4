"""torch.func.functional_call inside of functions: a module with other tensors than its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call
from torch.testing import assert_close

import shardfn as sf
from shardfn import P

MESHES = {(3,): ("dp",), (2, 2): ("dp", "tp")}


class Net(nn.Module):
    """Two layers with one weight, a buffer, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)
        self.again = nn.Linear(5, 7)
        self.again.weight = self.up.weight
        self.drop = nn.Dropout(0.5)
        self.register_buffer("scale", torch.full((5,), 3.0))
        self.double()

    def forward(self, x: torch.Tensor, *, power: int = 1) -> torch.Tensor:
        h = self.drop(torch.tanh(self.up(x)))
        return self.again(self.down(h) * self.scale) ** power


def _params(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: 1.5 * p.detach() for name, p in net.named_parameters()}


def _loss(net: nn.Module) -> Any:
    return lambda p, x: functional_call(net, p, (x,), {"power": 2}).sum()


X = torch.randn(4, 5, generator=torch.Generator().manual_seed(1)).double()


def test_it_is_torchs_under_every_derivative() -> None:
    net = Net().eval()
    params, loss = _params(net), _loss(net)
    for ours, torchs in (
        (sf.jit, lambda fn: fn),
        (sf.grad, torch.func.grad),
        (lambda fn: sf.jit(sf.grad(fn)), torch.func.grad),
        (lambda fn: sf.jacfwd(sf.grad(fn, 1), 1), lambda f: torch.func.hessian(f, 1)),
        (
            lambda fn: sf.vmap(sf.grad(fn), (None, 0)),
            lambda fn: torch.func.vmap(torch.func.grad(fn), (None, 0)),
        ),
    ):
        got, wanted = ours(loss)(params, X), torchs(loss)(params, X)
        assert_close(got, wanted)
    assert net.up.weight is net.again.weight
    assert not torch.equal(net.up.weight, params["up.weight"])


def test_missing_tensors_are_the_modules_own() -> None:
    net = Net().eval()
    given = {"down.weight": _params(net)["down.weight"]}
    with torch.no_grad():
        got = sf.jit(_loss(net), backend="aten")(given, X)
        assert_close(got, _loss(net)(given, X))
        net.scale.mul_(2)
        got = sf.jit(_loss(net), backend="aten")(given, X)
        assert_close(got, _loss(net)(given, X))


def test_its_mode_is_part_of_the_signature() -> None:
    net = Net().eval()
    fn, params = sf.jit(_loss(net), backend="aten"), _params(net)
    wanted = _loss(net)(params, X)
    assert_close(fn(params, X), wanted)
    net.train()
    assert not torch.allclose(fn(params, X), wanted)
    assert "closed-over net._modules['drop'].training: True, was False" in fn.explain_retrace()
    net.eval()
    assert_close(fn(params, X), wanted)


def _in_shard(shape: tuple[int, ...]) -> None:
    net = Net().eval()
    params, loss = _params(net), _loss(net)
    placements = {name: P() for name in params}
    placements["down.weight"] = P("dp")
    mesh = sf.make_mesh(shape, MESHES[shape])
    step = sf.shard(sf.grad(loss), mesh, (placements, P("dp")), backend="aten")
    got = step(params, X)
    assert_close(sf.full(got), torch.func.grad(loss)(params, X))
    bucketed = sf.shard(sf.bucketed_grad(loss), mesh, (placements, P("dp")))
    _, got = bucketed(params, X)
    assert_close(sf.full(got), torch.func.grad(loss)(params, X))


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_in_a_sharded_step(shape: tuple[int, ...]) -> None:
    with sf.fake_world(torch.Size(shape).numel()):
        _in_shard(shape)


def test_on_real_ranks() -> None:
    run_ranks(3, _in_shard, (3,))


def _parallel_gradients() -> Any:
    """Gradients of a module's own DTensors, and how they are placed."""
    mesh = sf.make_mesh((2,), ("tp",))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 5)).double()
    fn = lambda p, x: functional_call(net, p, (x,)).square().sum()
    wanted = torch.func.grad(fn)({k: p.detach() for k, p in net.named_parameters()}, X)
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    params = {name: p.detach() for name, p in net.named_parameters()}
    got = sf.jit(sf.grad(fn), backend="aten")(params, X)
    placements = {name: p.placements for name, p in params.items()}
    assert {name: g.placements for name, g in got.items()} == placements
    assert_close({k: g.full_tensor() for k, g in got.items()}, wanted)
    return placements["0.weight"], placements["2.bias"]


def test_s2_1_gradients_of_the_parameters_of_parallelize_module() -> None:
    with sf.fake_world(2):
        assert _parallel_gradients() == ((Shard(0),), (Replicate(),))
    run_ranks(2, _parallel_gradients)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda net, p, x: functional_call(net, {"ups": x}, (x,), strict=True),
            "Unexpected key(s): 'ups'",
        ),
        (
            lambda net, p, x: (setattr(net, "up", x), net(x))[1],
            "cannot assign 'torch.DoubleTensor' as child module 'up'",
        ),
    ],
    ids=["a name", "an attribute that is a submodule"],
)
def test_what_is_refused(call: Any, said: str) -> None:
    net = Net().eval()
    with pytest.raises((RuntimeError, TypeError)) as caught:
        sf.jit(lambda p, x: call(net, p, x), backend="aten")(_params(net), X)
    assert said in str(caught.value)


def test_its_own_parameters_have_gradients() -> None:
    net = Net().eval()
    call = lambda x: functional_call(net, dict(net.named_parameters()), x).sum()
    for fn in (call, sf.jit(call, backend="aten")):
        fn(X).backward()
    doubled = {name: p.grad for name, p in net.named_parameters()}
    net.zero_grad()
    call(X).backward()
    for name, p in net.named_parameters():
        assert_close(doubled[name], 2 * p.grad)
