"""S2: what PyTorch's own tests of local_map try, next to one device: in a simulated world of 2 and
of 8, and on 2 Gloo processes. Each mistake is an error of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.testing import assert_close
from worlds import SimulatedTensor

import shardfn as sf

R, ROWS, COLUMNS = [Replicate()], [Shard(0)], [Shard(1)]
X = torch.arange(48.0, dtype=torch.float64).reshape(8, 6).sin()
W = torch.arange(40.0, dtype=torch.float64).reshape(8, 5).cos()
A = X.t().contiguous()  # (6, 8)


def staged(fn: Callable[..., Any], *args: Any) -> Any:
    return sf.jit(fn, backend="aten")(*args)


def full(x: Any) -> Any:
    """A result of the function as one device has it; of a simulated world that of rank 0."""
    if isinstance(x, DTensor):
        return full(x.full_tensor())
    return x.shards[0] if isinstance(x, SimulatedTensor) else x


def close(got: Any, wanted: Any) -> None:
    assert_close(full(got), wanted, rtol=1e-12, atol=1e-12)


def product(mesh: Any, a: Any, b: Any) -> Any:
    return functional.all_reduce(a @ b, "sum", mesh).wait()


decorated = local_map(out_placements=R, in_placements=(None, COLUMNS, ROWS))(product)


def factors(mesh: Any, a: Any = COLUMNS, b: Any = ROWS) -> Any:
    return distribute_tensor(A, mesh, a), distribute_tensor(W, mesh, b)


def a_reduction_by_hand_is_awaited(mesh: Any) -> None:
    a, w = factors(mesh)
    mapped = sf.jit(decorated, backend="aten")
    kinds = [c.kind for c in mapped.lower(mesh, a, w).collectives]
    assert kinds == ["all_reduce"]
    out = mapped(mesh, a, w)
    assert out.placements == (Replicate(),)
    close(out, A @ W)
    by_method = lambda x: functional.all_reduce(x, "max", mesh).wait()
    close(staged(by_method, X), X)


def arguments_that_are_moved(mesh: Any) -> None:
    moved = local_map(
        product,
        out_placements=R,
        in_placements=(None, COLUMNS, ROWS),
        device_mesh=mesh,
        redistribute_inputs=True,
    )
    every = factors(mesh, R, COLUMNS)
    close(staged(lambda a, w: moved(mesh, a, w), *every), A @ W)


def placements_of_arguments_are_their_own(mesh: Any) -> None:
    args = distribute_tensor(X, mesh, ROWS), distribute_tensor(A, mesh, R)
    out = staged(local_map(torch.mm, out_placements=ROWS), *args)
    assert out.placements == (Shard(0),)
    close(out, X @ A)


def numbers_and_trees(mesh: Any) -> None:
    x = distribute_tensor(X, mesh, ROWS)
    scaled = local_map(torch.mul, out_placements=ROWS, in_placements=(ROWS, None))
    close(staged(scaled, x, 2.0), 2 * X)

    def tree(xs: Any) -> Any:
        x = xs["x"][0]
        return {"twice": 2 * x, "rest": [x.sum(0), len(x), x.mean(0)]}

    out_placements = (ROWS, [Partial()], None, [Partial("avg")])
    mapped = local_map(tree, out_placements=out_placements, in_placements=(ROWS,))
    out = staged(lambda x: mapped({"x": [x]}), x)
    close(out["twice"], 2 * X)
    close(out["rest"][0], X.sum(0))
    assert out["rest"][1] == 8 // mesh.size()
    close(out["rest"][2], X.mean(0))


def plain_tensors_stay_plain(mesh: Any) -> None:
    for placements in ((None, None), (R, ROWS)):
        mapped = local_map(
            torch.mm, out_placements=ROWS, in_placements=placements, device_mesh=mesh
        )
        out = staged(mapped, X, A)
        assert not isinstance(out, DTensor)
        close(out, X @ A)


def gradients(mesh: Any) -> None:
    """With and without the placements of gradients, which torch needs."""
    wanted = torch.func.grad(lambda x, a: (x @ a).square().sum(), (0, 1))(X, A)
    for own, said in ((ROWS, None), (R, (ROWS, [Partial()]))):
        mapped = local_map(
            torch.mm,
            out_placements=ROWS,
            in_placements=(ROWS, R),
            in_grad_placements=said,
            device_mesh=mesh,
            redistribute_inputs=True,
        )
        loss = lambda x, a, f=mapped: f(x, a).square().sum().full_tensor()
        args = distribute_tensor(X, mesh, own), distribute_tensor(A, mesh, R)
        found = staged(sf.grad(loss, argnums=(0, 1)), *args)
        for got, gradient in zip(found, wanted, strict=True):
            close(got, gradient)


CASES = (
    a_reduction_by_hand_is_awaited,
    arguments_that_are_moved,
    placements_of_arguments_are_their_own,
    numbers_and_trees,
    plain_tensors_stay_plain,
    gradients,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_s2_a_case_of_local_map(case: Any) -> None:
    ranks = 8 if case in CASES[:2] else 2
    with sf.fake_world(ranks):
        case(sf.make_mesh((ranks,), ("dp",)))


def _on_a_rank() -> None:
    mesh = sf.make_mesh((2,), ("dp",))
    for case in CASES:
        case(mesh)


def test_s2_local_map_on_real_ranks() -> None:
    run_ranks(2, _on_a_rank)


one = lambda fn, out, ins, **options: local_map(
    fn, out_placements=out, in_placements=ins, **options
)
double = lambda x: 2 * x
MISTAKES: dict[str, tuple[Callable[..., Any], str, str]] = {
    "another length of in_placements": (
        one(double, ROWS, (ROWS, ROWS)),
        "in_placements must have as many entries as the call has arguments",
        "in_placements=([Shard(0)], None)",
    ),
    "another length of out_placements": (
        one(lambda x: (x, x), ROWS, (ROWS,)),
        "out_placements must have as many entries as the function has results",
        "out_placements=([Shard(0)], None)",
    ),
    "no placements of a DTensor": (
        one(double, ROWS, (None,)),
        "in_placements has None where the argument is a DTensor",
        "in_placements=None, which accepts every argument as it is placed",
    ),
    "no placements of its gradient": (
        one(double, ROWS, (ROWS,), in_grad_placements=(None,)),
        "in_grad_placements has None where the argument is a DTensor",
        "in_grad_placements=None",
    ),
    "placements of fewer gradients": (
        one(double, ROWS, (ROWS,), in_grad_placements=()),
        "in_grad_placements must have as many entries as the call has arguments",
        "in_grad_placements=([Shard(0)], [Partial()])",
    ),
    "other placements": (
        one(double, ROWS, (COLUMNS,)),
        "the placements of a DTensor differ from in_placements",
        "redistribute_inputs=True",
    ),
    "placements of a number": (
        one(lambda x: 3, ROWS, (ROWS,)),
        "placements for a value that is not a tensor",
        "None in place of these placements",
    ),
    "a placement without its list": (
        one(double, ROWS, (Shard(0),)),
        "a single placement in place of a list of placements",
        "out_placements=([Shard(0)],)",
    ),
    "a placement in place of the arguments' lists": (
        one(double, ROWS, Shard(0)),
        "a single placement in place of a list of placements",
        "out_placements=([Shard(0)],)",
    ),
    "a DTensor returned": (
        lambda x: one(lambda y: x, ROWS, (ROWS,))(x),
        "the mapped function returns a DTensor, and must return a plain tensor",
        "x.to_local() of the DTensor x",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_of_local_map_is_named_with_what_to_do(case: str) -> None:
    fn, problem, fix = MISTAKES[case]
    loss = lambda x: fn(x).sum().full_tensor()
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        for each in (fn, sf.grad(loss)):
            with pytest.raises(sf.CaptureError) as caught:
                staged(each, distribute_tensor(X, mesh, ROWS))
            text = str(caught.value)
            assert f": local_map: {problem}\n" in text
            assert fix in text.split("\n  try: ")[1]


def test_a_placement_without_its_list_is_refused() -> None:
    fn = one(double, (Shard(0),), (ROWS,))
    with sf.fake_world(2):
        x = distribute_tensor(X, sf.make_mesh((2,), ("dp",)), ROWS)
        with pytest.raises(sf.PlacementError, match="placements: got Shard") as caught:
            staged(fn, x)
    assert str(caught.value).endswith("try: [Shard(0)]")


def test_a_value_that_it_reads_is_named_not_the_map() -> None:
    with sf.fake_world(2), pytest.raises(sf.CaptureError) as caught:
        mesh = sf.make_mesh((2,), ("dp",))
        equal = one(lambda x: torch.equal(x, x), None, (ROWS,))
        staged(equal, distribute_tensor(X, mesh, ROWS))
    assert "torch.equal reads a tensor's value" in str(caught.value)
