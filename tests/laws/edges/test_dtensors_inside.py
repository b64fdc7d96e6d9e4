"""DTensors and other tensor classes inside of a function: what is not read as code of one rank
is refused by name, and no traced value leaves.
"""

from __future__ import annotations

import concurrent.futures
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.tensor as dt
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves
from worlds import simulated

import shardfn as sf
from shardfn import P

X = torch.arange(8.0, dtype=torch.float64).reshape(4, 2)
INSIDE = "the function makes a DTensor, or reads the local tensor of one"


class Named(torch.Tensor):
    """A tensor with a class of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Weight(torch.nn.Parameter):
    """A parameter under another name."""


class Redistributing(torch.nn.Module):
    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            DTensor.from_local(x, self.mesh, [Replicate()])
            .redistribute(self.mesh, [Shard(0)])
            .to_local()
        )


class Distributing(Redistributing):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(x, self.mesh, [Shard(0)]).to_local()


class Factory(Redistributing):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + dt.ones(1, device_mesh=self.mesh, placements=[Replicate()]).to_local()


def members(mesh: Any) -> dict[str, tuple[Callable[[Any], Any], str | None]]:
    """Functions of a tensor that use tensor classes and ranks, and what is said of each that no
    transform takes. The others are right in some (tests/dtensors), and refused in the rest.
    """
    placed = sf.distribute(X, mesh, P("dp"))
    named = X.clone().as_subclass(Named)
    local = lambda x, p: DTensor.from_local(x, mesh, [p])
    doubled = local_map(
        lambda x: 2 * x, out_placements=[Shard(0)], in_placements=([Shard(0)],), device_mesh=mesh
    )
    modules = {
        m.__name__: sf.functionalize(m(mesh)) for m in (Redistributing, Distributing, Factory)
    }
    of_modules = {
        name: (lambda x, m=m: m[0](m[1], m[2], x)[0], INSIDE) for name, m in modules.items()
    }
    factories = {
        f"tensor.{f.__name__}": (
            lambda x, f=f: x + f(4, 2, device_mesh=mesh, placements=[Replicate()]).to_local(),
            INSIDE if f in (dt.rand, dt.randn) else None,
        )
        for f in (dt.zeros, dt.ones, dt.empty, dt.rand, dt.randn)
    }
    return {
        "from_local, redistribute, to_local": (
            lambda x: local(x, Replicate()).redistribute(mesh, [Shard(0)]).to_local(),
            None,
        ),
        "from_local, full_tensor": (lambda x: local(x, Shard(0)).full_tensor(), None),
        "from_local, returned": (lambda x: local(x, Replicate()), None),
        "from_local, not used": (lambda x: (local(x, Replicate()), x)[1], None),
        "distribute_tensor": (lambda x: distribute_tensor(x, mesh, [Shard(0)]).to_local(), None),
        "tensor.full": (lambda x: x + dt.full((4, 2), 1.0, device_mesh=mesh).to_local(), None),
        "local_map": (doubled, None),
        "sf.from_local": (lambda x: sf.full(sf.from_local(x, mesh, [Shard(0)])), INSIDE),
        "sf.distribute": (lambda x: sf.full(sf.distribute(x, mesh, P("dp"))), INSIDE),
        "a closed-over DTensor": (lambda x: x + placed.full_tensor(), None),
        "a closed-over DTensor, returned": (lambda x: (x, placed), None),
        "redistribute of an argument": (lambda x: x.redistribute(mesh, [Replicate()]), None),
        "to_local of an argument": (lambda x: x.to_local(), None),
        "a subclass": (lambda x: x.as_subclass(Named), "the function makes a Named"),
        "a subclass, called": (lambda x: Named(x), "the function makes a Named"),
        "a subclass, in a tree": (
            lambda x: {"a": (x, x.as_subclass(Named))},
            "the function makes a Named",
        ),
        "a subclass, closed over": (lambda x: (x, named), "the function closes over a Named"),
        "the rank": (lambda x: x + mesh.get_local_rank(), None),
        "the coordinate": (lambda x: x + mesh.get_coordinate()[0], None),
        "dist.all_reduce": (lambda x: (dist.all_reduce(y := x.clone()), y)[1], None),
        "all_reduce over a group": (
            lambda x: functional.all_reduce(x, "sum", mesh.get_group()),
            None,
        ),
        **factories,
        **of_modules,
    }


def outer(mesh: Any) -> dict[str, Callable[[Any], Any]]:
    """What captures a function."""
    rows = P("dp")
    total = lambda fn: (
        lambda x: sum(t.sum() for t in tree_leaves(fn(x)) if isinstance(t, torch.Tensor))
    )
    per_rank = lambda fn: sf.shard_map(fn, mesh, (rows,), rows)
    return {
        "jit": lambda fn: sf.jit(fn, backend="aten")(X),
        "jit of a DTensor": lambda fn: sf.jit(fn, backend="aten")(sf.distribute(X, mesh, rows)),
        "shard": lambda fn: sf.shard(fn, mesh, (rows,), backend="aten")(X),
        "shard_map": lambda fn: per_rank(fn)(X),
        "jit of shard_map": lambda fn: sf.jit(per_rank(fn), backend="aten")(X),
        "grad": lambda fn: sf.grad(total(fn))(X),
        "shard of bucketed_grad": lambda fn: sf.shard(
            sf.bucketed_grad(total(fn)), mesh, (rows,), backend="aten"
        )(X),
        "vmap": lambda fn: sf.vmap(lambda row: fn(row.expand(4, 2)))(X),
        "jvp": lambda fn: sf.jvp(fn, (X,), (X,)),
        "scan": lambda fn: sf.scan(lambda c, _: (fn(c), None), X, None, length=2),
        "checkpoint": lambda fn: sf.grad(total(sf.checkpoint(fn)))(X),
        "cond": lambda fn: sf.cond(X.sum() > 0, fn, lambda x: x, X),
    }


with sf.fake_world(2):
    MEMBERS = list(members(sf.make_mesh((2,), ("dp",))))
    OUTER = list(outer(None))


def tried(member: str, around: str) -> None:
    """A function is refused by name, with something to try, or has a result without traced
    values; its captures leave torch as it was.
    """
    with simulated(dp=2) as mesh:
        fn, said = members(mesh)[member]
        try:
            out = outer(mesh)[around](fn)
        except sf.ShardError as error:
            text = str(error)
            assert said is None or said in text.splitlines()[0], text
            assert error.fix and f"\n  try: {error.fix}" in text
        except RuntimeError as error:  # a mistake of the function's, as torch says it
            assert said is None and "raised inside" in error.__notes__[0]
        else:
            assert said is None, f"{member} in {around} is not refused"
            assert not any(isinstance(x, FakeTensor) for x in tree_leaves(out))
        made = DTensor.from_local(X, mesh, [Replicate()])
        assert isinstance(made, DTensor) and torch.equal(made.full_tensor(), X), (
            "outside, torch makes them as before"
        )


@given(st.sampled_from(MEMBERS), st.sampled_from(OUTER))
@examples(45)
def test_what_is_no_plain_tensor_inside_has_a_result_or_is_refused_by_name(
    member: str, around: str
) -> None:
    tried(member, around)


@pytest.mark.parametrize("around", ["jit", "shard", "shard_map", "grad", "vmap", "scan"])
@pytest.mark.parametrize("member", ["from_local, redistribute, to_local", "from_local, returned"])
def test_the_seen_ones_are_tried(member: str, around: str) -> None:
    tried(member, around)


def test_the_error_has_the_line_of_the_user() -> None:
    with simulated(dp=2) as mesh:

        def fn(x: torch.Tensor) -> torch.Tensor:
            made = dt.DTensor(x, mesh, [dt.Shard(0)], requires_grad=False)
            return x + made.to_local()

        with pytest.raises(sf.CaptureError) as error:
            sf.shard_map(fn, mesh, (P("dp"),), P("dp"))(X)
    line = inspect.getsourcelines(fn)[1] + 1
    assert str(error.value).splitlines()[:2] == [
        f"shard_map(fn): {INSIDE}",
        f"  at: {__file__}:{line}",
    ]
    assert "sf.constrain(x, placements)" in error.value.fix and "sf.psum" in error.value.fix


ARGUMENTS = {
    "a subclass": lambda: X.clone().as_subclass(Named),
    "in a tree": lambda: {"a": [X.clone().as_subclass(Named)]},
}


@pytest.mark.parametrize("around", ["jit", "shard", "grad", "vmap"])
@pytest.mark.parametrize("case", list(ARGUMENTS))
def test_an_argument_of_another_class_is_refused_before_and_after_a_plain_one(
    case: str, around: str
) -> None:
    def loss(x: Any) -> Any:
        return sum((t * t).sum() for t in tree_leaves(x))

    with simulated(dp=2) as mesh:
        fn = {
            "jit": sf.jit(loss, backend="aten"),
            "shard": sf.shard(loss, mesh, backend="aten"),
            "grad": sf.grad(loss),
            "vmap": sf.vmap(loss),
        }[around]
        argument = ARGUMENTS[case]()
        plain = {"a": [X]} if isinstance(argument, dict) else X
        for _ in range(2):
            with pytest.raises(sf.TreeError) as error:
                fn(argument)
            fn(plain)
    path = "x['a'][0]" if isinstance(argument, dict) else "x"
    assert f"argument {path}: a Named, a subclass of torch.Tensor\n" in str(error.value)
    assert error.value.arg_path == path and f"at: {__file__}:" in str(error.value)


RIGHT = {
    "a parameter": lambda: torch.nn.Parameter(X.clone(), requires_grad=False),
    "a kind of parameter": lambda: Weight(X.clone(), requires_grad=False),
    "a buffer": lambda: torch.nn.Buffer(X.clone()),
    "a DTensor": lambda: sf.distribute(X, sf.make_mesh((2,), ("dp",)), P("dp")),
}


@pytest.mark.parametrize("case", list(RIGHT))
def test_parameters_buffers_and_dtensors_are_arguments_like_any(case: str) -> None:
    fn = lambda x: {"a": x * 2, "kind": isinstance(x, DTensor), "asks": hasattr(x, "placements")}
    with simulated(dp=2) as mesh:
        kinds = {
            sf.jit(fn, backend="aten"): case == "a DTensor",
            sf.jit(fn): case == "a DTensor",
            # inside, every tensor is a plain global one
            sf.shard(fn, mesh, backend="aten"): False,
        }
        for run, is_dtensor in kinds.items():
            out = run(RIGHT[case]())
            assert_close(sf.full(out["a"]), 2 * X)
            assert (out["kind"], out["asks"]) == (is_dtensor, is_dtensor)


def test_sizes_of_a_mesh_and_full_of_a_plain_tensor_stay_right() -> None:
    with simulated(dp=2) as mesh:
        fn = lambda x: sf.full(x) * mesh.size() + dist.get_world_size()
        assert_close(sf.full(sf.shard(fn, mesh, backend="aten")(X)), 2 * X + 2)
        closed = torch.nn.Parameter(X.clone(), requires_grad=False)
        assert_close(sf.jit(lambda x: x + closed, backend="aten")(X), 2 * X)


def test_another_thread_makes_dtensors_while_a_module_is_captured() -> None:
    made: list[Any] = []

    class Asking(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made.append(outside())
            return x * 2

    with simulated(dp=2) as mesh:

        def outside() -> Any:
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                return pool.submit(
                    lambda: type(DTensor.from_local(torch.ones(2), mesh, [Replicate()]))
                ).result()

        fn, params, buffers = sf.functionalize(Asking())
        assert_close(sf.jit(lambda x: fn(params, buffers, x)[0], backend="aten")(X), 2 * X)
    assert made and all(issubclass(kind, DTensor) for kind in made)
