"""The lock of every transform, in every kind of world."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import shardfn as sf
from shardfn import P


def dense(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((x @ w) ** 2).sum()


def stepped(params: Any, x: torch.Tensor) -> Any:
    loss, grads = sf.value_and_grad(lambda w: dense(x, w))(params)
    return params - grads, loss


def staged(params: Any, x: torch.Tensor) -> torch.Tensor:
    return ((torch.tanh(x @ params["a"]) @ params["b"]) ** 2).mean()


W, ROWS = sf.ShapeDtype((6, 4)), sf.ShapeDtype((8, 6))
TWO = {"a": sf.ShapeDtype((4, 4)), "b": sf.ShapeDtype((4, 4))}
STAGES = {"a": P(pp=0), "b": P(pp=1)}


def one_axis(name: str) -> Any:
    return sf.make_mesh((4,), (name,))


FORMS: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    "jit": lambda: (sf.jit(dense), (ROWS, W)),
    "grad": lambda: (sf.grad(dense), (ROWS, W)),
    "value_and_grad": lambda: (sf.value_and_grad(dense, argnums=1), (ROWS, W)),
    "vmap": lambda: (sf.vmap(dense, in_axes=(0, None)), (ROWS, W)),
    "hessian": lambda: (sf.hessian(dense, argnums=1), (ROWS, W)),
    "bucketed_grad": lambda: (sf.bucketed_grad(dense), (ROWS, W)),
    "shard": lambda: (sf.shard(stepped, one_axis("dp"), (P(), P("dp"))), (W, ROWS)),
    "jit of shard": lambda: (sf.jit(sf.shard(stepped, one_axis("dp"), (P(), P("dp")))), (W, ROWS)),
    "grad of shard": lambda: (sf.grad(sf.shard(dense, one_axis("dp"), (P("dp"), P()))), (ROWS, W)),
    "shard_map": lambda: (
        sf.shard_map(
            lambda x, w: sf.psum(dense(x, w), "dp"), one_axis("dp"), (P("dp"), P()), P()
        ),
        (ROWS, W),
    ),
    "compose": lambda: (sf.compose(sf.shard(mesh=one_axis("dp")), sf.grad)(dense), (ROWS, W)),
    "accumulate": lambda: (
        sf.shard(lambda w, x: sf.accumulate(sf.value_and_grad(lambda w, x: dense(x, w)), 2)(w, x),
                 one_axis("dp"), (P(), P("dp"))),
        (W, ROWS),
    ),
    "pipelined_grad": lambda: (
        sf.shard(sf.pipelined_grad(staged, 2), sf.make_mesh((2, 2), ("pp", "dp")),
                 (STAGES, P("dp"))),
        (TWO, sf.ShapeDtype((8, 4))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_transform_has_a_lock(form: str, tmp_path: Path) -> None:
    with sf.fake_world(4, numerics=False):
        _check_form(form, tmp_path)


def _check_form(form: str, tmp_path: Path) -> None:
    fn, args = FORMS[form]()
    path = tmp_path / "step.json"
    first = sf.lock(fn, *args, path=path)
    assert first.state == "written" and first.price.ops
    again, args = FORMS[form]()
    sf.clear_cache()
    assert sf.lock(again, *args, path=path).state == "equal"
    fields = json.loads(path.read_text())
    line, row = next(iter(fields["ops"].items()))
    fields["ops"][line] = {name: count + 1 for name, count in row.items()}
    path.write_text(json.dumps(fields))
    with pytest.raises(sf.BudgetError, match="test_lock_worlds.py:\\d+ now runs"):
        sf.lock(again, *args, path=path)


@pytest.fixture
def world() -> Iterator[None]:
    with sf.fake_world(4, numerics=False):
        yield


def test_every_stage_of_a_pipeline_is_locked(world: None, tmp_path: Path) -> None:
    fn, args = FORMS["pipelined_grad"]()
    price = sf.lock(fn, *args, path=tmp_path / "step.json").price
    assert list(price.peak_bytes) == ["stage 0", "stage 1"]
    lowered = fn.lower(*args)
    assert price.peak_bytes["stage 0"] == lowered.memory.peak
    assert price.results == {
        "result[0]": "f32[]",
        "result[1]['a']": "f32[4, 4; pp=0]",
        "result[1]['b']": "f32[4, 4; pp=1]",
    }
    sent = [key for key in price.collectives if "send[pp]" in key]
    assert sent and price.bytes["send over pp"] > 0
    (both,) = (row for line, row in price.ops.items() if "::staged::return" in line)
    assert both["mm"] >= 5, "products of both stages, forward and backward"


def test_a_call_that_autograd_follows_has_two_programs(tmp_path: Path) -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        w = sf.distribute(torch.ones(6, 4), mesh, P()).requires_grad_()
        x = sf.distribute(torch.ones(8, 6), mesh, P("dp"))
        fn = sf.shard(dense, mesh, (P("dp"), P()), P(), backend="aten")
        price = sf.lock(fn, x, w, path=tmp_path / "step.json").price
        assert list(price.peak_bytes) == list(price.ms) == ["step", "backward"]
        assert sum(price.bytes.values()) == sf.explain(fn, x, w).nbytes > 6 * 4 * 4
        assert sf.lock(fn, x, w, path=tmp_path / "step.json").state == "equal"


def test_a_method_is_locked_with_its_instance(tmp_path: Path) -> None:
    class Model(NamedTuple):
        w: torch.Tensor

        @sf.jit
        def loss(self, x: torch.Tensor) -> torch.Tensor:
            return dense(x, self.w)

    price = sf.lock(
        Model(torch.ones(6, 4)).loss, torch.ones(8, 6), path=tmp_path / "step.json"
    ).price
    assert price.function == "jit(loss)"


def test_a_thousand_ranks_are_locked(tmp_path: Path) -> None:
    with sf.fake_world(1024, numerics=False):
        mesh = sf.make_mesh((128, 8), ("dp", "tp"))
        fn = sf.shard(stepped, mesh, (P(None, "tp"), P("dp")))
        args = (sf.ShapeDtype((64, 64)), sf.ShapeDtype((1024, 64)))
        price = sf.lock(fn, *args, path=tmp_path / "step.json").price
        assert price.mesh == "(dp=128, tp=8)" and price.arguments["x"] == "f32[1024@dp, 64]"
        assert sf.lock(fn, *args, path=tmp_path / "step.json").state == "equal"
    with sf.fake_world(1024, rank=5, numerics=False):
        mesh = sf.make_mesh((128, 8), ("dp", "tp"))
        other = sf.shard(stepped, mesh, (P(None, "tp"), P("dp")))
        with pytest.raises(sf.BudgetError, match="rank is 5, was 0"):
            sf.lock(other, *args, path=tmp_path / "step.json")
