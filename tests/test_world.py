"""Worlds and meshes: entering, leaving, nesting, reading."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

import shardfn as sf
from shardfn import P, _compat, world
from shardfn.world import compare, current_world


def test_s1_1_a_process_group_of_any_size_without_other_processes() -> None:
    for n in (1, 2, 8, 1024):
        with sf.fake_world(n, rank=n - 1):
            assert (dist.get_world_size(), dist.get_rank()) == (n, n - 1)
            assert current_world().size == n
    assert not dist.is_initialized()


def test_a_fake_world_leaves_nothing_behind() -> None:
    hook = sys.excepthook
    with pytest.raises(RuntimeError, match="boom"), sf.fake_world(2):
        raise RuntimeError("boom")
    assert not dist.is_initialized()
    assert sys.excepthook is hook
    assert current_world().size == 1


def test_a_fake_world_is_a_decorator_too() -> None:
    @sf.fake_world(3)
    def size() -> int:
        return sf.make_mesh((3,), ("dp",)).size()

    assert (size(), size()) == (3, 3)


def test_worlds_out_of_range_and_nested_worlds() -> None:
    with pytest.raises(sf.ShardError) as error:
        sf.fake_world(0)
    assert str(error.value) == "fake_world: n is 0\n  needed: 1 to 1048576 ranks"
    with pytest.raises(sf.ShardError) as error:
        sf.fake_world(2, rank=2)
    assert str(error.value) == "fake_world: rank is 2\n  needed: 0 to 1, in a world of 2"
    with sf.fake_world(8), pytest.raises(sf.ShardError) as error, sf.fake_world(2):
        pass
    assert (
        str(error.value) == "fake_world: a world of 8 ranks exists already\n"
        "  try: leave the other fake_world first: the end of its `with`"
    )


def test_a_mesh_without_its_world_leaves_nothing_behind() -> None:
    for shape, names in (((4,), ("dp",)), ((2, 3), ("dp", "tp"))):
        n = torch.Size(shape).numel()
        with pytest.raises(sf.PlacementError) as error:
            sf.make_mesh(shape, names)
        text = f"try: `with sf.fake_world({n}):` around it, or torchrun --nproc-per-node={n}"
        assert text in str(error.value)
        assert not dist.is_initialized()
        with sf.fake_world(n):
            assert sf.make_mesh(shape, names).size() == n


def test_a_group_of_one_rank_says_how_to_leave_it() -> None:
    sf.make_mesh((1,), ("dp",))
    try:
        with pytest.raises(sf.ShardError) as error, sf.fake_world(4):
            pass
    finally:
        dist.destroy_process_group()
    assert "torch.distributed is already initialized, with a process group of one rank" in str(
        error.value
    )
    assert "before the first mesh, or call torch.distributed.destroy_process_group()" in str(
        error.value
    )
    with sf.fake_world(4):
        assert current_world().size == 4


def test_so_does_one_that_shardfn_has_not_seen_before() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    errors: list[Exception] = []

    def enter() -> None:  # in a thread: a lock that waits for itself would stop the test
        try:
            with sf.fake_world(4):
                pass
        except sf.ShardError as error:
            errors.append(error)

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    thread.join(60)
    dist.destroy_process_group()
    assert "torch.distributed is already initialized, with a process group of one rank" in str(
        errors[0]
    )


LAUNCHED = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(("rank", "count"), [("0", 1), ("1", 0)])
def test_a_fake_world_in_a_job_says_so_once(
    rank: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**LAUNCHED, "RANK": rank}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(world._entered, "has_warned", False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with sf.fake_world(8):
                pass
    texts = [str(x.message) for x in caught if "in a job of 2 processes" in str(x.message)]
    assert len(texts) == count


@pytest.mark.parametrize("launched", [False, True])
def test_a_world_may_leave_itself_out_of_a_job(
    launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**LAUNCHED, "RANK": "1"}.items() if launched else ():
        monkeypatch.setenv(name, value)
    kind, size, rank = ("real", 2, 1) if launched else ("simulated", 8, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with sf.fake_world(8, unless_launched=True) as inside:
            assert (inside.kind, inside.size, inside.rank) == (kind, size, rank)
            assert dist.is_initialized() is not launched
        assert not dist.is_initialized()
        started = sf.fake_world(8, unless_launched=True).start()
        assert dist.is_initialized() is not launched
        started.stop()
        assert not dist.is_initialized()

        @sf.fake_world(8, unless_launched=True)
        def decorated() -> bool:
            return dist.is_initialized()

        assert decorated() is not launched
    with pytest.raises(sf.ShardError, match="fake_world: unless_launched is 3"):
        sf.fake_world(8, unless_launched=3)  # pyright: ignore[reportArgumentType]


def test_a_mesh_does_not_outlive_its_world() -> None:
    with sf.fake_world(8):
        double = sf.shard(lambda x: x * 2, sf.make_mesh((8,), ("dp",)), backend="aten")
    with pytest.raises(sf.PlacementError, match="the mesh has 8 ranks, but the world has 1"):
        double(torch.ones(3))


def test_worlds_that_follow_each_other_may_show_different_ranks() -> None:
    whole = torch.arange(8.0).view(4, 2)
    for rank in (1, 3, 0):
        with sf.fake_world(4, rank=rank):
            mesh = sf.make_mesh((2, 2), ("dp", "tp"))
            x = distribute_tensor(whole, mesh, [sf.Shard(0), sf.Shard(1)])
            assert torch.equal(x.sum().full_tensor(), whole.sum())


def test_s6_1_meshes_nest_as_a_stack_unwind_on_exceptions_and_are_per_thread() -> None:
    with sf.fake_world(8):
        outer, inner = (sf.make_mesh((8,), ("dp",)), sf.make_mesh((2, 4), ("dp", "tp")))
        seen: list[object] = []
        with sf.use_mesh(outer):
            with pytest.raises(RuntimeError, match="boom"), sf.use_mesh(inner):
                assert sf.current_mesh() is inner
                raise RuntimeError("boom")
            assert sf.current_mesh() is outer
            thread = threading.Thread(target=lambda: seen.append(sf.current_mesh()))
            thread.start()
            thread.join()
            double = sf.shard(lambda x: x * 2, in_placements=P("dp"), backend="aten")
            assert double(torch.ones(8)).device_mesh == outer
            with sf.use_mesh(inner):
                assert double(torch.ones(8)).device_mesh == inner
        assert seen == [None]
        assert sf.current_mesh() is None


def test_a_world_without_numerics_has_shapes_and_refuses_to_read() -> None:
    with sf.fake_world(2**10, rank=5, numerics=False):
        mesh = sf.make_mesh((2**10,), ("dp",))
        out = sf.shard(lambda x: (x * 2).sum(1), mesh, P("dp"), backend="aten")(
            torch.ones(2**11, 3)
        )
        assert out.shape == (2**11,)
        assert out.to_local().shape == (2,)
        assert "UnreadTensor(shape=(2,)" in repr(out)
        assert (out + 1).to_local().shape == (2,)
        text = (
            "the code reads a value, but the world has no values (numerics=False)\n  try: "
            "fake_world(n, numerics=True) computes true values"
        )
        for read in (
            sf.full,
            lambda x: x.to_local()[0].item(),
            lambda x: bool(x.to_local()[0] > 0),
            lambda x: x.to_local().tolist(),
        ):
            with pytest.raises(sf.FakeValueError) as error:
                read(out)
            assert text in str(error.value)


def test_equal_ranks_in_meshes_of_other_shapes_have_groups_of_their_own() -> None:
    from shardfn.mesh import group_names

    with sf.fake_world(2):
        line, again = sf.make_mesh((2,), ("dp",)), sf.make_mesh((2,), ("dp",))
        column, other = (sf.make_mesh((2, 1), ("dp", "tp")), sf.make_mesh((2,), ("tp",)))
        assert group_names(line) == group_names(again)
        assert len({group_names(m)[0] for m in (line, column, other)}) == 3


AT_EXIT = """
import atexit, contextlib, pathlib
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
def end():
    names = ""
    for task in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it may end meanwhile
            names += (task / "comm").read_text()
    print(dist.is_initialized(), "gloo" in names)
atexit.register(end)
import shardfn as sf
{before}
mesh = sf.make_mesh((1,), ("dp",))
x = sf.distribute(dist.torch.ones(4), mesh, sf.P("dp"))
y = sf.shard(lambda x: x.sum(), mesh, backend="aten")(x)
{after}
"""
OWN_GROUP = "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads")
@pytest.mark.parametrize(
    ("before", "after", "at_exit"),
    [
        ("", "", "False False"),
        ("", "raise RuntimeError", "True True"),
        ("", "dist.destroy_process_group()", "False False"),
        (OWN_GROUP, "", "True True"),
    ],
    ids=["left", "failed", "destroyed", "theirs"],
)
def test_a_process_leaves_the_gloo_group_that_shardfn_joined_at_exit(
    before: str, after: str, at_exit: str
) -> None:
    program = AT_EXIT.format(before=before, after=after)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout == f"{at_exit}\n"


class TestOpenForm:
    """A world that is started and stopped without a `with`, as in a notebook."""

    def test_it_is_started_and_stopped(self) -> None:
        hook = sys.excepthook
        world = sf.fake_world(8, rank=3)
        assert world.start() is world
        try:
            assert (current_world().size, current_world().rank) == (8, 3)
            assert sys.excepthook is hook
            x = sf.distribute(torch.arange(9.0), sf.make_mesh((8,), ("dp",)), P("dp"))
            assert torch.equal(x.full_tensor(), torch.arange(9.0))
        finally:
            world.stop()
        assert current_world().size == 1
        assert repr(world) == "fake_world(8, rank=3)"

    def test_any_object_of_its_size_stops_it_from_any_thread(self) -> None:
        sf.fake_world(8).start()  # as a cell does that runs a second time
        with pytest.raises(sf.ShardError, match=r"first: sf.fake_world\(8\).stop\(\)"):
            sf.fake_world(8).start()
        with pytest.raises(sf.ShardError, match=r"try: sf.fake_world\(8\).stop\(\)"):
            sf.fake_world(4).stop()
        thread = threading.Thread(target=sf.fake_world(8).stop)
        thread.start()
        thread.join()
        assert current_world().size == 1

    def test_what_start_has_not_entered_is_not_stopped(self) -> None:
        with pytest.raises(sf.ShardError, match="was not started or was already stopped"):
            sf.fake_world(8).stop()
        world = sf.fake_world(2)
        with world:
            with pytest.raises(sf.ShardError, match="a world that a `with` block has entered"):
                world.stop()
            assert current_world().size == 2

    def test_a_world_whose_group_the_user_destroys_is_over(self) -> None:
        sf.fake_world(4).start()
        dist.destroy_process_group()
        before = DTensor.__new__
        with sf.fake_world(2):
            assert current_world().size == 2
        assert DTensor.__new__ is not before


def test_a_comparison_names_who_does_not_come_and_what_differs() -> None:
    store = _compat.own_store()
    with pytest.raises(sf.RendezvousError) as late:
        compare("f", store, "a", (0, 3), "x", 0.05)
    assert "f: rank 0 waited 0.05 s for the other ranks\n  missing: ranks 1, 2" in str(late.value)
    for rank, text in enumerate("xxy"):
        store.set(f"a/{rank}", text)
    with pytest.raises(sf.DivergenceError) as other:
        compare("f", store, "a", (1, 3), "x", 0.05)
    differ = "f: ranks differ\n  rank 0: x\n  rank 2: y"
    assert differ in str(other.value)
    with pytest.raises(sf.DivergenceError) as same:
        compare("f", store, "a", (2, 3), "y", 0.05)
    assert differ in str(same.value), "the rank that differs quotes the same"


def test_equal_texts_pass_and_each_comparison_has_its_keys() -> None:
    store = _compat.own_store()
    store.set("a/1", "x")
    compare("f", store, "a", (0, 2), "x", 0.05)
    assert store.get("a/0") == b"x"
    store.set("b/1", "y")
    with pytest.raises(sf.DivergenceError, match="pass the same arguments on every rank"):
        compare("f", store, "b", (0, 2), "x", 0.05)
