"""Minimum cuts equal a search over all of them."""

from __future__ import annotations

import itertools
import random

import pytest

from shardfn.partition.minimum_cut import INFINITE, minimum_cut

SIZE, SOURCE, SINK = 7, 0, 6


def network(seed: int, unit: int = 1) -> dict[tuple[int, int], int]:
    """Edges upwards, of which some have no limit."""
    chosen = random.Random(seed)
    pairs = [x for x in itertools.combinations(range(SIZE), 2) if chosen.random() < 0.6]
    edges = {pair: chosen.randrange(9) * unit for pair in pairs}
    for pair in pairs:
        if chosen.random() < 0.2 and pair != (SOURCE, SINK):
            edges[pair] = INFINITE
    return edges


def price(edges: dict[tuple[int, int], int], below: set[int]) -> int:
    """The capacity of the edges that enter a set."""
    return sum(c for (a, b), c in edges.items() if a not in below and b in below)


@pytest.mark.parametrize("unit", [1, 1 << 40], ids=["small", "beyond 32 bits"])
def test_a_cut_is_the_cheapest_and_next_to_the_sink(unit: int) -> None:
    tried = 0
    for seed in range(200):
        edges = network(seed, unit)
        inner = range(SOURCE + 1, SINK)
        sets = [
            {SINK, *chosen}
            for count in range(len(inner) + 1)
            for chosen in itertools.combinations(inner, count)
        ]
        least = min(price(edges, below) for below in sets)
        if least >= INFINITE:
            continue
        found = minimum_cut(edges, SOURCE, SINK)
        assert price(edges, found) <= least * (1 + 1e-6), seed
        cheapest = [below for below in sets if price(edges, below) == least]
        assert unit > 1 or found == set.intersection(*cheapest), seed
        tried += 1
    assert tried > 50
