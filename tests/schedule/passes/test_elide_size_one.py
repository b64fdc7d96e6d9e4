"""elide_size_one, before and after in text."""

from __future__ import annotations

import pieces

from shardfn import schedule
from tests.support.stages.local_graphs import (
    before_and_after,
    redistributed,
    same_text,
)


def test_elide_size_one_takes_collectives_over_an_axis_of_one_rank() -> None:
    graph = redistributed(("sum", "sum"), [(("R", "R"), "forward")], (1, 3))
    before, after = before_and_after(
        schedule.elide_size_one, graph, pieces.mesh_axes((1, 3))
    )
    same_text(
        before,
        """
        %all_reduce = all_reduce[sum, a](%x0): f64[6] 48 B
        %wait_tensor = wait_tensor(%all_reduce): f64[6; sum@b]
        %all_reduce_1 = all_reduce[sum, b](%wait_tensor): f64[6] 48 B
        %wait_tensor_1 = wait_tensor(%all_reduce_1): f64[6]
        return %wait_tensor_1
        """,
    )
    same_text(
        after,
        """
        %all_reduce = all_reduce[sum, b](%x0): f64[6] 48 B
        %wait_tensor = wait_tensor(%all_reduce): f64[6]
        return %wait_tensor
        """,
    )
