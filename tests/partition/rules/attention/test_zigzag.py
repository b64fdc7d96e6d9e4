"""A causal ring over a zigzag: as on one device, and every block is visible."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from attention import Case, cubed, value_and_gradients
from equality import close
from worlds import simulated

import shardfn as sf
from shardfn import P

RING = {"cp": "ring"}


def case_of(n: int, heads: int, few: int) -> Case:
    """Causal attention to 3 positions for each of 2n chunks."""
    return Case("zigzag", queries=6 * n, keys=6 * n, heads=heads, few=few, causal=True)


def steps(case: Case, mesh: Any, batch: Any = None, **options: Any) -> Any:
    """The attention and its gradients over a zigzag."""
    placed = (P(batch, None, sf.zigzag("cp")),) * 3
    options = {"backend": "aten", **options}
    gradients = sf.shard(sf.grad(cubed(case.attend), (0, 1, 2)), mesh, placed, **options)
    return sf.shard(case.attend, mesh, placed, placed[0], **options), gradients


@pytest.mark.parametrize("attention", [RING, None, {"cp": "ulysses"}])
@pytest.mark.parametrize(("n", "heads", "few"), [(2, 4, 2), (3, 6, 3), (4, 4, 4), (8, 8, 8)])
def test_causal_attention_over_a_zigzag_is_that_of_one_device(
    n: int, heads: int, few: int, attention: Any
) -> None:
    case = case_of(n, heads, few)
    args = case.tensors()
    with simulated(cp=n) as mesh:
        value, gradients = steps(case, mesh, attention=attention)
        close(sf.full((value(*args), gradients(*args))), value_and_gradients(case, args))


def test_few_key_heads_travel_over_a_zigzag() -> None:
    case = case_of(4, 6, 2)
    args = case.tensors()
    with simulated(dp=2, cp=4) as mesh:
        value, gradients = steps(case, mesh, "dp", attention=RING)
        close(sf.full((value(*args), gradients(*args))), value_and_gradients(case, args))


def test_each_step_is_two_blocks_of_one_chunk_and_the_first_is_the_causal_one() -> None:
    n = 4
    case = case_of(n, 2, 2)
    args = case.tensors()
    with simulated(cp=n) as mesh:
        value, _ = steps(case, mesh, attention=RING)
        lowered = value.lower(*args)
    calls = [x for x in lowered.program.graph.nodes if "flash_attention" in str(x.target)]
    rows = Counter((x.args[0].meta["val"].shape[2], x.args[1].meta["val"].shape[2]) for x in calls)
    assert rows == {(6, 6): 1, (3, 3): 2 * (n - 1)}
    assert [x.args[4] for x in calls].count(True) == 1


def test_a_mask_or_no_order_over_a_zigzag_is_right() -> None:
    for case in (Case("plain", queries=12, keys=12), Case("window", queries=12, keys=12, window=3)):
        args = case.tensors()
        rows = (P(sf.zigzag("cp")),) if case.window else ()
        placed = (*(P(None, None, sf.zigzag("cp")),) * 3, *rows)
        with simulated(cp=3) as mesh:
            step = sf.shard(sf.grad(cubed(case.attend), (0, 1, 2)), mesh, placed, backend="aten")
            close(sf.full(step(*args)), value_and_gradients(case, args)[1])
