"""Moves between placements as ops of one rank, in text; pieces of all routes are compared in
tests/partition/test_redistribute.py.
"""

from __future__ import annotations

import pieces

from shardfn.types import MeshPlacements
from tests.support.stages.local_graphs import redistributed, same_text, text

TWO = (2,)


def moved(src: MeshPlacements, dst: MeshPlacements, sizes: tuple[int, ...] = TWO) -> str:
    graph = redistributed(src, [(dst, "forward")], sizes)
    return text(graph, pieces.mesh_axes(sizes))


def test_a_slice_is_found_by_the_coordinate_and_sends_nothing() -> None:
    lines = moved(("R",), (0,))
    assert "%coord_a" in lines and "f64[6@a]" in lines
    assert not any(name in lines for name in ("all_", "scatter", "wait"))


def test_an_all_reduce_is_one_op_and_one_wait() -> None:
    same_text(
        moved(("sum",), ("R",)),
        """
        %all_reduce = all_reduce[sum, a](%x0): f64[6] 48 B
        %wait_tensor = wait_tensor(%all_reduce): f64[6]
        return %wait_tensor
        """,
    )


def test_an_even_gather_needs_no_padding() -> None:
    lines = moved((0,), ("R",))
    assert "all_gather[a](%view): f64[6] 48 B" in lines
    assert "pad" not in lines and "slice" not in lines


def test_an_uneven_gather_pads_and_drops_the_padding() -> None:
    """Six elements over four ranks: chunks of 2, 2, 2 and 0."""
    lines = moved((0,), ("R",), (4,))
    assert "all_gather[a]" in lines and "64 B" in lines, "8 elements are sent"
    assert "slice(" in lines


def test_a_reduce_scatter_sends_the_chunks_in_the_order_of_ranks() -> None:
    lines = moved(("sum",), (0,)).splitlines()
    assert lines[0] == "%view = view(%x0, [2, 3]): f64[2, 3]"
    assert any("reduce_scatter[sum, a]" in line and "48 B" in line for line in lines)
    assert lines[-2].endswith(": f64[6@a]")


def test_two_axes_on_one_dim_are_gathered_from_the_inside() -> None:
    lines = moved((0, 0), ("R", "R"), (2, 3))
    assert 0 < lines.index("all_gather[b]") < lines.index("all_gather[a]")
