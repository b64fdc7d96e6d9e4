"""Attention whose keys travel around a ring: as on one device, with a shard of memory each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention import CASES, Case, cubed, sharded, value_and_gradients
from equality import close
from torch import Tensor
from worlds import simulated

import shardfn as sf
from shardfn import P
from shardfn.partition.rules.attention.ring import pieces

RING = {"cp": "ring"}
TRAVELS = [
    case for case in CASES if not case.causal or case.queries == case.keys
]  # others are refused
NAMES = [case.name for case in TRAVELS]


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("case", TRAVELS, ids=NAMES)
def test_attention_over_a_ring_is_that_of_one_device(case: Case, n: int) -> None:
    args = case.tensors()
    with simulated(cp=n) as mesh:
        found = sharded(case, mesh, args, "cp", attention=RING)
        close(found, value_and_gradients(case, args))


@pytest.mark.parametrize("case", TRAVELS, ids=NAMES)
def test_the_batch_lies_on_another_axis(case: Case) -> None:
    args = case.tensors()
    with simulated(dp=2, cp=3) as mesh:
        found = sharded(case, mesh, args, "cp", "dp", attention=RING)
        close(found, value_and_gradients(case, args))


@pytest.mark.parametrize("few", [1, 2, 4])
def test_heads_lie_on_another_axis(few: int) -> None:
    case = Case("heads", queries=9, keys=9, heads=4, few=few, causal=True)
    args = case.tensors()
    keys = P(None, "tp" if few == 4 else None, "cp")
    placed = (P(None, "tp", "cp"), keys, keys)
    with simulated(cp=3, tp=4) as mesh:
        step = sf.grad(cubed(case.attend), (0, 1, 2))
        step = sf.shard(step, mesh, placed, backend="aten", attention=RING)
        close(sf.full(step(*args)), value_and_gradients(case, args)[1])


@pytest.mark.parametrize("few", [2, 4])
def test_heads_over_one_axis_and_a_ring_over_another_are_asked_for(few: int) -> None:
    case = Case("two axes", queries=17, keys=17, heads=4, few=few, causal=True)
    args, ways = case.tensors(), {"cp": "ulysses", "cp2": "ring"}
    with simulated(cp=2, cp2=3) as mesh:
        close(
            sharded(case, mesh, args, ("cp2", "cp"), attention=ways),
            value_and_gradients(case, args),
        )
        placed = (P(None, None, ("cp2", "cp")),) * 3
        options = {"attention": ways, "backend": "aten"}
        lowered = sf.shard(case.attend, mesh, placed, placed[0], **options).lower(*args)
    sent = [(c.kind, c.axis) for c in lowered.collectives]
    assert sorted(sent) == [("all_to_all", "cp")] * 4 + [("ppermute", "cp2")] * 2


def test_another_axis_shards_the_queries_of_a_ring() -> None:
    case = Case("across", queries=12, keys=7)
    args = case.tensors()
    queries, keys = P(None, None, ("cp", "tp")), P(None, None, "cp")
    with simulated(cp=3, tp=2) as mesh:
        step = sf.grad(cubed(case.attend), (0, 1, 2))
        step = sf.shard(step, mesh, (queries, keys, keys), backend="aten", attention=RING)
        close(sf.full(step(*args)), value_and_gradients(case, args)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_terms_of_small_dtypes_are_summed_in_float32(dtype: torch.dtype) -> None:
    case = Case("small", queries=13, keys=13, causal=True)
    args = case.tensors(dtype)
    exact = value_and_gradients(case, [x.double() for x in args])
    with simulated(cp=4) as mesh:
        found = sharded(case, mesh, args, "cp", attention=RING)
    bound = {torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for x, wanted in zip((found[0], *found[1]), (exact[0], *exact[1]), strict=True):
        assert x.dtype == dtype
        assert (x - wanted).norm() <= bound * wanted.norm()


def lowered(case: Case, mesh: Any, **options: Any) -> Any:
    step = sf.grad(cubed(case.attend), (0, 1, 2))
    placed = case.placements("cp")
    return sf.shard(step, mesh, placed, **{"backend": "aten", **options}).lower(*case.tensors())


def test_a_ring_of_n_sends_3n_minus_2_chunks_each_with_bytes_axis_and_line() -> None:
    case = Case("causal", queries=16, keys=16, causal=True)
    with simulated(cp=4) as mesh:
        records = lowered(case, mesh, attention=RING).collectives
    chunk = 2 * 3 * 4 * (4 + 4) * 8
    assert len(records) == 10
    assert {(x.kind, x.axis, x.nbytes) for x in records} == {("ppermute", "cp", chunk)}
    assert all(x.source and "attention.py" in x.source for x in records)
    assert not any(x.implicit for x in records)


def test_a_ring_is_implicit_where_nobody_asks_for_it() -> None:
    case = Case("causal", queries=16, keys=16, causal=True)
    with simulated(cp=4) as mesh:
        assert not any(x.implicit for x in lowered(case, mesh, attention=RING).transfers)
        found = lowered(case, mesh, attention=RING)
    assert {x.kind for x in found.transfers} == {"ppermute"}
    assert {x.argument for x in found.transfers} == {"it"}


def test_a_rank_holds_a_chunk_of_keys_and_never_all_of_them() -> None:
    case = Case("memory", queries=1024, keys=1024, heads=2, few=2, causal=True)
    peaks = {}
    for n in (2, 4, 8):
        with simulated(cp=n) as mesh:
            peaks[n] = {
                way: lowered(case, mesh, attention={"cp": way}).memory.peak
                for way in ("ring", "gather")
            }
    assert peaks[8]["ring"] < 0.51 * peaks[4]["ring"]
    assert peaks[4]["ring"] < 0.6 * peaks[2]["ring"]
    assert peaks[8]["ring"] < 0.35 * peaks[8]["gather"]


def test_no_backend_keeps_what_each_step_adds_to_the_gradients() -> None:
    case = Case("memory", queries=1024, keys=1024, heads=2, few=2, causal=True)
    with simulated(cp=8) as mesh:
        by_op, fused = (
            lowered(case, mesh, attention=RING, backend=backend).memory.peak
            for backend in ("aten", "inductor")
        )
    assert fused < 1.2 * by_op


def test_time_counts_the_permutes() -> None:
    case = Case("causal", queries=16, keys=16, causal=True)
    with simulated(cp=4) as mesh:
        assert "ppermute" in str(lowered(case, mesh, attention=RING).time())


def layer(w: Tensor, x: Tensor) -> Tensor:
    """Attention of four query heads and two key heads, with its projections."""
    q, k, v = (x @ w).split([16, 8, 8], -1)
    q, k, v = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return x + out.transpose(1, 2).flatten(2)


def of_layers(step: Any) -> Any:
    """A loss of three layers, whose weights are stacked."""
    return lambda w, x: step(w, x).square().mean()


def in_python(w: Tensor, x: Tensor) -> Tensor:
    for i in range(3):
        x = layer(w[i], x)
    return x


def by_scan(w: Tensor, x: Tensor) -> Tensor:
    return sf.scan(lambda x, w: (layer(w, x), None), x, w)[0]


def checkpointed(w: Tensor, x: Tensor) -> Tensor:
    return sf.scan(lambda x, w: (sf.checkpoint(layer)(w, x), None), x, w)[0]


def mapped(w: Tensor, x: Tensor) -> Tensor:
    return sf.vmap(lambda x: in_python(w, x[None])[0])(x)


@pytest.mark.parametrize("way", ["ring", "gather"])
@pytest.mark.parametrize("step", [in_python, by_scan, checkpointed, mapped])
def test_layers_are_right_in_loops_checkpoints_and_vmap(step: Any, way: str) -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(3, 16, 32, generator=generator, dtype=torch.float64) / 4
    x = torch.randn(2, 7, 16, generator=generator, dtype=torch.float64)
    wanted = torch.func.grad_and_value(of_layers(in_python), (0, 1))(w, x)
    with simulated(dp=2, cp=3) as mesh:
        run = sf.value_and_grad(of_layers(step), (0, 1))
        placed = (P(), P("dp", "cp"))
        run = sf.shard(run, mesh, placed, backend="aten", attention={"cp": way})
        value, gradients = sf.full(run(w, x))
    close((gradients, value), wanted)


@pytest.mark.parametrize("size", range(1, 14))
@pytest.mark.parametrize("n", range(1, 8))
def test_pieces_of_chunks_are_what_ranks_have(size: int, n: int) -> None:
    full = -(-size // n)
    of_ranks = [min(full, max(size - r * full, 0)) for r in range(n)]
    for r, own in enumerate(of_ranks):
        held = [end - start for start, end, count in pieces(size, full, n) if r < count]
        assert sum(held) == own
