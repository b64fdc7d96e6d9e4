"""torch's flex attention as one op, sharded over its batch, heads and queries: functions of the
numbers of samples, heads and queries see global numbers on each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from message import without_line
from ranks import run_ranks
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P
from shardfn.errors import PlacementError

BATCH, HEADS, LENGTH, BLOCK = 3, 4, 48, 8
SLOPE = torch.tensor([0.5, 0.25, 0.125, 0.0], dtype=torch.float64)
DOCUMENTS = torch.arange(LENGTH) // 20
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def documents(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i >= j) & (DOCUMENTS[i] == DOCUMENTS[j])


def of_each_head(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i >= j + h) | (i < 9 * b + 9)


def scored(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s * (b + 1) + SLOPE.to(s.dtype)[h] * (i - j)


def blocks(mask: Any, *batch: int | None, size: int = BLOCK) -> Any:
    return create_block_mask(mask, *batch, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=size)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a score": {"score_mod": scored},
    "a mask": {"block_mask": blocks(documents, None, None)},
    "one block": {"block_mask": blocks(documents, None, None, size=128)},
    "a mask of each head": {
        "block_mask": blocks(of_each_head, BATCH, HEADS),
        "score_mod": scored,
        "return_lse": True,
    },
}
MESHES: tuple[tuple[dict[str, int], P], ...] = (
    ({"cp": 2}, P("cp")),
    ({"cp": 3}, P(None, "cp")),
    ({"cp": 4}, P(None, None, "cp")),
    ({"cp": 2}, P(None, None, sf.zigzag("cp"))),
    ({"dp": 2, "cp": 2}, P("dp", None, "cp")),
    ({"dp": 2, "cp": 2}, P(None, "dp", "cp")),
    ({"dp": 2, "cp": 2}, P(None, None, ("dp", "cp"))),
    ({"dp": 2, "cp": 2}, P(("dp", "cp"))),
)


def tensors(keys: int = HEADS, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(keys)
    make = lambda n: torch.randn(BATCH, n, LENGTH, 16, generator=generator, dtype=dtype)
    return make(HEADS), make(keys), make(keys)


def attention(name: str, keys: int = HEADS) -> Callable[..., Any]:
    grouped = {"enable_gqa": True} if keys != HEADS else {}
    return lambda q, k, v: flex_attention(q, k, v, **OPTIONS[name], **grouped)


@pytest.mark.parametrize("keys", [HEADS, 2, 1])
@pytest.mark.parametrize("name", OPTIONS)
def test_values_on_every_mesh(name: str, keys: int) -> None:
    fn, args = attention(name, keys), tensors(keys)
    wanted = fn(*args)
    for axes, spec in MESHES:
        with simulated(**axes) as mesh:
            assert_close(sf.full(sf.shard(fn, mesh, spec, backend="aten")(*args)), wanted)


SENT = {P("cp"): [], P(None, "cp"): [], P(None, None, "cp"): ["all_gather", "all_gather"]}


@pytest.mark.parametrize("spec", SENT)
@pytest.mark.parametrize("name", OPTIONS)
def test_only_keys_are_gathered(name: str, spec: P) -> None:
    with simulated(cp=2) as mesh:
        lowered = sf.shard(attention(name), mesh, spec, backend="aten").lower(*tensors())
        assert [x.kind for x in lowered.collectives] == SENT[spec]


@pytest.mark.parametrize("name", ["a score", "a mask of each head"])
def test_compiled(name: str) -> None:
    fn, args = attention(name), tensors(dtype=torch.float32)
    wanted = fn(*args)
    for axes, spec in (MESHES[0], MESHES[4]):
        with simulated(**axes) as mesh:
            out = sf.full(sf.shard(fn, mesh, spec, backend="inductor")(*args))
            assert_close(out, wanted)


def test_a_method_that_is_asked_for() -> None:
    fn, args = attention("a mask"), tensors()
    with simulated(cp=2) as mesh:
        sharded = lambda way: sf.shard(
            fn, mesh, P(None, None, "cp"), backend="aten", attention={"cp": way}
        )
        for way, kind in {"gather": "all_gather", "ulysses": "all_to_all"}.items():
            assert {x.kind for x in sharded(way).lower(*args).collectives} == {kind}
            assert_close(sf.full(sharded(way)(*args)), fn(*args))
        with pytest.raises(PlacementError) as caught:
            sharded("ring")(*args)
    assert without_line(caught.value) == (
        "shard(<lambda>), attention: attention over 'cp' must be computed by 'ring', which is not "
        f"possible for {LENGTH} queries of 4 heads, {LENGTH} keys of 4, by flex_attention\n"
        "  needed: F.scaled_dot_product_attention, or queries whose number the blocks of the mask "
        "divide\n"
        "  try: attention={'cp': 'ulysses'}"
    )


def run() -> list[Any]:
    mesh = sf.make_mesh((2,), ("cp",))
    shard = lambda name, spec: sf.shard(attention(name), mesh, spec, backend="aten")
    names = "a mask", "a mask of each head"
    specs = P("cp"), P(None, None, "cp")
    return [sf.full(shard(name, spec)(*tensors())) for name in names for spec in specs]


def test_real_ranks_have_the_bits_of_simulated_ones() -> None:
    torch.set_num_threads(1)
    with sf.fake_world(2):
        wanted = run()
    for got in run_ranks(2, run):
        assert_close(got, wanted, rtol=0, atol=0)
