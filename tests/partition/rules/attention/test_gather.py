"""Attention of sharded queries and heads to gathered keys: as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention import CASES, Case, cubed, sharded, value_and_gradients
from equality import close
from worlds import simulated

import shardfn as sf
from shardfn import P

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
NAMES = [case.name for case in CASES]


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_attention_on_a_sharded_sequence_is_that_of_one_device(case: Case, n: int) -> None:
    args = case.tensors()
    with simulated(cp=n) as mesh:
        close(sharded(case, mesh, args, "cp"), value_and_gradients(case, args))


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_batch_lies_on_another_axis(case: Case) -> None:
    args = case.tensors()
    with simulated(dp=2, cp=3) as mesh:
        close(sharded(case, mesh, args, "cp", "dp"), value_and_gradients(case, args))


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_two_axes_shard_one_sequence(case: Case) -> None:
    args = case.tensors()
    with simulated(a=2, b=3) as mesh:
        close(sharded(case, mesh, args, ("a", "b")), value_and_gradients(case, args))


def lowered(case: Case, mesh: Any, *axes: Any) -> Any:
    loss = sf.grad(cubed(case.attend), (0, 1, 2))
    return sf.shard(loss, mesh, case.placements(*axes), backend="aten").lower(*case.tensors())


def kinds(program: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for record in program.collectives:
        found[record.kind] = found.get(record.kind, 0) + 1
    return found


@pytest.mark.parametrize("name", ["causal", "few key heads", "window", "mask of each head"])
def test_keys_are_gathered_and_their_gradients_scattered_and_nothing_else_is_sent(
    name: str,
) -> None:
    case = CASES[NAMES.index(name)]
    with simulated(cp=8) as mesh:
        assert kinds(lowered(case, mesh, "cp")) == {"all_gather": 4, "reduce_scatter": 2}


def test_no_rank_makes_a_mask_of_its_queries_and_all_keys() -> None:
    case = Case("causal", queries=64, keys=64, causal=True)
    with simulated(cp=4) as mesh:
        graph = lowered(case, mesh, "cp").program.graph
    shapes = [
        tuple(x.meta["val"].shape) for x in graph.nodes if hasattr(x.meta.get("val"), "shape")
    ]
    assert not [shape for shape in shapes if shape[-2:] == (16, 64)]


def test_ranks_select_the_key_heads_of_their_query_heads() -> None:
    case = Case("heads", heads=8, few=2, causal=True)
    args = case.tensors()
    placed = (P(None, "tp"), P(), P())
    with simulated(tp=8) as mesh:
        step = sf.shard(sf.grad(cubed(case.attend), (0, 1, 2)), mesh, placed, backend="aten")
        program = step.lower(*args)
        close(sf.full(step(*args)), value_and_gradients(case, args)[1])
    assert kinds(program) == {"all_reduce": 2}
    calls = program.program.graph.find_nodes(op="call_function", target=FLASH)
    assert [x.args[1].meta["val"].shape for x in calls] == [torch.Size((2, 1, 7, 4))]


@pytest.mark.parametrize("few", [1, 2, 3, 6])
@pytest.mark.parametrize("n", [2, 4, 5])
def test_heads_that_do_not_divide_are_right(few: int, n: int) -> None:
    case = Case("uneven heads", heads=6, few=few, causal=True)
    args = case.tensors()
    with simulated(tp=n) as mesh:
        placed = (P(None, "tp"), P(), P())
        step = sf.shard(sf.grad(cubed(case.attend), (0, 1, 2)), mesh, placed, backend="aten")
        close(sf.full(step(*args)), value_and_gradients(case, args)[1])


def test_heads_and_sequence_lie_on_two_axes() -> None:
    case = Case("both", queries=9, keys=9, heads=4, few=2, causal=True)
    args = case.tensors()
    placed = (P(None, "tp", "cp"), P(None, None, "cp"), P(None, None, "cp"))
    with simulated(cp=3, tp=4) as mesh:
        step = sf.shard(sf.grad(cubed(case.attend), (0, 1, 2)), mesh, placed, backend="aten")
        close(sf.full(step(*args)), value_and_gradients(case, args)[1])


HEADS = [P(None, ("a", "b")), P(None, ("b", "a")), P(None, "a"), P(None, "b"), P()]


@pytest.mark.parametrize("heads", [(8, 4), (12, 2)])
@pytest.mark.parametrize("of_keys", HEADS)
@pytest.mark.parametrize("of_queries", HEADS)
def test_heads_of_queries_and_of_fewer_keys_lie_on_any_axes(
    of_queries: P, of_keys: P, heads: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, n, 4, 4) for n in (heads[0], heads[1], heads[1])]
    args = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    step = sf.value_and_grad(lambda *xs: (attend(*xs) ** 3).sum(), (0, 1, 2))
    with simulated(a=2, b=2) as mesh:
        placements = (of_queries, of_keys, of_keys)
        got = sf.shard(step, mesh, placements, backend="aten")(*args)
        close(sf.tree_map(sf.full, got), step(*args))


@pytest.mark.parametrize("way", ["ring", "ulysses"])
def test_a_way_that_another_axis_excludes_is_refused_by_its_name(way: str) -> None:
    q, k = torch.ones(2, 8, 4, 4), torch.ones(2, 4 if way == "ulysses" else 8, 4, 4)
    attend = lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    placements = (P(None, "a", "b"), P(), P()) if way == "ulysses" else (P(None, None, "a"),) * 3
    with simulated(a=2, b=2) as mesh:
        fn = sf.shard(attend, mesh, placements, attention={"b": way}, backend="aten")
        with pytest.raises(sf.PlacementError) as caught:
            fn.lower(q, k, k)
    text = str(caught.value)
    assert f"attention over 'b' must be computed by '{way}', which does not go together" in text
    assert "how 'a' shards it" in text and caught.value.arg_path == "attention"
