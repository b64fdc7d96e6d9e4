"""The published schedules run for any number of coordinates and microbatches, at their price."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardfn as sf

MAKERS = {name: getattr(sf.schedules, name) for name in sf.schedules.__all__}
PARTED = ("dualpipev", "zbv", "zero_bubble")
IN_A_V = ("dualpipev", "zbv")
SIZES = [(1, 3), (2, 2), (2, 5), (3, 6), (4, 4), (4, 9), (5, 10), (7, 14)]


def waits(schedule: sf.Schedule) -> set[float]:
    """The times in which coordinates wait, if F, B and W take one unit each."""
    price = schedule.check()
    return {price.time - busy for busy in price.busy}


@settings(deadline=None)
@given(st.sampled_from(sorted(MAKERS)), st.integers(1, 6), st.integers(1, 12))
def test_every_schedule_runs_with_one_message_on_the_way(name: str, n: int, m: int) -> None:
    schedule = MAKERS[name](n, m)
    stages = n * (2 if name in (*IN_A_V, "interleaved") else 1)
    schedule.check(stages, on_the_way=1)
    assert (schedule.coordinates, schedule.microbatches, schedule.stages) == (n, m, stages)


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 4))
def test_interleaved_runs_with_any_number_of_stages_a_coordinate(n: int, m: int, v: int) -> None:
    sf.schedules.interleaved(n, m, chunks=v).check(n * v)


@pytest.mark.parametrize("name", MAKERS)
def test_a_schedule_is_made_the_same_each_time(name: str) -> None:
    first, second = MAKERS[name](3, 7), MAKERS[name](3, 7)
    assert first == second and first is not second
    assert first.to_json() == second.to_json()


@pytest.mark.parametrize("name", MAKERS)
def test_stages_lie_in_a_loop_or_in_a_v(name: str) -> None:
    schedule = MAKERS[name](3, 4)
    assert schedule.order == ("v" if name in IN_A_V else "loop")
    assert schedule.parts == (name in PARTED)
    assert schedule.name == name


@pytest.mark.parametrize("name", MAKERS)
def test_a_number_below_one_is_refused_by_name(name: str) -> None:
    with pytest.raises(
        sf.ShardError, match=f"^schedules.{name}, coordinates: coordinates is 0, a int"
    ):
        MAKERS[name](0, 3)
    with pytest.raises(
        sf.ShardError, match=f"^schedules.{name}, microbatches: microbatches is 0, a int"
    ):
        MAKERS[name](3, 0)
    with pytest.raises(sf.ShardError, match="^schedules.interleaved, chunks: chunks is 0, a int"):
        sf.schedules.interleaved(2, 3, chunks=0)


@pytest.mark.parametrize(("n", "m"), SIZES)
def test_gpipe_keeps_every_microbatch(n: int, m: int) -> None:
    price = sf.schedules.gpipe(n, m).check()
    assert price.alive == (m,) * n
    assert price.idle == pytest.approx((n - 1) / (m + n - 1))


@pytest.mark.parametrize(("n", "m"), SIZES)
def test_1f1b_keeps_fewer_at_later_stages_and_waits_as_long_as_gpipe(n: int, m: int) -> None:
    price = sf.schedules.one_f_one_b(n, m).check()
    assert price.alive == tuple(min(m, n - s) for s in range(n))
    assert price.idle == pytest.approx((n - 1) / (m + n - 1))


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize(("n", "groups"), [(1, 3), (2, 1), (2, 4), (3, 2), (4, 3), (5, 2)])
def test_interleaved_waits_a_share_that_falls_with_its_chunks(
    n: int, groups: int, chunks: int
) -> None:
    m = n * groups
    price = sf.schedules.interleaved(n, m, chunks=chunks).check()
    assert price.idle == pytest.approx((n - 1) / (chunks * m + n - 1))


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("n", [3, 4, 5])
def test_interleaved_keeps_what_its_warm_up_has(n: int, chunks: int) -> None:
    price = sf.schedules.interleaved(n, 5 * n, chunks=chunks).check()
    assert price.alive == tuple(2 * (n - c - 1) + (chunks - 1) * n + 1 for c in range(n))


def test_interleaved_over_two_coordinates_keeps_a_round_or_all() -> None:
    assert sf.schedules.interleaved(2, 20).check().alive == (4, 3)
    assert sf.schedules.interleaved(2, 20, chunks=3).check().alive == (60, 60)


@pytest.mark.parametrize(("n", "m"), [(1, 3), (2, 2), (3, 4), (4, 8), (7, 9)])
def test_zero_bubble_waits_a_third_of_1f1b_and_keeps_no_more(n: int, m: int) -> None:
    schedule, other = sf.schedules.zero_bubble(n, m), sf.schedules.one_f_one_b(n, m)
    assert waits(schedule) == {n - 1}
    assert waits(other) == {3 * (n - 1)}
    assert max(schedule.check().alive) == max(other.check().alive) == min(n, m)


@pytest.mark.parametrize(("f", "b", "w"), [(1, 1, 1), (2, 2, 1), (2, 3, 1), (3, 2, 2)])
def test_zero_bubble_waits_for_f_and_b_less_w(f: int, b: int, w: int) -> None:
    """(n - 1) (F + B - W): the bubble of the paper's table, where its figures hold."""
    n, m = 4, 12
    price = sf.schedules.zero_bubble(n, m).check(costs={"F": f, "B": b, "W": w})
    assert price.time == m * (f + b + w) + (n - 1) * (f + b - w)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 4), (2, 3), (3, 5), (4, 7), (4, 20), (6, 13)])
def test_zbv_waits_only_at_both_ends(n: int, m: int) -> None:
    schedule = sf.schedules.zbv(n, m)
    assert waits(schedule) == {n - 1}
    assert max(schedule.check().alive) <= 2 * n


@pytest.mark.parametrize(("n", "m"), [(1, 2), (2, 4), (3, 6), (4, 8), (4, 20), (6, 12), (8, 16)])
def test_dualpipev_waits_and_keeps_no_more_than_published(n: int, m: int) -> None:
    schedule = sf.schedules.dualpipev(n, m)
    assert max(waits(schedule)) <= 2 * (n - 1)
    assert max(schedule.check().alive) == 2 * n + 1


@pytest.mark.parametrize("n", [2, 3, 4, 6])
def test_dualpipev_has_most_forwards_beside_a_backward_of_the_other_stage(n: int) -> None:
    m = 10 * n
    pairs = 0
    for row in sf.schedules.dualpipev(n, m).table:
        steps = iter([action for action in row if action.kind != "W"])
        before = next(steps)
        for action in steps:
            kinds = {before.kind, action.kind}
            stages = before.stage != action.stage
            if kinds == {"F", "B"} and stages and before.microbatch != action.microbatch:
                pairs += 1
                action = next(steps, action)
            before = action
    assert pairs > 0.85 * 2 * m * n


@pytest.mark.parametrize("name", PARTED)
@pytest.mark.parametrize("n", [2, 3, 5])
def test_one_microbatch_waits_for_no_gradient_of_weights(name: str, n: int) -> None:
    schedule = MAKERS[name](n, 1)
    assert schedule.check().time == 2 * schedule.stages + 1  # its F and B, and the last W
