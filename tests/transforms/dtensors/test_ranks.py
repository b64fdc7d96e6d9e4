"""A function as the code of one rank: its arguments and results as global tensors of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import shardfn as sf
from shardfn.capture.shard_map import axis_names
from shardfn.runtime import Request
from shardfn.runtime.cache import counts
from shardfn.simulated import SimulatedTensor
from shardfn.transforms.dtensors._outside import entering, leaving
from shardfn.transforms.dtensors._ranks import OnRanks, on_ranks
from tests.compat.dynamo.test_shells import Scaled
from tests.support.stages.rank_code import ops

X = torch.ones(6, 2, 4)  # one element of dim 0 for each of six ranks


def inlined(fn: Any, placed: tuple[str, ...], *args: Any) -> tuple[Any, list[str]]:
    """The texts of the results, and the ops."""
    kinds: list[Any] = []
    with sf.fake_world(6):
        mesh = sf.make_mesh((2, 3), ("dp", "tp"))
        with axis_names.scope(mesh, "cpu") as here:
            code = OnRanks("f", (fn,), mesh, placed)

            def run(*xs: torch.Tensor) -> Any:
                out, said = code.inline(*xs)
                kinds.append(said)
                return out

            found = ops(run, *args)
            assert here.manual == (), "the axes are left again"
    return kinds[0], found


def test_a_plain_tensor_is_the_ranks_own() -> None:
    shapes = []
    fn = lambda x: shapes.append(x.shape) or x * 2
    kinds, found = inlined(fn, ("",), X)
    assert shapes == [(2, 4)] and kinds == ("",)
    assert found == [
        "prim_to_local dp:2=0,tp:3=0 -> [1, 2, 4]",
        "squeeze 0 -> [2, 4]",
        "mul 2 -> [2, 4]",
        "unsqueeze 0 -> [1, 2, 4]",
        "prim_from_local dp:2=0,tp:3=0 -> [6, 2, 4]",
        "prim_redistribute dp,tp;; -> [6, 2, 4]",
    ]


def test_a_dtensor_is_global() -> None:
    _, found = inlined(lambda d: d.sum(), ("dp=S1,tp=R",), X)
    assert found[0] == "prim_redistribute ;dp; -> [6, 2, 4]"


def test_constants_and_trees_stay() -> None:
    code = lambda d: {"x": d["x"] + d["n"], "n": d["n"]}
    with sf.fake_world(6):
        mesh = sf.make_mesh((6,), ("dp",))
        with axis_names.scope(mesh, "cpu"):
            on = OnRanks("f", (code,), mesh, ("", ""))
            out = []
            run = lambda x: out.append(on.inline({"n": 3, "x": x})) or x
            ops(run, X)
    ((result, kinds),) = out
    assert result["n"] == 3 and result["x"].shape == X.shape
    assert kinds == ("", "")


def test_a_tensor_that_holds_others_enters_by_its_parts() -> None:
    seen: list[Any] = []

    def code(x: Any) -> Any:
        seen.append(x)
        return x

    with sf.fake_world(6):
        mesh = sf.make_mesh((6,), ("dp",))
        with axis_names.scope(mesh, "cpu"):
            on = OnRanks("f", (code,), mesh, ("",))
            out: list[Any] = []
            run = lambda x, s: out.append(on.inline(Scaled(x, s, "note"))[0]) or x
            ops(run, X, torch.ones(6, 1))
    assert seen[0].shape == (2, 4) and seen[0].note == "note"
    assert seen[0].data_.shape == (2, 4) and seen[0].scale.shape == (1,)
    assert out[0].shape == X.shape and out[0].data_.shape == X.shape


def test_a_request_for_ranks_shares_its_clearing_with_the_first() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        asks = Request("f", torch.sin, torch.sin)
        made = on_ranks(asks, mesh, ("",), has_own_sizes=True, layouts=())
    assert made.mesh is mesh and made.needs_mesh and made.has_own_sizes
    assert made.rank == () and made.differentiated is None
    assert (made.around.entering, made.around.leaving) == (entering, leaving)
    assert made.store is not asks.store and made.store.kin is asks.store.kin
    assert {asks.store, made.store} <= set(made.store.kin)


F64 = torch.float64
OWN = torch.arange(12.0, dtype=F64).view(4, 3).sin()


def close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_gradients_go_back_to_arguments_and_to_what_the_code_closes_over() -> None:
    bias = torch.arange(3.0, dtype=F64).requires_grad_()
    plain = OWN.clone().requires_grad_()
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        w = distribute_tensor(OWN.T @ OWN, mesh, [Shard(0)]).requires_grad_()

        def loss(w: Any, x: Any) -> Any:
            y = DTensor.from_local(x + bias, mesh, [Replicate()]) @ w
            return (y.full_tensor() - x.detach()).square().mean()

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
        with pytest.raises(sf.ShardError, match="its graph is freed"):
            once.backward()
        with pytest.raises(sf.ShardError, match="its backward is differentiated"):
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
        with pytest.raises(sf.TreeError, match="a function that closes over the module"):
            sf.jit(call, backend="aten")(net, OWN)
        sf.jit(call, static_argnums=0, backend="aten")(net, OWN).backward()
        assert net.weight.grad.placements == (Shard(0),)
