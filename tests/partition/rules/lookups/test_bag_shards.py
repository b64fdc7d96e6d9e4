"""Embedding bags on shards: programs equal one device, and gather no table or activation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import equal
from ranks import run_ranks

import shardfn as sf
from shardfn import P

ROWS, FEATURES, LONG = 11, 6, 3
SPECS = {"rows": P("tp"), "features": P(None, "tp"), "both": P("dp", "tp")}


def loss(table: Any, weights: Any, at: Any, mode: str, padding: int | None) -> Any:
    given = weights if mode == "sum" else None
    out = F.embedding_bag(at, table, mode=mode, per_sample_weights=given, padding_idx=padding)
    return out.sin().square().sum()


def inputs(count: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(count)
    table = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
    weights = torch.randn(count, LONG, generator=generator, dtype=torch.float64)
    at = torch.randint(0, ROWS, (count, LONG), generator=generator)
    return table, weights, at


def step(mode: str, padding: int | None) -> Any:
    wrt = (0, 1) if mode == "sum" else 0
    return sf.value_and_grad(
        lambda table, weights, at: loss(table, weights, at, mode, padding), argnums=wrt
    )


@pytest.mark.parametrize(
    ("mode", "spec", "count", "padding"),
    [
        ("sum", "rows", 8, None),
        ("mean", "rows", 5, 2),
        ("sum", "features", 5, 2),
        ("mean", "both", 8, None),
    ],
)
def test_a_step_of_a_table_equals_one_device_and_gathers_nothing(
    mode: str, spec: str, count: int, padding: int | None
) -> None:
    args = inputs(count)
    wanted = step(mode, padding)(*args)
    with sf.fake_world(6):
        mesh = sf.make_mesh((2, 3), ("dp", "tp"))
        ins = (SPECS[spec], P("dp"), P("dp"))
        sharded = sf.shard(step(mode, padding), mesh, ins, backend="aten")
        equal(sf.full(sharded(*args)), wanted)
        lowered = sharded.lower(*args)
    if spec != "both":
        kinds = {c.kind for c in lowered.collectives}
        assert kinds == {"all_reduce"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_of_which_torch_keeps_no_places_equal_one_device(dtype: torch.dtype) -> None:
    table, _, at = inputs(6)
    loss = lambda table, at: F.embedding_bag(at, table, mode="sum").square().sum()
    fn, args = sf.value_and_grad(loss), (table.to(dtype), at)
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("dp",))
        for spec in (P(), P("dp"), P(None, "dp")):
            got = sf.shard(fn, mesh, (spec, P("dp")), backend="aten")(*args)
            torch.testing.assert_close(sf.full(got), fn(*args), rtol=0.02, atol=0.02)


def test_a_rank_without_bags_has_the_results_of_the_others() -> None:
    table, _, at = inputs(3)
    loss = lambda table, at: F.embedding_bag(at, table, mode="mean").square().sum()
    fn = sf.value_and_grad(loss)
    with sf.fake_world(5):
        mesh = sf.make_mesh((5,), ("dp",))
        got = sf.shard(fn, mesh, (P(), P("dp")), backend="aten")(table, at)
        equal(sf.full(got), fn(table, at))


def _on_two_ranks() -> Any:
    mesh = sf.make_mesh((2,), ("dp",))
    ins = (P("dp"), P("dp"), P("dp"))
    sharded = sf.shard(step("sum", None), mesh, ins, backend="aten")
    return sf.full(sharded(*inputs(5)))


def test_two_processes_compute_what_one_device_does() -> None:
    wanted = step("sum", None)(*inputs(5))
    for real in run_ranks(2, _on_two_ranks):
        equal(real, wanted)


def ragged(mode: str) -> Any:
    def fn(table: Any, at: Any, starts: Any) -> Any:
        out = F.embedding_bag(at, table, starts, mode=mode)
        return out.sin().square().sum()

    return sf.value_and_grad(fn)


@pytest.mark.parametrize(
    ("mode", "spec"), [("sum", P(None, "tp")), ("mean", P("tp")), ("max", P(None, "tp"))], ids=str
)
def test_bags_of_any_length_equal_one_device(mode: str, spec: P) -> None:
    table, _, at = inputs(8)
    args = table, at.flatten(), torch.tensor([0, 0, 4, 9, 23])
    wanted = ragged(mode)(*args)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        sharded = sf.shard(ragged(mode), mesh, (spec, P(), P()), backend="aten")
        equal(sf.full(sharded(*args)), wanted)


def added(padding: int | None) -> Any:
    """Long bags of narrow rows: their sums are smaller than their indices."""

    def fn(table: Any, weights: Any, at: Any, starts: Any) -> Any:
        out = F.embedding_bag(
            at, table, starts, per_sample_weights=weights, mode="sum", padding_idx=padding
        )
        return (out @ table.T).sin().square().sum()

    return sf.value_and_grad(fn, argnums=(0, 1))


LENGTHS = torch.tensor([0, 0, 40, 95, 200])


@pytest.mark.parametrize("spec", [P(), P("tp"), P(None, "tp")], ids=str)
def test_ranks_add_their_indices_to_bags_of_any_length(spec: P) -> None:
    table, weights, at = inputs(68)
    args = table[:, :2], weights.flatten()[:203], at.flatten()[:203], LENGTHS
    wanted = added(3)(*args)
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        ins = (spec, P("dp"), P("dp"), P())
        sharded = sf.shard(added(3), mesh, ins, backend="aten")
        equal(sf.full(sharded(*args)), wanted)
        lowered = sharded.lower(*args)
    over_dp = {c.kind for c in lowered.collectives if c.axis == "dp"}
    assert over_dp == {"all_reduce"}


def test_the_mean_of_a_bag_of_any_length_is_known_on_each_rank() -> None:
    table, _, at = inputs(68)
    args = table[:, :2], at.flatten()[:203], LENGTHS
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("dp",))
        ins = (P(), P("dp"), P())
        sharded = sf.shard(ragged("mean"), mesh, ins, backend="aten")
        equal(sf.full(sharded(*args)), ragged("mean")(*args))
        kinds = [c.kind for c in sharded.lower(*args).collectives]
    assert kinds == ["all_reduce"] * 2
