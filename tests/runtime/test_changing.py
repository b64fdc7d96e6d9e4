"""Tensors that hold others, between two calls: other contexts, other classes, gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from worlds import SimulatedTensor

import shardfn as sf
from shardfn import P, _tree
from tests.transforms.test_flattened import A, B, Pair, staged


class Shifted(torch.Tensor):
    """A tensor with a number beside it, which every op adds."""

    @staticmethod
    def __new__(cls, held: torch.Tensor, told: dict[str, Any]) -> Shifted:
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

    def __init__(self, held: torch.Tensor, told: dict[str, Any]) -> None:
        self.held, self.told = held, told

    def __tensor_flatten__(self) -> Any:
        return ["held"], self.told

    @staticmethod
    def __tensor_unflatten__(held: Any, told: Any, size: Any, stride: Any) -> Shifted:
        return Shifted(held["held"], told)

    def __repr__(self, **_: Any) -> str:
        return f"Shifted({self.held}, {self.told})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.view.default, torch.ops.aten.detach.default):
            return Shifted(func(args[0].held, *args[1:]), args[0].told)
        told = [x.told["by"] for x in args if isinstance(x, Shifted)]
        plain = [x.held if isinstance(x, Shifted) else x for x in args]
        return func(*plain, **(kwargs or {})) + told[0]


ONES = torch.ones(2)


def test_what_an_argument_says_of_itself_is_read_at_each_call() -> None:
    fn = staged(lambda x: x * 2)
    x = Shifted(ONES, {"by": 1})
    torch.testing.assert_close(fn(x), ONES * 3)
    x.told["by"] = 5
    torch.testing.assert_close(fn(x), ONES * 7)
    whole = staged(lambda x: torch.full((2,), x.told["by"]))
    assert whole(Shifted(ONES, {"by": 1})).dtype == torch.int64
    assert whole(Shifted(ONES, {"by": 1.0})).dtype == torch.float32
    compiled = fn.compile(x)
    x.told["by"] = 6
    with pytest.raises(
        sf.TreeError, match="the arguments differ from those that the program was compiled for"
    ):
        compiled(x)


def test_what_a_closed_over_one_says_is_read_at_each_call() -> None:
    x = Shifted(ONES, {"by": 1})
    fn = staged(lambda y: y + x * 2)
    torch.testing.assert_close(fn(ONES), ONES * 4)
    x.told["by"] = 5
    torch.testing.assert_close(fn(ONES), ONES * 8)
    x.held = ONES * 3
    torch.testing.assert_close(fn(ONES), ONES * 12)


def test_a_result_tells_a_dict_of_its_own() -> None:
    fn = staged(lambda x: Shifted(x * 2, {"by": 1}))
    fn(ONES).told["by"] = 5
    assert fn(ONES).told == {"by": 1}


def test_a_dtensor_of_pairs_after_a_plain_one() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        fn = staged(lambda x: x * 2)
        plain = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
        pairs = distribute_tensor(Pair(A[:4], B[:4]), mesh, [Shard(0)])
        for _ in range(2):
            assert type(fn(plain)) is type(plain)
            out = fn(pairs)
            assert isinstance(out, Pair)
            torch.testing.assert_close(sf.full(out).b, B[:4] * 2)


def lost(p: Any) -> Callable[[], Any]:
    return lambda: staged(lambda x: x @ p.T)(A)


def of_a_module() -> Any:
    module = torch.nn.Linear(3, 5, bias=False)
    module.weight = torch.nn.Parameter(Pair(A, B))
    return staged(lambda x: x @ module.weight.T)(A)


def afterwards() -> Any:
    p = Pair(A, B)
    fn = staged(lambda x: x @ p.T)
    fn(A)
    p.requires_grad_()
    return fn(A)


@pytest.mark.parametrize("call", [lost(Pair(A, B).requires_grad_()), of_a_module, afterwards])
def test_the_gradient_of_a_closed_over_one_is_not_lost(call: Any) -> None:
    with pytest.raises(sf.CaptureError, match="a Pair, which requires grad"):
        call()


class Renaming(Pair):
    """A pair whose class reads calls: sin means cos."""

    @staticmethod
    def __tensor_unflatten__(held: Any, meta: Any, size: Any, stride: Any) -> Any:
        return Renaming(held["a"], held["b"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.cos if func in (torch.sin, torch.Tensor.sin) else func
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_class_that_reads_calls() -> None:
    torch.testing.assert_close(staged(torch.sin)(Renaming(A, B)).b, B.cos())
    for fn in (sf.grad(lambda x: x.sin().sum()), sf.vmap(torch.sin)):
        with pytest.raises(sf.CaptureError, match="has a __torch_function__"):
            fn(Renaming(A, B))


REFUSED = {
    "the gradient of a DTensor of pairs": (
        lambda mesh: staged(lambda x: x * 2)(
            distribute_tensor(Pair(A, B), mesh, [Shard(0)]).requires_grad_()
        ),
        "the argument requires grad",
    ),
    "each rank's own pair, as one tensor": (
        lambda mesh: staged(lambda x: x * 2)(SimulatedTensor([Pair(A, B)] * 2)),
        "the argument holds local tensors of all ranks, each a Pair",
    ),
    "a DTensor of pairs, closed over": (
        lambda mesh: closed(distribute_tensor(Pair(A, B), mesh, [Shard(0)]), mesh),
        "the function closes over a DTensor",
    ),
    "a DTensor of tensors that differ by rank": (
        lambda mesh: staged(lambda x: x * 2)(
            DTensor.from_local(
                SimulatedTensor([Shifted(ONES, {"by": k}) for k in range(2)]), mesh, [Shard(0)]
            )
        ),
        "differs between ranks",
    ),
    "a pair of a DTensor and a tensor in the code of one rank": (
        lambda mesh: staged(lambda x, p: (DTensor.from_local(x, mesh, [Shard(0)]), p))(
            A, Pair(sf.distribute(A, mesh, P("dp")), B)
        ),
        "argument p.a: the argument is a Pair of DTensors and other tensors, in code of one rank",
    ),
    "a tensor in the context of a class": (
        lambda mesh: staged(lambda x: Shifted(x * 1, {"by": x * 2}))(ONES),
        "__tensor_flatten__ has a tensor in its context",
    ),
    "the class of a followed one": (
        lambda mesh: sf.grad(lambda x: ((x * 2) if isinstance(x, Pair) else x * 3).sum())(
            Pair(A, B)
        ),
        "the function reads its .__class__",
    ),
}


def closed(d: Any, mesh: Any) -> Any:
    return sf.shard(lambda x: x + d, mesh, P("dp"))(A)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, text = REFUSED[name]
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        with pytest.raises(sf.ShardError, match=text):
            call(mesh)


def test_a_parameter_of_a_class_of_its_own_is_a_plain_one() -> None:
    class Weight(torch.nn.Parameter):
        pass

    fn = staged(lambda x: x * 2)
    with torch.no_grad():
        fn(Weight(A))
        assert fn(Weight(A[:2].contiguous())).shape == (2, 3)
    assert "f64[2, 3], was f64[5, 3]" in fn.explain_retrace()


def test_threads_learn_a_class_together() -> None:
    kinds = [type("Other", (Pair,), {}) for _ in range(20)]
    failed: list[BaseException] = []

    def learn() -> None:
        try:
            for kind in kinds:
                _tree.learn(kind(A, B))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=learn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def _on_a_part() -> Any:
    world = sf.make_mesh((3,), ("all",))
    part = DeviceMesh("cpu", [1, 2], mesh_dim_names=("dp",))
    if world.get_rank() == 0:
        with pytest.raises(sf.PlacementError, match="rank 0 is not in the mesh"):
            sf.shard(lambda x: x * 2, part, P("dp"))(A)
        return None
    out = sf.shard(lambda x: x.sum(0), part, P("dp"), backend="aten")(A)
    return out.full_tensor()


def test_a_mesh_over_a_part_of_real_ranks() -> None:
    nothing, *found = run_ranks(3, _on_a_part)
    assert nothing is None
    for out in found:
        torch.testing.assert_close(out, A.sum(0))


def test_a_mesh_that_is_entered_inside_is_the_mesh_of_transforms_inside() -> None:
    with sf.fake_world(4):
        every = sf.make_mesh((4,), ("dp",))
        part = DeviceMesh("cpu", [1, 3], mesh_dim_names=("dp",))
        x = torch.arange(8.0).view(4, 2)

        def fn(x: Any) -> Any:
            with sf.use_mesh(part):
                return sf.shard_map(lambda z: sf.psum(z, "dp"), None, P("dp"), P())(x)

        out = sf.jit(fn, backend="aten")(x)
        torch.testing.assert_close(sf.full(out), x[:2] + x[2:])
        for call in (lambda: sf.shard(fn, every)(x), lambda: under(every, fn, x)):
            with pytest.raises(sf.PlacementError):
                call()


def under(mesh: Any, fn: Any, x: Any) -> Any:
    with sf.use_mesh(mesh):
        return sf.jit(fn, backend="aten")(x)
