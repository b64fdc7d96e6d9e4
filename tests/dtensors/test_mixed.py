"""DTensor programs under shardfn's transforms, as arguments and results, and in `shard` and
`shard_map`: in a simulated world of two ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stagings import counts
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing import assert_close
from worlds import SimulatedTensor

import shardfn as sf
from shardfn import P

R, S = [Replicate()], [Shard(0)]
ROWS = [torch.arange(8.0).view(4, 2) + 10 * k for k in range(2)]
X = torch.cat(ROWS)


@pytest.fixture
def mesh() -> Iterator[Any]:
    with sf.fake_world(2):
        yield sf.make_mesh((2,), ("dp",))


def local() -> Any:
    """Each rank's own tensor."""
    return SimulatedTensor(ROWS)


def shards(out: Any) -> Any:
    return out.shards if isinstance(out, SimulatedTensor) else sf.full(out)


def same(got: Any, *wanted: torch.Tensor) -> None:
    assert_close(shards(got), list(wanted))


def test_s2_1_a_dtensor_argument_and_result(mesh: Any) -> None:
    d = distribute_tensor(X, mesh, S)
    out, mine, placements = sf.jit(
        lambda d: (d * 2, d.to_local() + 1, d.placements), backend="aten"
    )(d)
    assert isinstance(out, DTensor)
    assert placements == out.placements == (Shard(0),)
    assert_close(sf.full(out), X * 2)
    same(mine, ROWS[0] + 1, ROWS[1] + 1)


def test_s2_4_equal_placements_and_meshes_never_retrace(mesh: Any) -> None:
    def moved(x: Any, mesh: Any, dim: int) -> Any:
        return DTensor.from_local(x, mesh, [Shard(dim)]).full_tensor()

    fn = sf.jit(moved, backend="aten")
    fn(local(), mesh, 0)
    before = dict(counts)
    again = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    assert again == mesh
    same(fn(local(), again, 0), X, X)
    assert dict(counts) == before
    same(fn(local(), mesh, 1), *[torch.cat(ROWS, 1)] * 2)
    captures, partitions = counts["captures"], counts["partitions"]
    assert (captures, partitions) == (before["captures"] + 1, before["partitions"] + 1)
    fn(local(), again, 1)
    assert counts["captures"] == captures
    d = distribute_tensor(X, again, S)
    both = lambda x, d: moved(x, mesh, 0) + (d * 1).redistribute(mesh, S).full_tensor()
    same(sf.jit(both, backend="aten")(local(), d), X * 2, X * 2)


def test_s2_3_and_s2_5_the_program_of_the_pull_request(mesh: Any) -> None:
    def fn(x: Any) -> Any:
        dt = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
        return dt.redistribute(mesh, [Replicate()]).to_local() + 2

    traced = str(sf.jit(fn).trace(torch.ones(4, 2)))
    names = [
        line.split(" = ")[1].split("(")[0] for line in traced.splitlines() if " = prim_" in line
    ]
    first = names.index("prim_from_local")
    assert names[first : first + 4] == [
        "prim_from_local",
        "prim_redistribute",  # to its own placements: nothing moves
        "prim_redistribute",
        "prim_to_local",
    ]
    lowered = sf.jit(fn).lower(torch.ones(4, 2))
    assert [c.kind for c in lowered.collectives] == ["all_gather"]
    same(sf.jit(fn, backend="aten")(local()), X + 2, X + 2)


def test_s4_a_local_program_has_no_copies_of_dtensors(mesh: Any) -> None:
    def fn(x: Any) -> Any:
        d = DTensor.from_local(x, mesh, S)
        return ((d + 1).sin() * d).to_local()

    ops = [str(n.target) for n in sf.jit(fn).lower(local()).program.graph.nodes]
    assert not [op for op in ops if "detach" in op or "clone" in op or "copy" in op]


def test_a_gradient_of_dtensors_has_their_placements(mesh: Any) -> None:
    loss = lambda d: (d * d * d).sum().full_tensor()
    d = distribute_tensor(X, mesh, S)
    for fn in (sf.jit(sf.grad(loss), backend="aten"), sf.grad(loss)):
        out = fn(d)
        assert out.placements == (Shard(0),)
        assert_close(sf.full(out), 3 * X * X)


def test_bucketed_gradients_of_dtensors_and_local_batches(mesh: Any) -> None:
    def loss(w: Any, x: Any) -> Any:
        return (DTensor.from_local(x, mesh, S) @ w).square().sum().full_tensor()

    w = distribute_tensor(torch.ones(2, 3), mesh, R)
    value, gradient = sf.jit(sf.bucketed_grad(loss), backend="aten")(w, local())
    plain = torch.func.grad_and_value(lambda w: (X @ w).square().sum())
    wanted, expected = plain(torch.ones(2, 3))
    assert_close(sf.full(gradient), wanted)
    same(value, expected, expected)


def test_vmap(mesh: Any) -> None:
    def row(x: Any) -> Any:
        d = DTensor.from_local(x, mesh, S)
        return d.sin().to_local(), d.redistribute(mesh, R).to_local()

    own, every = sf.jit(sf.vmap(row), backend="aten")(local())
    same(own, *[x.sin() for x in ROWS])
    same(every, *[torch.cat(ROWS, 1)] * 2)


def test_vmap_over_a_dim_of_dtensors_that_is_not_sharded(mesh: Any) -> None:
    x = torch.arange(35.0, dtype=torch.float64).view(5, 7).sin()  # 4 and 3 columns
    d = distribute_tensor(x, mesh, [Shard(1)])
    parts = [part.sin() for part in x.chunk(2, 1)]
    by_hand = lambda row: functional.all_reduce(row.to_local().sum(), "sum", mesh)
    loss = lambda row: (row.to_local() ** 2).sum()
    shards = lambda y: y.shards

    def fn(d: Any) -> Any:
        inside = sf.vmap(lambda row: row.sin().to_local())(d)
        turned = sf.vmap(lambda row: row.sin(), out_axes=1)(d).to_local()
        return inside, turned.t(), sf.vmap(by_hand)(d), sf.vmap(sf.grad(loss))(d)

    inside, turned, total, gradient = sf.jit(fn, backend="aten")(d)
    assert_close(shards(inside), parts)
    assert_close(shards(turned), parts)
    assert_close(shards(total), [x.sum(1)] * 2)
    assert_close(gradient.full_tensor(), 2 * x)
    over_columns = lambda d: sf.vmap(loss, in_axes=1)(d)
    with pytest.raises(
        sf.CaptureError, match="the placements of this DTensor are not known at this point"
    ):
        sf.jit(over_columns, backend="aten")(d)


def test_s7_6_hooks_on_a_dtensor_and_on_its_local_tensor(mesh: Any) -> None:
    def loss(d: Any) -> Any:
        y = d.sin()
        y.register_hook(lambda g: 2 * g)
        local = y.to_local()
        local.register_hook(lambda g: g + 1)
        return local.square().sum()

    x = X.double()
    gradient = sf.jit(sf.grad(loss), backend="aten")(distribute_tensor(x, mesh, S))
    wanted = 2 * (2 * x.sin() + 1) * x.cos()
    assert_close(gradient.full_tensor(), wanted)


@pytest.mark.parametrize("wrap", [sf.checkpoint, lambda fn: fn])
def test_checkpoint(mesh: Any, wrap: Any) -> None:
    def inner(x: Any) -> Any:
        return DTensor.from_local(x, mesh, S).sin().full_tensor().square().sum()

    gradient = sf.jit(sf.grad(wrap(inner)), backend="aten")(local())
    # all ranks have one loss, which counts once
    wanted = [2 * x.sin() * x.cos() for x in ROWS]
    assert_close(gradient.shards, wanted)


def test_torchs_checkpoint_of_a_block_between_others(mesh: Any) -> None:
    w = distribute_tensor(X.T @ X, mesh, [Shard(1)]).requires_grad_()

    def block(x: Any) -> Any:
        y = DTensor.from_local(x, mesh, [Replicate()]) @ w
        return y.full_tensor(), y

    def loss(x: Any) -> Any:
        x, first = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        assert not isinstance(x, DTensor) and first.placements == (Shard(1),)
        return block(x)[0].square().sum()

    sf.jit(loss, backend="aten")(X).backward()
    value = w.full_tensor().detach().requires_grad_()
    (X @ value @ value).square().sum().backward()
    assert_close(w.grad.full_tensor(), value.grad)


def test_scan(mesh: Any) -> None:
    def step(carry: Any, row: Any) -> Any:
        every = DTensor.from_local(row, mesh, S).full_tensor()
        return carry + every.sum(), every

    def fn(x: Any) -> Any:
        return sf.scan(step, torch.zeros(()), x)

    total, rows = sf.jit(fn, backend="aten")(local())
    same(total, X.sum(), X.sum())
    same(rows, *[torch.cat(ROWS, 1)] * 2)


def test_s2_2_factories(mesh: Any) -> None:
    def fn(x: Any) -> Any:
        a = torch.distributed.tensor.ones(4, 2, device_mesh=mesh, placements=S)
        b = torch.distributed.tensor.zeros((4, 2), device_mesh=mesh, placements=S)
        return a.to_local() + x[:2], (a + b).full_tensor()

    mine, total = sf.jit(fn, backend="aten")(local())
    same(mine, *[x[:2] + 1 for x in ROWS])
    same(total, torch.ones(4, 2), torch.ones(4, 2))


def test_in_shard_map(mesh: Any) -> None:
    def fn(x: Any) -> Any:
        y = DTensor.from_local(x, mesh, S).redistribute(mesh, R).to_local() * 2
        dist.all_reduce(x := x.clone(), group=mesh.get_group())
        return y, x

    mapped = sf.shard_map(fn, mesh, P("dp"), (P(), P("dp")), backend="aten")
    doubled, total = mapped(X)
    assert_close(sf.full(doubled), X * 2)
    assert_close(sf.full(total), torch.cat([ROWS[0] + ROWS[1]] * 2))


def test_replicas_of_what_all_ranks_have_count_once(mesh: Any) -> None:
    def loss(x: Any) -> Any:
        same = DTensor.from_local(x, mesh, R)
        return same.sin().square().sum().full_tensor()

    x = torch.arange(4.0)
    once = sf.grad(sf.shard_map(loss, mesh, P(), P()))
    twice = sf.shard_map(lambda x: sf.grad(loss)(x).sum(), mesh, P(), P())
    assert_close(sf.full(once(x)), (2 * x).sin())
    assert_close(sf.full(sf.grad(twice)(x)), 2 * (2 * x).cos())


def test_in_shard_placements_are_constraints(mesh: Any) -> None:
    def fn(x: Any) -> Any:
        a = distribute_tensor(x * 2, mesh, [Shard(1)])
        return (a, a.redistribute(mesh, S), a.full_tensor(), a + x, isinstance(a, DTensor))

    *out, is_dtensor = sf.shard(fn, mesh, P("dp"), backend="aten")(X)
    placed = [x.placements for x in out[:3]]
    assert placed == [(Shard(1),), (Shard(0),), (Replicate(),)]
    for x, wanted in zip(out, (X * 2, X * 2, X * 2, X * 3), strict=True):
        assert_close(sf.full(x), wanted)
    assert is_dtensor is False  # as for one device


def test_the_mesh_of_a_dtensor(mesh: Any) -> None:
    def fn(d: Any) -> Any:
        here = d.device_mesh
        return d.redistribute(here, R).to_local() * here.size(), isinstance(d, DTensor)

    every, is_dtensor = sf.jit(fn, backend="aten")(distribute_tensor(X, mesh, S))
    same(every, X * 2, X * 2)
    assert is_dtensor is True


def test_s6_1_the_current_mesh_serves_where_none_is_named(mesh: Any) -> None:
    fn = sf.jit(lambda x: DTensor.from_local(x, None, S).full_tensor(), backend="aten")
    with sf.use_mesh(mesh):
        same(fn(local()), X, X)
    with mesh:
        same(fn(local()), X, X)


def test_s6_1_a_mesh_that_is_entered_inside(mesh: Any) -> None:
    other = sf.make_mesh((2,), ("tp",))

    def inner(x: Any) -> Any:
        with sf.use_mesh(mesh):
            return DTensor.from_local(x, None, S).full_tensor()

    def nested(x: Any) -> Any:
        with other, mesh as here:
            y = DTensor.from_local(x, None, S)
            same = here is mesh or here == mesh
        with mesh["dp"]:
            return y.redistribute(None, R).to_local(), same

    def caught(x: Any) -> Any:
        try:
            with other:
                raise ValueError
        except ValueError:
            return inner(x)

    for fn in (inner, lambda x: nested(x)[0], caught):
        same(sf.jit(fn, backend="aten")(local()), X, X)
        gradient = sf.grad(lambda x, fn=fn: fn(x).sin().sum())(local())
        same(gradient, *[x.cos() for x in ROWS])
        assert sf.current_mesh() is None
    assert sf.jit(nested, backend="aten")(local())[1] is True
    with pytest.raises(sf.PlacementError), sf.use_mesh(mesh):
        sf.jit(lambda x: DTensor.from_local(x, None, [Shard(5)]))(local())
    assert sf.current_mesh() is None
    doubled = lambda x: x * 2

    def placed(x: Any) -> Any:
        with sf.use_mesh(mesh):
            return sf.shard(doubled, in_placements=P("dp"))(x)

    out = sf.shard(placed, mesh)(X)
    assert_close(sf.full(out), X * 2)


def test_the_local_tensor_by_its_attribute(mesh: Any) -> None:
    def fn(d: Any) -> Any:
        twice = d * 2
        more = 2 if twice.placements[0].is_shard() else 3
        return twice._local_tensor + more

    d = distribute_tensor(X, mesh, S)
    same(sf.jit(fn, backend="aten")(d), *[2 * x + 2 for x in ROWS])


def test_a_mesh_over_a_part_of_the_ranks() -> None:
    with sf.fake_world(4, rank=3):
        part = dist.device_mesh.DeviceMesh("cpu", [1, 3], mesh_dim_names=("dp",))
        d = DTensor.from_local(torch.ones(4, 7), part, [Partial()])
        out = sf.jit(lambda d: d.redistribute(part, [Shard(1)]), backend="aten")(d)
        assert out.placements == (Shard(1),)
        assert_close(sf.full(out), torch.full((4, 7), 2.0))
        assert out.to_local().shape == (4, 3)  # of rank 3, which is shown
        placed = sf.distribute(torch.ones(3, 2), part, P("dp"))
        assert placed.to_local().shape == (1, 2)
        rows = sf.jit(lambda x: DTensor.from_local(x, part, S).full_tensor())
        assert len(rows(torch.ones(2)).shards) == 2


def test_partial_results_are_reduced(mesh: Any) -> None:
    fn = lambda x: DTensor.from_local(x, mesh, [Partial()])
    out = sf.jit(fn, backend="aten")(local())
    assert_close(sf.full(out), ROWS[0] + ROWS[1])


def test_a_collective_by_hand_has_the_right_derivative(mesh: Any) -> None:
    def loss(x: Any) -> Any:
        total = x * 1
        dist.all_reduce(total)
        return (total * x).sum()

    gradient = sf.jit(sf.grad(loss), backend="aten")(local())
    total = ROWS[0] + ROWS[1]  # d/dx of the sum over ranks of total * x
    assert_close(gradient.shards, [total + total] * 2)


def test_a_second_world_is_found_out_anew() -> None:
    def fn(x: Any) -> Any:
        total = x.clone()
        dist.all_reduce(total)
        return total

    staged = sf.jit(fn, backend="aten")
    for n in (2, 4):
        with sf.fake_world(n):
            out = staged(torch.ones(3))
            assert len(out.shards) == n
            assert_close(out.shards[0], torch.full((3,), float(n)))


def test_writes_to_dtensors_made_inside(mesh: Any) -> None:
    def fn(x: Any) -> Any:
        d = DTensor.from_local(x * 1, mesh, S)
        d.add_(1)
        d[0] = 5
        d.view(-1)[-1:].zero_()
        return d.full_tensor(), d

    wanted = X + 1
    wanted[0], wanted[-1, -1] = 5, 0
    total, d = sf.jit(fn, backend="aten")(local())
    same(total, wanted, wanted)
    assert_close(sf.full(d), wanted)


def test_branches_and_loops_over_dtensors(mesh: Any) -> None:
    def fn(x: Any) -> Any:
        d = DTensor.from_local(x, mesh, S)
        doubled = sf.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (torch.tensor(0), d)
        )[1]
        positive = d.sum().full_tensor() > 0
        chosen = sf.cond(positive, lambda d: d + 1, lambda d: d - 1, d)
        start = torch.distributed.tensor.zeros(2, device_mesh=mesh, placements=R)
        total, rows = sf.scan(lambda c, row: (c + row, row * 2), start, d)
        return [y.full_tensor() for y in (doubled, chosen, total, rows)]

    wanted = X * 8, X + 1, X.sum(0), X * 2
    for got, expected in zip(sf.jit(fn, backend="aten")(local()), wanted, strict=True):
        same(got, expected, expected)


def test_derivatives_of_derivatives(mesh: Any) -> None:
    def loss(x: Any) -> Any:
        return DTensor.from_local(x, mesh, S).sin().full_tensor().square().sum()

    plain = lambda x: x.sin().square().sum()
    hessian = sf.jit(sf.hessian(loss), backend="aten")(local())
    wanted = torch.func.hessian(plain)(X).reshape(2, 4, 2, 2, 4, 2)
    same(hessian, wanted[0, :, :, 0], wanted[1, :, :, 1])
    value, tangent = sf.jit(lambda x: sf.jvp(loss, (x,), (x,)), backend="aten")(local())
    expected = torch.func.jvp(plain, (X,), (X,))
    same(value, *[expected[0]] * 2)
    same(tangent, *[expected[1]] * 2)
    rows = sf.jit(sf.vmap(sf.grad(loss)), backend="aten")(local())
    same(rows, *[torch.func.grad(plain)(x) for x in ROWS])


def test_transforms_of_one_function_do_not_share_a_result(mesh: Any) -> None:
    def loss(x: Any) -> Any:
        return DTensor.from_local(x, mesh, S).sin().full_tensor().sum()

    same(sf.grad(loss)(local()), *[x.cos() for x in ROWS])
    value, gradient = sf.value_and_grad(loss)(local())
    same(value, *[X.sin().sum()] * 2)
    same(gradient, *[x.cos() for x in ROWS])
    wanted = torch.func.hessian(lambda x: x.sin().sum())(X)
    wanted = wanted.reshape(2, 4, 2, 2, 4, 2)
    same(sf.hessian(loss)(local()), wanted[0, :, :, 0], wanted[1, :, :, 1])
    same(sf.jacrev(loss)(local()), *[x.cos() for x in ROWS])


def test_a_compiled_program_takes_and_returns_each_ranks_own(mesh: Any) -> None:
    def fn(x: Any, w: Any) -> Any:
        d = DTensor.from_local(x, mesh, S) * w
        return {"d": d, "every": d.full_tensor() + x.sum()}

    staged = sf.jit(fn, backend="aten")
    w = distribute_tensor(torch.ones(2) * 2, mesh, R)
    for like in (local(), sf.ShapeDtype((4, 2), torch.float32)):
        compiled = staged.compile(like, w)
        assert "result.every" in str(compiled)
        out = compiled(local(), w)
        assert_close(sf.full(out["d"]), X * 2)
        same(out["every"], *[X * 2 + x.sum() for x in ROWS])
        with pytest.raises(
            sf.TreeError, match="the arguments differ from those that the program was compiled for"
        ):
            compiled(SimulatedTensor([ROWS[0][:2]] * 2), w)


def test_shapes_in_place_of_each_ranks_own_tensors(mesh: Any) -> None:
    def fn(x: Any) -> Any:
        return DTensor.from_local(x, mesh, S).full_tensor()

    staged = sf.jit(fn, backend="aten")
    lowered = staged.lower(sf.ShapeDtype((4, 2), torch.float32))
    (gather,) = lowered.collectives
    assert gather.kind == "all_gather"
    (result,) = [n for n in lowered.program.graph.nodes if n.op == "output"]
    (x,) = result.all_input_nodes
    assert tuple(x.meta["val"].shape) == (1, 8, 2)


def test_dropout_of_a_dtensor_is_that_of_one_device(mesh: Any) -> None:
    def fn(x: Any) -> Any:
        d = DTensor.from_local(x, mesh, S)
        return torch.nn.functional.dropout(d, 0.5).full_tensor()

    sf.random.state.seed(1)
    got = sf.jit(fn, backend="aten")(local())
    sf.random.state.seed(1)
    with sf.random.plain():
        wanted = torch.nn.functional.dropout(X, 0.5)
    same(got, wanted, wanted)


def test_s2_2_random_dtensors_are_those_of_one_device(mesh: Any) -> None:
    made = torch.distributed.tensor.rand, torch.distributed.tensor.randn
    fn = lambda x: [
        make(5, 4, device_mesh=mesh, placements=place).full_tensor() + x
        for make, place in zip(made, (S, R), strict=True)
    ]
    zero = torch.zeros(5, 4)
    sf.random.state.seed(1)
    found = sf.jit(fn, backend="aten")(SimulatedTensor([zero, zero]))
    sf.random.state.seed(1)
    with sf.random.plain():
        wanted = torch.rand(5, 4), torch.randn(5, 4)
    for got, x in zip(found, wanted, strict=True):
        same(got, x, x)


def test_a_plain_function_of_each_ranks_own_tensor(mesh: Any) -> None:
    d = distribute_tensor(X, mesh, S)
    for fn in (sf.jit(torch.sin), sf.jit(torch.sin, donate_argnums=0), sf.vmap(torch.sin)):
        same(fn(d.to_local()), *[x.sin() for x in ROWS])
        assert type(fn(X.clone())) is torch.Tensor  # whatever was called before


def test_each_ranks_own_tensor_is_refused_among_global_ones(mesh: Any) -> None:
    for call in (
        lambda: sf.shard(torch.sin, mesh)(local()),
        lambda: sf.jit(torch.sin)(SimulatedTensor([X] * 3)),
        lambda: sf.jit(torch.sin).compile(ROWS[0])(local()),
    ):
        with pytest.raises(sf.TreeError):
            call()
