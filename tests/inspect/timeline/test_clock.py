"""Laws of the timeline: its events add up to the totals, never overlap on a track, and wait for
nothing but a collective, a message or the end of the step.
"""

from __future__ import annotations

import collections
import itertools
import math
from typing import Any

import attrs
import pytest
import torch
from toy import TOY

import shardfn as sf
from shardfn import P

K = 24


def lowered(fn: Any, shapes: Any, where: Any, mesh: dict[str, int]) -> Any:
    with sf.fake_world(math.prod(mesh.values()), numerics=False):
        made = sf.make_mesh(tuple(mesh.values()), tuple(mesh))
        args = [sf.ShapeDtype(shape) for shape in shapes]
        return sf.shard(fn, made, where, backend="aten").lower(*args)


def plain() -> Any:
    """The gradient of two layers, sharded over two axes of one node."""

    def loss(v: Any, w: Any, x: Any) -> Any:
        return torch.tanh(torch.tanh(x @ v) @ w).square().sum()

    where = (P("dp", "tp"), P("tp", "dp"), P("dp"))
    grad = sf.value_and_grad(loss, argnums=(0, 1))
    return lowered(grad, [(K, K), (K, K), (8, K)], where, {"dp": 2, "tp": 2})


def scanned() -> Any:
    """A loop with a collective in its body, and one beside it."""

    def run(w: Any, x: Any, y: Any) -> Any:
        h = sf.scan(lambda h, w: (torch.tanh(h @ w), None), x, w)[0]
        return h.sum() + (y @ y).sum()

    return lowered(run, [(5, K, K), (8, K), (K, K)], (P(None, "dp"), P("dp"), P("dp")), {"dp": 2})


def pipelined(schedule: str = "1f1b") -> Any:
    """A pipeline of 2 stages, each on 2 ranks."""

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = torch.tanh(x @ w)
        return x.square().mean()

    with sf.fake_world(4, numerics=False):
        mesh = sf.make_mesh((2, 2), ("pp", "dp"))
        where = ([P(pp=0), P(pp=0), P(pp=1), P(pp=1)], P("dp"))
        grad = sf.pipelined_grad(loss, 4, schedule=schedule)
        run = sf.shard(grad, mesh, where, backend="aten")
        return run.lower([sf.ShapeDtype((K, K))] * 4, sf.ShapeDtype((16, K)))


CASES = {"plain": plain, "scanned": scanned, "pipelined": pipelined}


@pytest.fixture(scope="module", params=CASES)
def time(request: Any) -> Any:
    return CASES[request.param]().time(TOY)


def of(events: Any, track: str) -> list[Any]:
    return [x for x in events if x.track == track]


def test_events_add_up_to_the_totals(time: Any) -> None:
    totals: dict[str, float] = collections.defaultdict(float)
    for x in time.events:
        totals["axis" if x.track.startswith("axis ") else x.track] += x.seconds
    wanted = {
        "compute": time.compute,
        "axis": time.communication,
        "exposed": time.exposed,
        "bubble": time.bubble,
    }
    assert totals == pytest.approx({k: v for k, v in wanted.items() if v})


def test_events_of_a_rank_fill_the_step_and_no_track_overlaps(time: Any) -> None:
    for rank in time.ranks:
        own = [x for x in rank.events if not x.track.startswith("axis ")]
        ends = [0.0, *(x.end for x in own)]
        starts = [*(x.start for x in own), time.total]
        assert starts == pytest.approx(ends, abs=1e-12)
        for axis in {x.track for x in rank.events} - {"compute", "exposed", "bubble"}:
            row = of(rank.events, axis)
            assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(row))
            assert row[-1].end <= time.total + 1e-12


def test_collectives_are_those_of_the_program_with_their_bytes(time: Any) -> None:
    sent = [x for x in time.events if x.track.startswith("axis ")]
    found = collections.Counter((x.name, x.axis, x.source) for x in sent)
    rows = {(x.name, x.axis, x.source): x.count for x in time.ops if x.axis}
    assert found == rows


@pytest.mark.parametrize("case", CASES)
def test_collectives_of_the_timeline_are_those_that_explain_lists(case: str) -> None:
    low = CASES[case]()
    found = [x for x in low.time(TOY).events if x.track.startswith("axis ")]
    key = lambda x: (x.axis, x.nbytes, x.bucket, x.source, x.module)
    wanted = collections.Counter((x.kind, *key(x)) for x in low.collectives)
    assert wanted == collections.Counter((x.name, *key(x)) for x in found)


def test_a_rank_waits_until_its_collective_or_a_message_ends(time: Any) -> None:
    ends = [x.end for rank in time.ranks for x in rank.events if x.track.startswith("axis ")]
    for rank in time.ranks:
        waits = [x for x in rank.events if x.track in ("exposed", "bubble")]
        for wait in waits:
            assert any(math.isclose(wait.end, end) for end in [*ends, time.total])


def test_two_axes_on_one_link_share_its_bandwidth() -> None:
    def both(x: Any, y: Any) -> Any:
        return x.sum(0), y.sum(0)

    shapes, where = [(8, 64 * K), (8, 64 * K)], (P("dp"), P("tp"))
    low = lowered(both, shapes, where, {"dp": 2, "tp": 2})
    slow = attrs.evolve(TOY, latency=0.0, memory=1e20)
    over_dp, over_tp = (of(low.time(slow).events, f"axis {x}")[0] for x in ("dp", "tp"))
    alone = slow.send("all_reduce", 4 * 64 * K, 2)
    assert over_dp.start < over_tp.end and over_tp.start < over_dp.end
    assert max(over_dp.end, over_tp.end) == pytest.approx(2 * alone, rel=1e-3)
    apart = {"tp": sf.Link(0.0, slow.link)}
    for x in low.time(slow, links=apart).events:
        if x.track.startswith("axis "):
            assert x.seconds == pytest.approx(alone)


def test_a_collective_is_under_way_while_a_loop_runs() -> None:
    def run(w: Any, x: Any, y: Any) -> Any:
        total = y.sum(0)
        h = sf.scan(lambda h, w: (torch.tanh(h @ w), None), x, w)[0]
        return h, total

    shapes = [(5, K, K), (8, K), (4, 8 * K)]
    low = lowered(run, shapes, (P(), P(), P("dp")), {"dp": 2})
    found = low.time(attrs.evolve(TOY, latency=3e-5))
    (sent,) = of(found.events, "axis dp")
    turns = [x for x in of(found.events, "compute") if x.name == "mm"]
    assert len(turns) == 5
    assert sent.start <= turns[0].start and turns[2].start < sent.end < turns[4].end
    assert found.exposed == 0


def test_a_long_loop_is_an_event_a_track_and_adds_up() -> None:
    low = lowered(
        lambda w, x: sf.scan(lambda h, w: (torch.tanh(h @ w), None), x, w)[0],
        [(70_000, 2, 2), (2, 2)],
        (P(None, "dp"), P()),
        {"dp": 2},
    )
    found = low.time(TOY)
    long = [x for x in found.events if x.repeats > 1]
    assert {x.repeats for x in long} == {70_000}
    for track, seconds in [("compute", found.compute), ("exposed", found.exposed)]:
        assert sum(x.seconds for x in of(found.events, track)) == pytest.approx(seconds)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_a_stage_starts_a_microbatch_when_its_message_has_arrived(schedule: str) -> None:
    found = pipelined(schedule).time(TOY)
    first, second = found.ranks
    assert (first.title, first.ranks) == ("pp=0", (0, 1))
    assert (second.title, second.ranks) == ("pp=1", (2, 3))
    arrivals = [x.end for x in of(first.events, "axis pp") if x.name == "send"]
    assert len(arrivals) == 4
    for k, arrival in enumerate(arrivals):
        action = f"F of stage 1, microbatch {k}"
        own = [x for x in of(second.events, "compute") if (x.action or "").startswith("F of")]
        starts = [x.start for x in own if x.action == action]
        assert not starts or min(starts) >= arrival - 1e-12


def test_gpipe_takes_what_its_stages_take_by_hand() -> None:
    low = pipelined("gpipe")
    fast = sf.Link(latency=0.0, bandwidth=1e30)
    free = attrs.evolve(TOY, link=1e30, latency=0.0, network=1e30, network_latency=0.0)
    found = low.time(free, links={"pp": fast})
    takes = []
    for rank in found.ranks:
        for kind in "FB":
            own = [x for x in of(rank.events, "compute") if (x.action or "").startswith(kind)]
            takes.append(sum(x.seconds for x in own) / 4)
    f0, b0, f1, b1 = takes
    forwards = f0 + 3 * max(f0, f1) + f1
    backwards = b1 + 3 * max(b0, b1) + b0
    outside = [x.seconds for x in found.ranks[0].events if x.track == "compute" and not x.action]
    assert found.total == pytest.approx(forwards + backwards + sum(outside))
