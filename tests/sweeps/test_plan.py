"""plan: meshes of several shapes, from one capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from stagings import counts
from torch.testing import assert_close

import shardfn as sf
from shardfn import P
from tests.transforms.sharding.test_auto import SMALL, WIDE, loss, sgd, shapes

Lib: Any = sf  # called with wrong types
MESHES = [(64,), (8, 8), (4, 4, 4)]
MANY = shapes(up=(512, 2048), down=(2048, 512)), sf.ShapeDtype((65536, 512))


def test_meshes_are_compared_from_one_capture() -> None:
    before = counts["captures"]
    found = sf.plan(sgd(loss), *MANY, meshes=MESHES, memory="80GiB")
    assert counts["captures"] == before + 1
    assert {plan.axes.sizes for plan in found.rows} == {*MESHES}
    times = [plan.time.total for plan in found.rows]
    assert times == sorted(times) and found.best is found.rows[0]


def test_the_table_has_a_row_for_each_mesh_with_placements_to_paste() -> None:
    found = sf.plan(sgd(loss), *WIDE, meshes=[(8,), (2, 4)], memory="1GiB", axis_names=("a", "b"))
    text = str(found)
    assert text.splitlines()[1].split()[:4] == ["mesh", "time", "a", "step"]
    for plan in found.rows:
        assert str(plan.axes) in text
        assert f"placements = {plan.placements.text()}" in plan.call
        assert plan.memory.peak <= 2**30
    assert f"placements = {found.best.placements.text()}" in text
    with sf.fake_world(8, numerics=False):
        mesh = sf.make_mesh(found.best.axes.sizes, found.best.axes.names)
        places = eval(found.best.placements.text())
        low = sf.shard(sgd(loss), mesh, places).lower(*WIDE)
        assert low.memory.peak == found.best.memory.peak
        assert low.collectives == found.best.collectives


def test_a_mesh_on_which_nothing_fits_is_said() -> None:
    found = sf.plan(sgd(loss), *WIDE, meshes=[(2,), (8,)], memory="1GiB")
    assert [plan.axes.sizes for plan in found.rows] == [(8,)]
    (refused,) = found.refused
    assert refused.axes.sizes == (2,) and refused.why.startswith("the smallest peak is ")
    assert [*refused] == [refused.axes, refused.why] and found.plans is found.rows
    assert f"{refused.axes}: the smallest peak is" in str(found)


def test_what_is_known_of_the_placements_stays() -> None:
    places = {"up": P(None, "dp"), "down": sf.auto}, sf.auto
    found = sf.plan(sgd(loss), *SMALL, meshes=[(4,)], in_placements=places)
    assert found.best.placements.in_placements[0]["up"] == P(None, "dp")


X = torch.ones(8, 4)
WRONG: dict[str, tuple[Any, str]] = {
    "hardware": (
        lambda: sf.plan(torch.sin, X, meshes=[(2,)], hardware="H1000"),
        "plan(sin): hardware is 'H1000'\n  needed: the name of a known device (A100, H100, "
        "H100-96GB, H200, B200, GB200), or an sf.Hardware",
    ),
    "meshes": (
        lambda: Lib.plan(torch.sin, X, meshes=[8]),
        "plan, meshes: meshes is [8], a list, and must be a list of meshes",
    ),
    "names": (
        lambda: sf.plan(torch.sin, X, meshes=[(2, 2)], axis_names=("a",)),
        "plan(sin), axis_names: axis_names has 1 names, but the mesh has shape (2, 2)",
    ),
    "memory": (
        lambda: sf.plan(torch.sin, X, meshes=[(2,)], memory=1),
        "memory: no placements found on (dp=2) fit in 1 B a rank",
    ),
    "size": (
        lambda: sf.plan(torch.sin, X, meshes=[(2,)], memory="a lot"),
        "plan(sin), memory: 'a lot' is not a number of bytes",
    ),
    "nothing to choose": (
        lambda: sf.plan(torch.mul, 2, 3, meshes=[(2,)]),
        "in_placements: sf.auto is given for an argument without tensors",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_refused_by_name(name: str) -> None:
    run, text = WRONG[name]
    with pytest.raises(sf.ShardError) as error:
        run()
    assert text in str(error.value)


@pytest.mark.parametrize("numerics", [True, False])
def test_inside_of_a_world_it_says_what_it_says_outside_and_the_world_goes_on(
    numerics: bool,
) -> None:
    wanted = sf.plan(sgd(loss), *SMALL, meshes=[(4,), (2, 2)])
    double = lambda x: sf.constrain(x * 2, P("a"))
    with sf.fake_world(6, numerics=numerics):
        mesh = sf.make_mesh((2, 3), ("a", "b"))
        run = sf.shard(double, mesh, P("b"), backend="aten")
        out = run(X)
        groups = dist.get_world_size(), mesh.get_group("a").group_name, dist.get_rank()
        with sf.use_mesh(mesh):
            found = sf.plan(sgd(loss), *SMALL, meshes=[(4,), (2, 2)])
            assert sf.current_mesh() is mesh
        assert str(found) == str(wanted)
        assert groups == (dist.get_world_size(), mesh.get_group("a").group_name, dist.get_rank())
        again = sf.shard(
            lambda x: double(x) + 1, sf.make_mesh((6,), ("a",)), P("a"), backend="aten"
        )
        if numerics:
            assert_close(sf.full(run(X)), sf.full(out))
            assert_close(sf.full(again(X)), 2 * X + 1)
        with pytest.raises(sf.ShardError, match="nothing|unknown|hardware"):
            sf.plan(sgd(loss), *SMALL, meshes=[(4,)], hardware="none")
        assert dist.get_world_size() == 6
        with pytest.raises(sf.PlacementError):
            sf.plan(sgd(loss), *SMALL, meshes=[(4,)], memory=1)
        assert dist.get_world_size() == 6
    assert not dist.is_initialized()


def _plans_among_ranks() -> None:
    mesh = sf.make_mesh((2,), ("a",))
    total = sf.shard(lambda x: x.sum(), mesh, P("a"), P(), backend="aten")
    assert float(sf.full(total(X))) == 32.0
    found = sf.plan(torch.sin, sf.ShapeDtype((8, 4)), meshes=[(4,), (8,)])
    assert len(found.rows) == 2
    assert float(sf.full(total(X))) == 32.0
    other = sf.shard(lambda x: 2 * x.sum(), sf.make_mesh((2,), ("b",)), P("b"), P())
    assert float(sf.full(other(X))) == 64.0


def test_real_ranks_plan_too() -> None:
    run_ranks(2, _plans_among_ranks)
