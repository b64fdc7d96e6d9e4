"""The ring: chunks of Gloo's lengths, and sums in Gloo's order, to the last bit."""

from __future__ import annotations

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

from shardfn.runtime.ring import SEGMENT_BYTES, chunk_length, ring_reduce

COUNTS = st.integers(0, 40) | st.integers(0, 3_000_000)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)


def values(n: int, count: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Numbers of very different sizes, whose sum depends on its order."""
    g = torch.Generator().manual_seed(n)
    size = lambda: 10.0 ** torch.randint(-6, 6, (count,), generator=g)
    return [
        (torch.randn(count, generator=g, dtype=torch.float64) * size()).to(dtype) for _ in range(n)
    ]


@given(count=COUNTS, itemsize=st.sampled_from((1, 2, 4, 8, 16)), n=st.integers(1, 8))
@examples(300)
def test_chunks_cover_everything_in_whole_segments(count: int, itemsize: int, n: int) -> None:
    length = chunk_length(count, itemsize, n)
    assert length * n >= count, "every element is in some chunk"
    segment = _segment_bytes(count, itemsize, n)
    assert segment % itemsize == 0 and segment <= SEGMENT_BYTES + itemsize
    assert (length * itemsize) % segment == 0 if segment else length == 0
    assert not segment or length * itemsize // segment >= 2, "two or more segments a rank"


def _segment_bytes(count: int, itemsize: int, n: int) -> int:
    """Bytes are shared among the fewest segments that are a multiple of n, at least 2 n, and
    each at most the largest.
    """
    segments = 2 * n
    while -(-count * itemsize // segments) > max(itemsize, SEGMENT_BYTES // itemsize * itemsize):
        segments += n
    bytes_each = -(-count * itemsize // segments)
    return -(-bytes_each // itemsize) * itemsize


LENGTHS = (
    (1, 2, 2),
    (8, 2, 4),
    (9, 2, 6),
    (7, 3, 4),
    (12, 3, 4),
    (13, 4, 4),
    (17, 4, 6),
    (0, 4, 0),
)


@pytest.mark.parametrize(("count", "n", "wanted"), LENGTHS)
def test_the_lengths_of_small_chunks(count: int, n: int, wanted: int) -> None:
    assert chunk_length(count, 8, n) == wanted


def reference(found: list[torch.Tensor]) -> torch.Tensor:
    """Element by element: the chunk that it lies in says which rank's term comes first; then
    round backwards.
    """
    n, out = len(found), torch.empty_like(found[0])
    length = chunk_length(out.numel(), out.element_size(), n)
    for e in range(out.numel()):
        chunk = e // length
        order = [(chunk - 1 - j) % n for j in range(n)]
        total = found[order[0]][e]
        for rank in order[1:]:
            total = total + found[rank][e]
        out[e] = total
    return out


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 17, 33])
def test_sums_are_taken_in_the_order_of_the_ring_to_the_last_bit(n: int, count: int) -> None:
    for dtype in DTYPES:
        found = values(n, count, dtype)
        assert torch.equal(ring_reduce(found, torch.add), reference(found))


def test_the_order_on_four_ranks_is_3_2_1_0_then_0_3_2_1() -> None:
    big, small = (
        torch.tensor(2.0**53, dtype=torch.float64),
        torch.tensor(1.0, dtype=torch.float64),
    )
    rank = lambda x: x.repeat(16)
    found = [rank(big), rank(small), rank(small), rank(-big)]
    assert chunk_length(16, 8, 4) == 4
    got = ring_reduce(found, torch.add).view(4, 4)[:, 0].tolist()
    by_hand = [
        ((-big + 1) + 1) + big,
        ((big - big) + 1) + 1,
        ((small + big) - big) + 1,
        ((small + 1) + big) - big,
    ]
    assert got == [float(x) for x in by_hand] == [2.0, 2.0, 1.0, 2.0]


@given(n=st.integers(1, 6), shape=st.lists(st.integers(0, 5), max_size=3))
@examples(50)
def test_a_ring_sum_is_the_plain_sum_up_to_rounding_and_a_maximum_is_exact(
    n: int, shape: list[int]
) -> None:
    g = torch.Generator().manual_seed(n)
    found = [torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(n)]
    stacked = torch.stack(found)
    torch.testing.assert_close(
        ring_reduce(found, torch.add), stacked.sum(0), rtol=1e-12, atol=1e-12
    )
    assert torch.equal(ring_reduce(found, torch.maximum), stacked.amax(0))
    assert torch.equal(ring_reduce(found, torch.minimum), stacked.amin(0))
    assert ring_reduce(found, torch.add).shape == tuple(shape)


def test_the_values_are_left_alone() -> None:
    found = values(3, 11)
    before = [v.clone() for v in found]
    out = ring_reduce(found, torch.add)
    out.zero_()
    assert all(torch.equal(a, b) for a, b in zip(found, before, strict=True))


def test_nan_spreads() -> None:
    found = [torch.tensor([1.0, float("nan")]), torch.tensor([2.0, 3.0])]
    for reduce in (torch.add, torch.maximum, torch.minimum):
        assert ring_reduce(found, reduce).isnan().tolist() == [False, True]
