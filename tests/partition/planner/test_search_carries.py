"""The search over the placements of carries: the cheapest wins, and it is tried on every axis."""

from __future__ import annotations

import attrs
import pieces

from shardfn.partition.planner.plan_price import PlanPrice
from shardfn.partition.planner.search_carries import Carries, search_carries

AXES = pieces.mesh_axes((2, 3))


def priced(least: Carries, seen: list[Carries]):
    """A price that falls with each placement that is that of the cheapest carries."""

    def price(tried: Carries) -> PlanPrice:
        seen.append(tried)
        right = [
            tried.get(shape, ("R", "R"))[axis] == marks[axis]
            for shape, marks in least.items()
            for axis in range(2)
        ]
        return PlanPrice(10.0 - sum(right), 0.0, 0.0)

    return price


def test_the_cheapest_placement_is_found_axis_by_axis() -> None:
    least: Carries = {(4, 6): (0, 1)}
    assert search_carries({(4, 6): ("R", "R")}, AXES, priced(least, [])) == least


def test_nothing_changes_where_nothing_is_cheaper() -> None:
    seen: list[Carries] = []
    now: Carries = {(4, 6): ("R", "R")}
    assert search_carries(now, AXES, priced(now, seen)) == {}
    assert {} in seen and len(seen) > 1


def test_of_placements_that_take_about_the_same_time_the_one_that_sends_less_is_taken() -> None:
    times = {("R", "R"): (100.0, 9.0), (0, "R"): (104.0, 8.0), ("R", 0): (101.0, 8.5)}

    def price(tried: Carries) -> PlanPrice:
        (marks,) = tried.values() or [("R", "R")]
        total, nbytes = times.get(marks, (200.0, 0.0))
        return PlanPrice(total, nbytes, 0.0)

    found = search_carries({(4,): ("R", "R")}, AXES, price)
    assert found == {(4,): (0, "R")}


def test_only_the_two_largest_carries_and_dims_with_an_element_for_each_rank() -> None:
    seen: list[Carries] = []
    carried: Carries = dict.fromkeys([(3,), (12,), (2, 7)], ("R", "R"))
    search_carries(carried, AXES, priced(carried, seen))
    tried = {(shape, marks) for row in seen for shape, marks in row.items()}
    assert tried == {
        ((12,), (0, "R")),
        ((12,), ("R", 0)),
        ((2, 7), (0, "R")),
        ((2, 7), (1, "R")),
        ((2, 7), ("R", 1)),
    }


def test_without_carries_nothing_is_priced() -> None:
    seen: list[Carries] = []
    assert search_carries({}, AXES, priced({}, seen)) == {} and not seen


def test_an_axis_over_which_nothing_is_sharded_is_not_tried() -> None:
    seen: list[Carries] = []
    now: Carries = {(4, 6): ("R", "R")}
    closed = attrs.evolve(AXES, closed=AXES.names[1:])
    search_carries(now, closed, priced({(4, 6): (0, 0)}, seen))
    assert {marks[1] for row in seen for marks in row.values()} == {"R"}
