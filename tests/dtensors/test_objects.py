"""S7: distributed objects inside a captured function: groups, placements, meshes, classes of
tensors, and DTensors on several meshes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from message import without_line
from ranks import run_ranks
from torch.distributed.distributed_c10d import (
    _get_group_size_by_name,
    _get_group_tag,
    _rank_not_in_group,
    _resolve_group_name_by_ranks_and_tag,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing import assert_close
from worlds import SimulatedTensor

import shardfn as sf
from shardfn import P
from tests.transforms.test_flattened import Pair

S, R = Shard(0), Replicate()
X = torch.arange(8.0).view(4, 2)
NOBODY = dist.GroupMember.NON_GROUP_MEMBER


def grid() -> Any:
    return sf.make_mesh((2, 2), ("dp", "tp"))


def told(fn: Callable[[], Any]) -> Any:
    """The constants of a captured function."""
    return sf.jit(lambda x: (x, fn()), backend="aten")(X)[1]


def test_s7_1_groups_of_the_world_and_of_nobody() -> None:
    with sf.fake_world(4):
        facts = lambda: (
            dist.group.WORLD.size(),
            dist.GroupMember.WORLD is dist.group.WORLD,
            dist.get_world_size(dist.group.WORLD) == dist.get_world_size(),
            (_rank_not_in_group(NOBODY), _rank_not_in_group(dist.group.WORLD)),
            (dist.get_world_size(NOBODY), dist.get_rank(NOBODY)),
            (NOBODY == dist.GroupMember.NON_GROUP_MEMBER, NOBODY == dist.group.WORLD),
            dist.group.WORLD is not None,
        )
        found = 4, True, True, (True, False), (-1, -1), (True, False), True
        assert told(facts) == facts() == found
        assert told(lambda: dist.group.WORLD) is dist.group.WORLD
        assert told(lambda: dist.GroupMember.NON_GROUP_MEMBER) is NOBODY
        staged = sf.jit(lambda x: dist.all_reduce(x * 1, group=NOBODY))
        with pytest.raises(sf.CaptureError, match="this rank is not in the group"):
            staged(X)


def test_s7_2_placements() -> None:
    facts = lambda: (
        (Shard(0) == Shard(0), Shard(0) == Shard(1), Partial() == Partial("sum")),
        (hash(Shard(0)) == hash(Shard(0)), {Shard(0): "rows"}[Shard(0)]),
        (Shard(-1).dim, Shard(0).is_shard(0), Shard(0).is_shard(1)),
        (Replicate().is_replicate(), Partial().is_partial()),
        (Shard(0).is_shard(), Replicate().is_shard(), Partial().is_shard(dim=0)),
        (Shard(-1).is_replicate(), Partial().is_replicate(), Shard(0).is_partial()),
        (Partial("avg").is_partial("sum"), Partial("avg").is_partial(reduce_op="avg")),
        (Shard(0) != Replicate(), Replicate() == Replicate(), Shard(0) in [Shard(0)]),
        (hash(Replicate()), hash(Partial("avg")), {Partial(): 1, S: 2}[Shard(0)]),
        (Shard(dim=1).dim, Partial(reduce_op="max").reduce_op, hasattr(Partial(), "dim")),
        (repr(Shard(0)), str(Partial("avg")), f"{Replicate()}"),
        (Partial("avg").reduce_op, type(Shard(0)) is Shard),
        [Shard(1), Replicate(), Partial("avg")],
    )
    assert told(facts) == facts()
    tree = {"w": Shard(-1), "b": (Partial("avg"), Replicate())}
    assert told(lambda: {"w": Shard(-1), "b": (Partial("avg"), Replicate())}) == tree
    assert facts()[-1] == [Shard(1), Replicate(), Partial("avg")]


def of_mesh(mesh: Any) -> Any:
    """What a mesh of two axes says that all ranks share."""
    return (
        (mesh.ndim, mesh.device_type, mesh.mesh_dim_names),
        (mesh.shape, tuple(mesh.shape), mesh.shape[-1], len(mesh.shape)),
        (mesh.size(), mesh.size(1), mesh.size(-1), mesh.size(-2)),
        (mesh.size(mesh_dim=0), mesh.size(None)),
        (mesh["dp"].size(), mesh["dp"].ndim, mesh["dp"].mesh_dim_names),
        (mesh["dp", "tp"] == mesh, mesh["dp"] == mesh["tp"], {mesh: 1}[mesh]),
        mesh._is_current_rank_part_of_mesh(),
        mesh["tp"]._is_current_rank_part_of_mesh(),
        mesh["dp", "tp"]._flatten("both").size(),
        mesh._flatten(mesh_dim_name="both").mesh_dim_names,
        (mesh.get_group(0).size(), mesh.get_group(-1).size(), mesh["tp"].get_group().size()),
        (mesh.get_group("tp").size(), mesh.get_group(mesh_dim="dp").size()),
        mesh.get_group(-1) == mesh.get_group("tp"),
        [group.size() for group in mesh.get_all_groups()],
        [mesh[name].size() for name in mesh.mesh_dim_names],
        (hasattr(mesh, "shape"), hasattr(mesh, "shapes"), str(mesh)),
    )


def of_each_rank(mesh: Any) -> list[Any]:
    """What a mesh of two axes says to one rank."""
    return [
        *mesh.get_coordinate(),
        (mesh.get_local_rank("dp"), mesh.get_local_rank(-1)),
        (mesh.get_local_rank(mesh_dim=1), mesh["tp"].get_local_rank(), mesh["dp"].get_rank()),
        (mesh.get_rank(), mesh._flatten("both").get_local_rank()),
        (mesh.get_group("tp").rank(), mesh.get_group(0).rank(), dist.group.WORLD.rank()),
        (dist.get_rank(), dist.get_rank(mesh.get_group("tp"))),
    ]


@pytest.mark.parametrize("shape", [(1, 2), (2, 4)])
def test_s7_3_all_that_a_mesh_says(shape: tuple[int, int]) -> None:
    """Constants are constants, and the answers of a rank are those that it gets in its own world:
    in `jit`, and constants in `shard_map` and `shard` too.
    """
    n = shape[0] * shape[1]
    wanted = []
    for rank in range(n):
        with sf.fake_world(n, rank=rank):
            mesh = sf.make_mesh(shape, ("dp", "tp"))
            wanted.append(_numbers(of_each_rank(mesh)))
    with sf.fake_world(n):
        mesh = sf.make_mesh(shape, ("dp", "tp"))
        constants = of_mesh(mesh)
        assert told(lambda: of_mesh(mesh)) == constants
        known = lambda x: x + 1 if of_mesh(mesh)[:6] == constants[:6] else x
        for call in (
            sf.shard_map(known, mesh, P(), P(), backend="aten"),
            sf.shard(known, mesh, backend="aten"),
        ):
            assert_close(sf.full(call(X)), X + 1)
        found = _numbers(told(lambda: of_each_rank(mesh)))
        assert [[int(x.shards[k]) for x in found] for k in range(n)] == wanted


def _numbers(rows: Any) -> list[Any]:
    """The numbers of a tree of tuples."""
    rows = [row if isinstance(row, tuple) else (row,) for row in rows]
    return [x for row in rows for x in row]


def test_s7_3_meshes() -> None:
    with sf.fake_world(4):
        mesh = grid()

        def numbers(x: Any) -> Any:
            first, second = mesh.get_coordinate()
            parts = mesh["tp"].get_local_rank(), mesh.get_local_rank("dp")
            return first * 1000 + second * 100 + parts[0] * 10 + parts[1] + x

        zero = torch.zeros((), dtype=torch.int64)
        found = sf.jit(numbers, backend="aten")(SimulatedTensor([zero] * 4))
        assert [int(x) for x in found.shards] == [0, 110, 1001, 1111]
        with pytest.raises(sf.CaptureError, match=r"the function reads \.name of a mesh or"):
            told(lambda: mesh.get_group("tp").name())


def test_s7_4_process_groups() -> None:
    with sf.fake_world(4):
        mesh = grid()
        group = mesh.get_group("tp")
        every = list(range(4))
        facts = lambda: (
            (group.size(), group.group_name == group.group_name),
            (group._get_backend_name(), _get_group_tag(group)),
            _get_group_size_by_name(group.group_name),
            dist.get_process_group_ranks(dist.group.WORLD) == every,
            _resolve_group_name_by_ranks_and_tag(every, _get_group_tag(dist.group.WORLD)),
            _resolve_group_name_by_ranks_and_tag(
                ranks=dist.get_process_group_ranks(group), tag=_get_group_tag(group)
            )
            == group.group_name,
            (_rank_not_in_group(group), _rank_not_in_group(group=None)),
        )
        assert told(facts) == facts()
        tp = lambda x: dist.get_rank(group=group) + 10 * group.rank() + x
        zero = torch.zeros((), dtype=torch.int64)
        found = sf.jit(tp, backend="aten")(SimulatedTensor([zero] * 4))
        assert [int(x) for x in found.shards] == [0, 11, 0, 11]


def _facts_on_a_rank() -> Any:
    """What eager torch says on this rank, and what a captured function says."""
    mesh = sf.make_mesh((1, 2), ("dp", "tp"))
    group = mesh.get_group("tp")
    asks = lambda: (
        of_mesh(mesh),
        _numbers(of_each_rank(mesh)),
        (group._get_backend_name(), _get_group_tag(group), group.group_name),
        _get_group_size_by_name(group.group_name),
        dist.get_process_group_ranks(group),
        _resolve_group_name_by_ranks_and_tag(
            dist.get_process_group_ranks(group), _get_group_tag(group)
        ),
        dist.get_global_rank(group, 1),
        (_rank_not_in_group(group), _rank_not_in_group(NOBODY), dist.get_rank(NOBODY)),
        [Shard(-1), Partial("avg"), Replicate()],
    )
    return [str(sf.tree_map(_plain, answer)) for answer in (asks(), told(asks))]


def _plain(x: Any) -> Any:
    return x.item() if isinstance(x, torch.Tensor) else x


def test_s7_all_questions_on_real_ranks() -> None:
    for eager, captured in run_ranks(2, _facts_on_a_rank):
        assert captured == eager


def classes(x: Any) -> Any:
    return (
        (type(x) is DTensor, type(x) is torch.Tensor, type(x) in (DTensor, Pair)),
        (x.__class__ is DTensor, type(x).__name__, issubclass(type(x), DTensor)),
        (isinstance(x, DTensor), isinstance(x, torch.Tensor)),
    )


DTENSOR = (True, False, True), (True, "DTensor", True), (True, True)
PLAIN = (False, True, False), (False, "Tensor", False), (False, True)


def test_s7_a_dtensor_has_its_class_inside() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        d = distribute_tensor(X, mesh, [S])
        fn = lambda d: (classes(d), classes(d + 1), classes(d.to_local()), d * 2)
        assert sf.jit(fn, backend="aten")(d)[:3] == (DTENSOR, DTENSOR, PLAIN)
        alone = lambda d: (type(d) is DTensor, d.__class__.__name__, d * 2)
        assert sf.jit(alone, backend="aten")(d)[:2] == (True, "DTensor")
        assert sf.jit(alone, backend="aten")(X)[:2] == (False, "Tensor")
        plain = lambda x: (classes(x), classes(DTensor.from_local(x, mesh, [S])))
        assert sf.jit(plain, backend="aten")(X) == (PLAIN, DTENSOR)
        loss = lambda d: (d * (2 if type(d) is DTensor else 3)).sum().full_tensor()
        gradient = sf.jit(sf.grad(loss), backend="aten")(d)
        assert_close(sf.full(gradient), torch.full_like(X, 2.0))
        rows = lambda d: d * (2 if type(d) is DTensor else 3)
        out = sf.jit(sf.vmap(rows), backend="aten")(d)
        assert_close(sf.full(out), 2 * X)


def test_s3_a_tensor_that_holds_dtensors_in_the_code_of_one_rank() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        a, b = distribute_tensor(X, mesh, [S]), distribute_tensor(X + 1, mesh, [R])

        def fn(pairs: Any, x: Any) -> Any:
            pair = pairs["pair"]
            own = pair.a.to_local() + x
            kinds = pair.a.placements, pair.b.placements
            return own, kinds, pair.b.full_tensor(), pair, pair * 2

        own = SimulatedTensor([X[:2], X[2:] * 3])
        staged = sf.jit(fn, backend="aten")
        for _ in range(2):
            local, kinds, whole, same, twice = staged({"pair": Pair(a, b)}, own)
            assert_close(local.shards, [X[:2] * 2, X[2:] * 4])
            assert kinds == ((S,), (R,))
            assert_close(whole.shards, [X + 1] * 2)
            assert (same.a.placements, same.b.placements) == kinds
            assert_close(sf.full(twice.a), X * 2)
            assert_close(sf.full(twice.b), X * 2 + 2)


def part(mesh: Any, axis: str, dim: int = 0) -> Any:
    return distribute_tensor(X, mesh[axis], [Shard(dim)])


def added(held: Any, mesh: Any) -> Any:
    return sf.shard(lambda x: held + x, mesh)(X)


CASES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "two meshes in one op": (
        lambda mesh: sf.jit(
            lambda x: DTensor.from_local(x, mesh["dp"], [S]) + DTensor.from_local(x, mesh, [S, R])
        )(X),
        """add: the operands of the op are DTensors on different meshes, with the axes (dp) and \
(dp, tp)
  needed: one mesh
  try: DTensor.from_local(x.to_local(), mesh, placements), with one placement for \
each axis of the mesh""",
    ),
    "redistributed to the whole mesh": (
        lambda mesh: sf.jit(
            lambda x: DTensor.from_local(x, mesh["dp"], [S]).redistribute(mesh, [S, R])
        )(X),
        """DTensor.redistribute: the DTensor is on dp=S0, but the call names a mesh with axes \
('dp', \
'tp')
  try: use the mesh of the DTensor; for another mesh use DTensor.from_local(x.to_local(), mesh, \
placements)""",
    ),
    "a private record of a DTensor": (
        lambda mesh: sf.jit(lambda d: (d * 1, d._spec.mesh == mesh))(
            distribute_tensor(X, mesh, [S, R])
        ),
        """DTensor._spec: a private attribute
  try: x.placements, x.device_mesh, x.shape and x.stride()""",
    ),
}


@pytest.mark.parametrize("axes", [("dp", "tp"), ("tp", "dp"), ("tp", "tp")])
def test_in_shard_dtensors_on_parts_are_global_tensors(axes: Any) -> None:
    """With uneven shards, and of a mesh that is entered; their gradients are on the mesh."""
    x, w = (torch.arange(15.0, dtype=torch.float64).view(3, 5).sin() + k for k in (0, 1))
    fn = lambda x, w: (x * w).cos().sum()
    wanted = torch.func.grad(fn)(x, w)
    with sf.fake_world(6):
        mesh = sf.make_mesh((2, 3), ("dp", "tp"))
        parts = [mesh[axis] for axis in axes]
        args = [
            distribute_tensor(y, part, [Shard(1)]) for y, part in zip((x, w), parts, strict=True)
        ]
        sharded = sf.shard(sf.grad(fn), mesh, backend="aten")
        for call in (sharded, sharded, sharded.compile(*args)):
            gradient = call(*args)
            assert_close(gradient.full_tensor(), wanted)
        own = [axis == axes[0] for axis in ("dp", "tp")]
        assert [p.is_shard() for p in gradient.placements] == own
        with sf.use_mesh(mesh):
            total = sf.shard(fn, backend="aten")(args[0], w)
        assert_close(total.full_tensor(), fn(x, w))
        with pytest.raises(sf.ShardError, match="a submesh: the argument requires grad"):
            sharded(args[0].requires_grad_(), w)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_in_shard_closed_over_dtensors_on_parts_are_global_tensors(placement: Any) -> None:
    """With uneven shards; their gradients are on the part, as optimizers need them."""
    x, w = (torch.arange(15.0, dtype=torch.float64).view(3, 5).sin() + k for k in (0, 1))
    fn = lambda x, w: (x * w).cos().sum()
    with sf.fake_world(6):
        mesh = sf.make_mesh((2, 3), ("dp", "tp"))
        held = distribute_tensor(w, mesh["tp"], [placement]).requires_grad_()
        loss = sf.shard(lambda x: fn(x, held), mesh, P("dp"), backend="aten")
        for _ in range(2):
            loss(x).backward()
            gradient: Any = held.grad
            wanted = torch.func.grad(fn, argnums=1)(x, held.detach().full_tensor())
            assert_close(gradient.full_tensor(), wanted)
            assert gradient.device_mesh == mesh["tp"]
            assert gradient.placements == (placement,)
            torch.optim.SGD([held], 0.1).step()
            held.grad = None
        with torch.no_grad():
            now = held.full_tensor()
            assert_close(loss.compile(x)(x).full_tensor(), fn(x, now))


@pytest.mark.parametrize("case", CASES)
def test_dtensors_of_several_meshes_are_refused_by_name(case: str) -> None:
    call, text = CASES[case]
    with sf.fake_world(4), pytest.raises(sf.ShardError) as caught:
        call(grid())
    assert without_line(caught.value) == text


def test_what_the_refusals_say_to_write_works() -> None:
    with sf.fake_world(4):
        mesh = grid()
        a, b = part(mesh, "dp"), distribute_tensor(X, mesh, [S, R])
        a = sf.distribute(sf.full(a), mesh, [Shard(dim=0), Replicate()])
        total = sf.jit(lambda a, b: a + b, backend="aten")(a, b)
        assert_close(sf.full(total), 2 * X)
        inside = lambda x: (
            DTensor.from_local(DTensor.from_local(x, mesh["dp"], [S]).to_local(), mesh, [S, R])
            + DTensor.from_local(x, mesh, [S, R])
        )
        total = sf.jit(inside, backend="aten")(X)
        assert_close(sf.full(total), torch.cat([2 * X] * 2))


def test_s9_8_gradients_from_a_bucket_have_the_strides_of_one_device() -> None:
    w = {"t": X.t(), "plain": torch.ones(4, 3)}
    w["last"] = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    loss = lambda w, x: (x @ w["t"] @ w["plain"]).sum() + w["last"].sin().sum()
    wanted = torch.func.grad(loss)(w, X)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        for cap in ("64 B", "1 MB"):
            fn = sf.bucketed_grad(loss, cap=cap, first_cap=cap)
            _, found = sf.shard(fn, mesh, (P(), P("dp")), backend="aten")(w, X)
            for name, gradient in wanted.items():
                assert found[name].to_local().stride() == gradient.stride()
                assert_close(sf.full(found[name]), gradient)
