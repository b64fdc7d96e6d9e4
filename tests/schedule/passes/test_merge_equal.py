"""merge_equal, before and after in text."""

from __future__ import annotations

from shardfn import schedule
from tests.support.stages.local_graphs import before_and_after, redistributed, same_text


def test_merge_equal_shares_the_first_step_of_two_redistributions_of_one_value() -> None:
    graph = redistributed(("sum", "sum"), [(("R", "R"), "forward"), (("R", "sum"), "forward")])
    before, after = before_and_after(schedule.merge_equal, graph)
    same_text(
        before,
        """
        %all_reduce = all_reduce[sum, a](%x0): f64[6] 48 B
        %wait_tensor = wait_tensor(%all_reduce): f64[6; sum@b]
        %all_reduce_1 = all_reduce[sum, b](%wait_tensor): f64[6] 48 B
        %wait_tensor_1 = wait_tensor(%all_reduce_1): f64[6]
        %all_reduce_2 = all_reduce[sum, a](%x0): f64[6] 48 B
        %wait_tensor_2 = wait_tensor(%all_reduce_2): f64[6; sum@b]
        return %wait_tensor_1, %wait_tensor_2
        """,
    )
    same_text(
        after,
        """
        %all_reduce = all_reduce[sum, a](%x0): f64[6] 48 B
        %wait_tensor = wait_tensor(%all_reduce): f64[6; sum@b]
        %all_reduce_1 = all_reduce[sum, b](%wait_tensor): f64[6] 48 B
        %wait_tensor_1 = wait_tensor(%all_reduce_1): f64[6]
        return %wait_tensor_1, %wait_tensor
        """,
    )


def test_merge_equal_keeps_the_gathers_of_a_forward_and_of_its_backward_apart() -> None:
    graph = redistributed((0, "R"), [(("R", "R"), "forward"), (("R", "R"), "backward")])
    before, after = before_and_after(schedule.merge_equal, graph)
    assert before == after
    assert before.count("all_gather[a]") == 2
