"""Collectives under way: those of one axis follow each other, those on one link share it."""

from __future__ import annotations

from typing import Any

import pytest

from shardfn.inspect.timeline.links import Links, Sending

SHARED = {"dp": "node", "tp": "node", "pp": "network"}


def run(links: Links, starts: list[tuple[str, float, float]]) -> list[Any]:
    """Start collectives (axis, seconds of their bytes, start), and return when each runs."""
    sent = []
    for axis, seconds, now in starts:
        sending = Sending(0.0, seconds)
        links.start(axis, sending, now)
        sent.append((axis, sending))
    for axis, sending in sent:
        links.finish(axis, sending, starts[-1][2])
    return [(sending.start, sending.end) for _, sending in sent]


def test_collectives_of_one_axis_follow_each_other() -> None:
    times = run(Links(SHARED), [("dp", 3.0, 1.0), ("dp", 2.0, 2.0), ("dp", 1.0, 7.0)])
    assert times == [(1.0, 4.0), (4.0, 6.0), (7.0, 8.0)]


def test_collectives_on_one_link_share_it_and_on_two_do_not() -> None:
    times = run(Links(SHARED), [("dp", 3.0, 0.0), ("tp", 1.0, 1.0), ("pp", 4.0, 1.0)])
    assert times == [(0.0, 4.0), (1.0, 3.0), (1.0, 5.0)]


def test_a_shared_link_sends_as_much_as_one_after_the_other() -> None:
    starts = [("dp", 2.0, 0.0), ("tp", 2.5, 0.0), ("dp", 1.0, 0.5), ("tp", 0.25, 0.5)]
    times = run(Links(SHARED), starts)
    assert max(end for _, end in times) == pytest.approx(sum(x for _, x, _ in starts))
    assert all(a[1] <= b[0] for a, b in [(times[0], times[2]), (times[1], times[3])])


def test_links_are_idle_when_all_has_ended() -> None:
    links = Links(SHARED)
    links.start("dp", Sending(1.0, 2.0), 1.0)
    assert not links.is_idle(3.5)
    assert links.is_idle(4.0)


def test_latencies_share_nothing() -> None:
    links = Links(SHARED)
    over_dp, over_tp = Sending(1.0, 2.0), Sending(1.5, 2.0)
    links.start("dp", over_dp, 0.0)
    links.start("tp", over_tp, 0.0)
    # dp alone for half a second, then both: 1.5 left of dp take 3, and half of tp is left
    assert links.finish("tp", over_tp, 0.0) == 5.0
    assert over_dp.end == 4.5
