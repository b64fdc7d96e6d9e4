"""Which of several choices is taken: what the next op wants decides between equals, and links
say what a byte costs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P
from shardfn.partition.redistribute import route
from shardfn.types import MeshAxes

F64 = torch.float64
G = torch.Generator().manual_seed(7)
A, B, C = (torch.randn(12, 12, generator=G, dtype=F64) for _ in range(3))
ROWS, COLUMNS = P("x"), P(None, "x")

NEXT: dict[str, Any] = {
    "softmax over rows": (lambda y: torch.softmax(y, 0), {"all_to_all": 1}),
    "softmax over columns": (lambda y: torch.softmax(y, 1), {"all_to_all": 1}),
    "rows from the last": (lambda y: torch.flip(y, (0,)), {"all_to_all": 1}),
    "two readers": (lambda y: torch.softmax(y, 0) + torch.flip(y, (0,)), {"all_to_all": 1}),
    "first, then columns": (
        lambda y: torch.linalg.solve(
            y[None].expand(2, 12, 12) + torch.eye(12, dtype=F64), torch.softmax(y, 0)
        ),
        None,
    ),
    "nothing": (lambda y: y, {"all_to_all": 1}),
}


@functools.cache  # one function for all meshes, which share its capture
def summed_then(name: str) -> Callable[..., torch.Tensor]:
    return lambda a, b: NEXT[name][0](a + b)


def sent(low: Any) -> dict[str, int]:
    kinds = [c.kind for c in low.collectives]
    return {kind: kinds.count(kind) for kind in kinds}


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize(
    "cuts", [(ROWS, COLUMNS), (COLUMNS, ROWS)], ids=["rows first", "columns first"]
)
@pytest.mark.parametrize("name", NEXT)
def test_of_two_moves_that_cost_the_same_the_next_op_decides(name: str, cuts: Any, n: int) -> None:
    fn, counts = summed_then(name), NEXT[name][1]
    with sf.fake_world(n):
        sharded = sf.shard(fn, sf.make_mesh((n,), ("x",)), cuts, backend="aten")
        if counts is not None:
            assert sent(sharded.lower(A, B)) == counts
        torch.testing.assert_close(sf.full(sharded(A, B)), fn(A, B), rtol=1e-10, atol=1e-10)


def test_a_choice_that_moves_nothing_is_taken_whatever_comes_next() -> None:
    with sf.fake_world(3):
        sharded = sf.shard(
            lambda a, b: torch.flip(torch.sin(a) + b, (0,)),
            sf.make_mesh((3,), ("x",)),
            (ROWS, ROWS),
            backend="aten",
        )
        assert [str(t.op) for t in sharded.lower(A, B).transfers] == ["aten.flip.default"]
        torch.testing.assert_close(
            sf.full(sharded(A, B)), torch.flip(torch.sin(A) + B, (0,)), rtol=1e-10, atol=1e-10
        )


SLOW, FAST = (sf.Link(latency=1e-5, bandwidth=25e9), sf.Link(latency=1e-5, bandwidth=450e9))


@pytest.mark.parametrize(("slow", "gathered"), [("a", "b"), ("b", "a")])
def test_more_bytes_go_over_the_fast_axis(slow: str, gathered: str) -> None:
    links = {axis: SLOW if axis == slow else FAST for axis in ("a", "b")}
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("a", "b"), links=links)
        axes = sf.mesh.axes_of(mesh)
        _, moves = route((4096, 4096), 8, (0, 1), (1, 0), axes)
        assert [("ab"[m.axis], m.kind) for m in moves if m.kind == "all_gather"] == [
            (gathered, "all_gather")
        ]
        turned = sf.shard(
            lambda x: sf.constrain(x, P("b", "a")) * 2, mesh, P("a", "b"), backend="aten"
        )
        torch.testing.assert_close(sf.full(turned(A)), A * 2)


@pytest.mark.parametrize("latency", [0.0, 1e-6, 1.0])
def test_a_collective_costs_its_bytes_and_its_start(latency: float) -> None:
    with sf.fake_world(2):
        axes = sf.mesh.axes_of(
            sf.make_mesh((2,), ("x",), links={"x": sf.Link(latency=latency, bandwidth=1e9)})
        )
        cost, moves = route((64,), 8, ("sum",), ("R",), axes)
        assert [m.kind for m in moves] == ["all_reduce"]
        assert cost == 512 + max(1.0, latency * 1e9)


def test_without_links_all_axes_are_alike() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("a", "b"))
        even = sf.make_mesh((2, 2), ("a", "b"), links={"a": FAST, "b": FAST})
        assert sf.mesh.axes_of(mesh).costs == ()
        assert {c.byte for c in sf.mesh.axes_of(even).costs} == {1.0}
        assert sf.mesh.axes_of(mesh) == MeshAxes(("a", "b"), (2, 2))


BAD: dict[str, tuple[Any, str]] = {
    "an axis too few": ({"a": FAST}, "links for a"),
    "an axis too many": ({"a": FAST, "b": FAST, "c": FAST}, "links for a, b, c"),
    "no axis": ({}, "links for no axis"),
    "a list": ([FAST, FAST], "links is a list"),
    "text": (
        {"a": FAST, "b": sf.Link(latency="1", bandwidth=1)},
        "links['b']: it is Link(latency='1', bandwidth=1)",
    ),
    "no link": ({"a": FAST, "b": 5}, "links['b']: it is 5"),
    "no bandwidth": (
        {"a": FAST, "b": sf.Link(latency=0, bandwidth=0)},
        "links['b']: it is Link(latency=0, bandwidth=0)",
    ),
    "a negative latency": (
        {"a": sf.Link(latency=-1, bandwidth=1), "b": FAST},
        "links['a']: it is Link(latency=-1, bandwidth=1)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_links_that_do_not_fit_are_refused(name: str) -> None:
    links, said = BAD[name]
    with sf.fake_world(4), pytest.raises(sf.PlacementError) as refused:
        sf.make_mesh((2, 2), ("a", "b"), links=links)
    assert "make_mesh, links" in str(refused.value) and said in str(refused.value)
    assert "links={'a': Link(latency=..., bandwidth=...), 'b':" in str(refused.value)
