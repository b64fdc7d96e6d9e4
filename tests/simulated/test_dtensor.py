"""DTensors outside of functions: a simulated world answers as processes under torchrun do."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from versions import is_before, needs_torch

import shardfn as sf
from shardfn import P
from tests.eager import eager

MESHES = {(2,): ("dp",), (2, 2): ("dp", "tp")}
CLIPS = ("sgd", "adamw", "adamw, one by one")  # gradients that are Partial


def _everything(shape: tuple[int, ...]) -> dict[str, Any]:
    """The answers of all scripts, as this rank sees them."""
    mesh = sf.make_mesh(shape, MESHES[shape])
    rank = torch.distributed.get_rank()
    return {name: eager.of_rank(eager.answer(name, mesh), rank) for name in eager.SCRIPTS}


@pytest.fixture(scope="module", params=MESHES, ids=str)
def answers(request: pytest.FixtureRequest) -> Any:
    """(shape of the mesh, the answers of each real rank)."""
    shape = request.param
    return shape, run_ranks(torch.Size(shape).numel(), _everything, shape)


@pytest.mark.parametrize("name", eager.SCRIPTS)
def test_a_script_answers_as_on_real_ranks(name: str, answers: Any) -> None:
    shape, wanted = answers
    if is_before("2.12") and name in CLIPS:
        pytest.skip("torch 2.11 clips Partial gradients wrongly on real ranks")
    with sf.fake_world(len(wanted)):
        found = eager.answer(name, sf.make_mesh(shape, MESHES[shape]))
        for rank, real in enumerate(wanted):
            _assert_same(eager.of_rank(found, rank), real[name])


def _assert_same(got: Any, wanted: Any) -> None:
    assert type(got) is type(wanted)
    if isinstance(got, torch.Tensor):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    elif isinstance(got, dict):
        assert got.keys() == wanted.keys()
        _assert_same(list(got.values()), list(wanted.values()))
    elif isinstance(got, list | tuple):
        assert len(got) == len(wanted)
        for a, b in zip(got, wanted, strict=True):
            _assert_same(a, b)
    else:
        assert got == pytest.approx(wanted) if isinstance(got, float) else got == wanted


MOVES: dict[str, tuple[list[Any], Any]] = {
    "gathered": ([Shard(0)], lambda x, m: x.redistribute(m, [Replicate()]).to_local()),
    "sharded": ([Replicate()], lambda x, m: x.redistribute(m, [Shard(1)]).full_tensor()),
    "resharded": ([Shard(0)], lambda x, m: x.redistribute(m, [Shard(1)]).full_tensor()),
    "reduced": ([Partial()], lambda x, m: x.redistribute(m, [Replicate()]).full_tensor()),
    "scattered": ([Partial()], lambda x, m: x.redistribute(m, [Shard(0)]).full_tensor()),
    "full": ([Shard(1)], lambda x, m: x.full_tensor()),
    "local": ([Replicate()], lambda x, m: x.to_local()),
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", MOVES)
def test_a_redistribution_has_derivatives_of_any_order(name: str, ranks: int) -> None:
    placements, move = MOVES[name]
    value = torch.arange(20, dtype=torch.float64).reshape(4, 5) / 7
    with sf.fake_world(ranks):
        mesh = sf.make_mesh((ranks,), ("dp",))
        whole = sf.distribute(value, mesh, sf.P())
        terms = [value / ranks] * ranks
        x: Any = sf.from_local(terms, mesh, placements)
        x = x if name in ("reduced", "scattered") else whole.redistribute(mesh, placements)
        x = x.detach().requires_grad_()
        of = move(x, mesh) ** 4
        wanted, factor = value**4, 4
        for power in (3, 2, 1):
            (g,) = torch.autograd.grad(of.sum(), x, create_graph=True)
            wanted = value**power * factor
            torch.testing.assert_close(sf.full(g.detach()), wanted)
            of, factor = g.full_tensor(), factor * power


def test_most_scripts_are_not_refused(answers: Any) -> None:
    _, (real, *_) = answers
    refused = {name for name, x in real.items() if isinstance(x, str) and x == "refused"}
    assert refused == {
        "a plain tensor beside it",
        "numpy",
        "tolist",
        "allclose",
        "uneven rows flattened",
    }


@pytest.mark.parametrize("ranks", [3, 8])
def test_values_are_those_of_one_device_on_more_ranks(ranks: int) -> None:
    with sf.fake_world(ranks):
        mesh = sf.make_mesh((ranks,), ("dp",))
        x, w = eager.inputs(mesh)
        torch.testing.assert_close((x @ w).full_tensor(), eager.X @ eager.W)
        torch.testing.assert_close(torch.softmax(x, 0).full_tensor(), eager.X.softmax(0))
        moved = x.redistribute(placements=[Shard(1)]).redistribute(mesh, [Shard(0)])
        assert torch.equal(moved.full_tensor(), eager.X)
        assert torch.equal(sf.full(moved), eager.X)


def test_a_result_of_shard_is_such_a_tensor() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((4,), ("dp",))
        x = sf.distribute(eager.X, mesh, P("dp"))
        loss = sf.shard(lambda x: x.square().sum(), mesh, (P("dp"),))(x)
        assert f"{loss:.3f}" == f"{eager.X.square().sum():.3f}"
        assert float(loss) == pytest.approx(float(eager.X.square().sum()))
        again = sf.shard(lambda x: x * 2, mesh, (P("dp"),))(x * 2)
        torch.testing.assert_close((again + x).full_tensor(), eager.X * 5)


def test_one_rank_is_shown() -> None:
    with sf.fake_world(4):
        x = sf.distribute(eager.X, sf.make_mesh((4,), ("dp",)), P("dp"))
        shards = [x.to_local(rank=r) for r in range(4)]
        assert torch.equal(torch.cat(shards), eager.X)
        with pytest.raises(sf.ShardError, match=r"to_local: rank is 4\n  needed: one of"):
            x.to_local(rank=4)
    with sf.fake_world(4, rank=2):
        x = sf.distribute(eager.X, sf.make_mesh((4,), ("dp",)), P("dp"))
        assert str(x.to_local(rank=2)) in str(x)


def test_terms_that_differ_between_ranks_are_not_read_as_one_number() -> None:
    with sf.fake_world(2):
        x = sf.distribute(eager.X, sf.make_mesh((2,), ("dp",)), P("dp"))
        with pytest.raises(sf.DivergenceError) as caught:
            float(x.sum())
        assert str(caught.value).startswith(
            "float(x), x.item() or bool(x) of a DTensor: ranks hold different values ["
        )
        assert "placed [Partial(sum)]" in str(caught.value)
        assert caught.value.fix and caught.value.fix.startswith("x.full_tensor().item()")
        with pytest.raises(
            sf.ShardError, match="a Partial DTensor x, of which each rank holds only a term"
        ):
            f"{x.sum():.3f}"
        assert float(x.sum().full_tensor()) == pytest.approx(float(eager.X.sum()))


def test_a_view_in_place_is_refused() -> None:
    with sf.fake_world(2):
        x = sf.distribute(eager.X, sf.make_mesh((2,), ("dp",)), P("dp"))
        with pytest.raises(sf.ShardError, match="changes the shape of a DTensor in place"):
            x.t_()


def test_a_checkpoint_of_terms_is_refused() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        x = DTensor.from_local(eager.X, mesh, [Partial()])
        with pytest.raises(sf.ShardError, match="needed: Shard and Replicate"):
            x.__create_chunk_list__()


def test_after_its_world_it_is_read_and_what_communicates_is_refused_by_name() -> None:
    with sf.fake_world(2):
        x = sf.distribute(eager.X, sf.make_mesh((2,), ("dp",)), P("dp"))
    assert torch.equal(sf.full(x * 2), eager.X * 2)
    with pytest.raises(sf.ShardError) as caught:
        x.full_tensor()
    text = str(caught.value)
    assert "a DTensor: the op communicates, but the world of the DTensor has ended" in text
    assert "try: sf.full(x) reads the DTensor" in text


def test_nothing_of_torch_stays_replaced() -> None:
    before = (DTensor.__new__, Shard._make_shard_tensor, Replicate._make_replicate_tensor)
    with sf.fake_world(2):
        assert DTensor.__new__ is not before[0]
    after = (DTensor.__new__, Shard._make_shard_tensor, Replicate._make_replicate_tensor)
    assert before == after


def test_threads_compute_beside_each_other() -> None:
    with sf.fake_world(4):
        x = sf.distribute(eager.X, sf.make_mesh((4,), ("dp",)), P("dp"))
        found: list[torch.Tensor] = []

        def work() -> None:
            found.append(torch.stack([(x * i).sum(0).full_tensor() for i in range(5)]))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sums = torch.stack(found)
        wanted = torch.stack([(eager.X * i).sum(0) for i in range(5)])
        torch.testing.assert_close(sums, wanted.expand(4, 5, 3))


@needs_torch("2.12", "it calls no subclass outside of a fake world")
def test_a_tensor_of_another_world_is_refused_by_name() -> None:
    with sf.fake_world(4):
        x = sf.distribute(eager.X, sf.make_mesh((4,), ("dp",)), P("dp"))
    assert torch.equal((x + x).to_local(rank=0), eager.X[:2] * 2)
    assert torch.equal(sf.full(x), eager.X)
    with sf.fake_world(2), pytest.raises(sf.ShardError, match="the world has 2"):
        x.full_tensor()


def test_a_copy_has_memory_of_its_own() -> None:
    with sf.fake_world(2):
        x = sf.distribute(eager.X, sf.make_mesh((2,), ("dp",)), P("dp"))
        for other in (copy.deepcopy(x), x.clone(), pickle.loads(pickle.dumps(x))):
            other.zero_()
        assert torch.equal(x.full_tensor(), eager.X)
        with pytest.raises(TypeError, match="unsupported format string"):
            format(x, ".3f")


def test_its_repr_has_the_local_tensors_of_all_ranks() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        x = sf.distribute(torch.arange(6.0).reshape(3, 2), mesh, sf.P("dp"))
        nan = sf.distribute(torch.full((3,), torch.nan), mesh, sf.P())
    assert repr(x).split("\n") == [
        f"DTensor(shape=(3, 2), dtype=torch.float32, device_mesh={mesh}, placements={x.placements}",
        "  ranks 0, 1: tensor([[0., 1.],",
        "                      [2., 3.]])",
        "  ranks 2, 3: tensor([[4., 5.]]))",
    ]
    assert repr(nan).split("\n")[1] == "  ranks 0, 1, 2, 3: tensor([nan, nan, nan]))"
    assert str(x).startswith("DTensor(local_tensor=tensor([[0., 1.],")


def test_the_repr_of_many_different_ones_says_how_many_are_left() -> None:
    with sf.fake_world(20):
        x = sf.distribute(torch.arange(20), sf.make_mesh((20,), ("dp",)), sf.P("dp"))
    lines = repr(x).split("\n")
    assert lines[1] == "  rank 0: tensor([0])" and lines[-1] == "  and 4 more ranks)"


ARRAYS: dict[str, Any] = {
    "numpy": lambda x: x.numpy(),
    "numpy of a copy": lambda x: x.detach().cpu().numpy(),
    "tolist": lambda x: x.tolist(),
    "asarray": np.asarray,
    "from_dlpack": np.from_dlpack,
}


@pytest.mark.parametrize("read", ARRAYS)
def test_a_dtensor_that_is_read_as_an_array_says_what_to_write(read: str) -> None:
    x = torch.arange(6.0, requires_grad=True)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        run = lambda f, out: sf.shard(f, mesh, P("dp"), out_placements=out, backend="aten")(x)
        for f, out in ((torch.mean, P()), (torch.sin, P()), (torch.sin, P("dp"))):
            got, wanted = run(f, out), f(x).detach().numpy()
            with pytest.raises(
                sf.ShardError, match="is called on a DTensor, but torch supports it only for plain"
            ) as e:
                ARRAYS[read](got.detach())
            fix = str(e.value.fix).rpartition("or ")[2]
            np.testing.assert_allclose(np.array(eval(fix, {"sf": sf, "x": got})), wanted)
            if got.numel() == 1:
                assert "x.item()" in str(e.value.fix) and float(got.detach()) == wanted
