"""Options that name mesh axes: one way of attention over an axis, or a named error."""

from __future__ import annotations

from typing import Any

import pytest
from attention import Case, cubed, sharded, value_and_gradients
from equality import close
from message import without_line
from worlds import simulated

import shardfn as sf

EVEN = Case("even", queries=8, keys=8, heads=4, few=4, causal=True)
SENT = {
    "ring": {("ppermute", False): 10},
    "gather": {("all_gather", False): 4, ("reduce_scatter", False): 2},
    "ulysses": {("all_to_all", False): 6},
}


def lowered(case: Case, mesh: Any, attention: Any, **options: Any) -> Any:
    step = sf.grad(cubed(case.attend), (0, 1, 2))
    placed = case.placements("cp")
    options = {"backend": "aten", "attention": attention, **options}
    return sf.shard(step, mesh, placed, **options).lower(*case.tensors())


@pytest.mark.parametrize("way", SENT)
def test_each_way_is_right_and_sends_what_it_says(way: str) -> None:
    args = EVEN.tensors()
    with simulated(cp=4) as mesh:
        attention = {"cp": way}
        close(sharded(EVEN, mesh, args, "cp", attention=attention), value_and_gradients(EVEN, args))
        records = lowered(EVEN, mesh, attention, implicit_comm="error").collectives
    found: dict[tuple[str, bool], int] = {}
    for record in records:
        key = record.kind, record.implicit
        found[key] = found.get(key, 0) + 1
    assert found == SENT[way]


def test_jit_of_dtensors_takes_it_too() -> None:
    args = EVEN.tensors()
    with simulated(cp=4) as mesh:
        placed = sf.distribute(args, mesh, EVEN.placements("cp"))
        run = sf.jit(EVEN.attend, backend="aten", attention={"cp": "ring"})
        close(sf.full(run(*placed)), value_and_gradients(EVEN, args)[0])
        assert {x.kind for x in run.lower(*placed).collectives} == {"ppermute"}


def test_an_axis_of_one_rank_has_no_way() -> None:
    with simulated(cp=1) as mesh:
        assert not lowered(EVEN, mesh, {"cp": "ring"}).collectives


NEEDED = "a dict of mesh axes, each with 'gather' or 'ring' or 'ulysses'"
REFUSED = {
    "no dict": ("ring", "attention is 'ring'", NEEDED, "attention={'cp': 'ring'}"),
    "an unknown way": (
        {"cp": "rang"},
        "attention['cp'] is 'rang'",
        NEEDED,
        "attention={'cp': 'ring'}",
    ),
    "an unknown axis": (
        {"tp": "ring"},
        "attention names the axis 'tp', and the mesh has cp",
        NEEDED,
        "attention={'cp': 'ring'}",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_option_is_refused_with_one_that_can_be_pasted(name: str) -> None:
    attention, got, needed, fix = REFUSED[name]
    with simulated(cp=4) as mesh, pytest.raises(sf.PlacementError) as caught:
        lowered(EVEN, mesh, attention)
    head = f"shard(grad(<lambda>)), attention: {got}"
    assert without_line(caught.value) == f"{head}\n  needed: {needed}\n  try: {fix}"
    assert caught.value.arg_path == "attention"


CANNOT = {
    "few key heads": (
        Case("few", queries=8, keys=8, heads=4, few=2, causal=True),
        "ulysses",
        "8 queries of 4 heads, 8 keys of 2, causal",
        "a number of key heads that is divisible by 4, the number of ranks",
        "gather",
    ),
    "one query": (
        Case("one", queries=1, keys=8, heads=4, few=4),
        "ring",
        "1 queries of 4 heads, 8 keys of 4",
        "two queries or more",
        "ulysses",
    ),
    "more queries than keys": (
        Case("short", queries=8, keys=6, causal=True),
        "ring",
        "8 queries of 3 heads, 6 keys of 3, causal",
        "attention with as many queries as keys if causal, without dropout, and with a mask "
        "only if the kernel accepts one",
        "gather",
    ),
}


@pytest.mark.parametrize("name", CANNOT)
def test_an_attention_that_cannot_go_that_way_is_refused(name: str) -> None:
    case, way, what, needed, fix = CANNOT[name]
    with simulated(cp=4) as mesh, pytest.raises(sf.PlacementError) as caught:
        lowered(case, mesh, {"cp": way})
    text = str(caught.value)
    assert (
        f"attention over 'cp' must be computed by {way!r}, which is not possible for {what}" in text
    )
    assert f"needed: {needed}" in text
    assert text.endswith(f"try: attention={{'cp': {fix!r}}}")
