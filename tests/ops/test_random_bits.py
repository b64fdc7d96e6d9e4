"""random_bits: Philox's published answers; one number an element, whatever holds the element."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from worlds import simulated

import shardfn as sf
from shardfn import P
from shardfn.ops.random_bits import DRAW, DTYPES, FOLD_IN, SPLIT, philox, random_bits, strides_of

KEY = torch.tensor([7, 9])

# Random123 1.14, tests/kat_vectors, philox4x32 with 10 rounds: counter, key, answer.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter, key, answer", KNOWN)
def test_philox_gives_its_published_answers(counter: Any, key: Any, answer: Any) -> None:
    words = philox([torch.tensor(w) for w in counter], [torch.tensor(w) for w in key])
    assert tuple(int(w) for w in words) == answer


def _drawn(key: torch.Tensor, shape: tuple[int, ...], dtype: Any) -> torch.Tensor:
    return random_bits(key, None, list(shape), strides_of(shape), DRAW, 0, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_number_is_of_its_element_alone(dtype: torch.dtype) -> None:
    whole = _drawn(KEY, (6, 5), dtype)
    assert torch.equal(whole, _drawn(KEY, (30,), dtype).view(6, 5))
    part = random_bits(KEY, torch.tensor(2 * 5 + 1), [3, 2], [5, 1], DRAW, 0, dtype)
    assert torch.equal(part, whole[2:5, 1:3])
    assert whole.unique().numel() > 1


def test_uses_of_a_key_do_not_share_blocks() -> None:
    made = [
        random_bits(KEY, None, [1000], [1], use, 0, torch.int64) for use in (DRAW, SPLIT, FOLD_IN)
    ]
    assert torch.cat(made).unique().numel() == 3000


def test_elements_beyond_two_to_the_32_get_numbers_of_their_own() -> None:
    far = random_bits(KEY, torch.tensor(2**32), [4], [1], DRAW, 0, torch.int64)
    assert not torch.equal(far, _drawn(KEY, (4,), torch.int64))


@pytest.mark.parametrize("backend", ["aten", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_every_placement_holds_the_same_numbers(backend: str, dtype: torch.dtype) -> None:
    x = torch.zeros(5, 7, dtype=dtype)
    wanted = _drawn(KEY, (5, 7), dtype)
    specs = [P("a"), P(None, ("a", "b")), P("b", "a"), P(("b", "c"), "a")]
    with simulated(a=2, b=2, c=2) as mesh:
        for spec in specs if backend == "aten" else specs[-1:]:
            draw = sf.shard(
                lambda key, x: x + _drawn(key, (5, 7), dtype), mesh, (P(), spec), backend=backend
            )
            assert "no communication" in str(draw.lower(KEY, x))
            assert torch.equal(sf.full(draw(KEY, x)), wanted), spec


def test_empty_shards_and_empty_tensors() -> None:
    with simulated(a=8) as mesh:
        draw = sf.shard(
            lambda key, x: x + _drawn(key, tuple(x.shape), x.dtype), mesh, (P(), P("a"))
        )
        for n in (0, 1, 3):
            wanted = _drawn(KEY, (n, 2), torch.float64)
            got = draw(KEY, torch.zeros(n, 2, dtype=torch.float64))
            assert torch.equal(sf.full(got), wanted)


@pytest.mark.parametrize("batched", ["key", "start", "both"])
def test_vmap_equals_a_loop(batched: str) -> None:
    keys = torch.stack([KEY, KEY + 1, KEY + 2])
    starts = torch.tensor([0, 5, 9])
    dims = {"key": (0, None), "start": (None, 0), "both": (0, 0)}[batched]

    def draw(key: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return random_bits(key, start, [3, 2], [2, 1], DRAW, 0, torch.float32)

    args = [a if d == 0 else a[0] for a, d in zip((keys, starts), dims, strict=True)]
    got = sf.jit(sf.vmap(draw, in_axes=dims))(*args)
    for i in range(3):
        own = [a[i] if d == 0 else a for a, d in zip(args, dims, strict=True)]
        assert torch.equal(got[i], draw(*own))


def test_nested_vmap_over_sharded_keys() -> None:
    keys = torch.arange(3 * 4 * 2).view(3, 4, 2)

    def draw(key: torch.Tensor) -> torch.Tensor:
        return _drawn(key, (5,), torch.float32)

    wanted = torch.stack([torch.stack([draw(k) for k in row]) for row in keys])
    with simulated(a=2, b=3) as mesh:
        for spec in (P("a"), P(None, "b"), P("b", "a")):
            both = sf.shard(sf.vmap(sf.vmap(draw)), mesh, (spec,))
            assert "no communication" in str(both.lower(keys))
            assert torch.equal(sf.full(both(keys)), wanted)


def test_no_counter_is_used_twice() -> None:
    numbers = [
        tuple(_drawn(KEY, shape, torch.int64).flatten().tolist())
        for shape in itertools.product((3, 4), (5,))
    ]
    assert numbers[0] == numbers[1][:15]  # by element, not by shape
    assert len(set(numbers[1])) == 20
