"""When collectives start and when they are waited for, read from the graph of one rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P

S = sf.ShapeDtype
MM = torch.ops.aten.mm.default
WAIT = torch.ops._c10d_functional.wait_tensor.default
WHOLE, ROWS = P(), P("dp")
FOUR, X = [S((4, 4))] * 4, S((8, 4))  # 64 bytes each


def chain(params: Any, x: Any) -> torch.Tensor:
    for w in params:
        x = torch.tanh(x @ w)
    return (x * x).mean()


def graph_of(
    placed: Any = WHOLE,
    update: bool = False,
    axes: Any = None,
    args: Any = (FOUR, X),
    **options: Any,
) -> Any:
    """The graph of rank 0 of a bucketed_grad, or of a step that updates its parameters."""
    axes = axes or {"dp": 2}

    def step(params: Any, x: Any) -> Any:
        value, grads = sf.bucketed_grad(chain, **options)(params, x)
        return (
            (value, [p - 0.1 * g for p, g in zip(params, grads, strict=True)])
            if update
            else (value, grads)
        )

    with sf.fake_world(math.prod(axes.values()), numerics=False):
        mesh = sf.make_mesh(tuple(axes.values()), tuple(axes))
        return sf.shard(step, mesh, (placed, ROWS), backend="aten").lower(*args)


def events(low: Any) -> list[tuple[str, Any]]:
    """("start", bucket), ("wait", bucket) and (op, node), in order; buckets only."""
    found: list[tuple[str, Any]] = []
    for node in low.program.graph.nodes:
        of = lambda n: n.meta["collective"].bucket
        if "collective" in node.meta:
            found += [("start", of(node))] if of(node) is not None else []
        elif node.target is WAIT:
            found += [("wait", of(node.args[0]))] if of(node.args[0]) is not None else []
        elif node.op == "call_function":
            found.append((getattr(node.target, "_opname", str(node.target)), node))
    return found


def only(low: Any, *kinds: str) -> list[Any]:
    return [
        (kind, x) if kinds[0] == "start" and len(kinds) == 2 else kind
        for kind, x in events(low)
        if kind in kinds
    ]


def test_s9_4_every_reduction_starts_before_the_next_gradient_is_computed() -> None:
    low = graph_of(cap=64)
    told = [kind for kind, _ in events(low) if kind in ("start", "mm")]
    forward, backward = told[:4], told[4:]
    assert forward == ["mm"] * 4
    # for each layer but the first: its weight's gradient, sent at once, then the gradient of
    # its input
    assert backward == ["mm", "start", "mm"] * 3 + ["mm", "start"]


def test_s9_4_a_bucket_starts_with_its_last_gradient_not_later() -> None:
    for cap, first in ((128, 64), (1000, 1000), (200, 1)):
        low = graph_of(cap=cap, first_cap=first)
        nodes = list(low.program.graph.nodes)
        position = {n: i for i, n in enumerate(nodes)}
        products = [n for n in nodes if n.target is MM]
        for start in (
            n for n in nodes if "collective" in n.meta and n.meta["collective"].bucket is not None
        ):
            made = [position[x] for x in _behind(start) if x.target is MM]
            between = [m for m in products if max(made) < position[m] < position[start]]
            assert not between, f"{start} could have started before {between}"


def _behind(node: Any) -> list[Any]:
    """What a collective packs: its inputs, by way of packing."""
    found, left = [], list(node.all_input_nodes)
    while left:
        x = left.pop()
        found.append(x)
        if x.target is not MM:
            left += x.all_input_nodes
    return found


def test_s9_4_waits_stand_after_all_computation_of_the_backward() -> None:
    for cap in (64, 128, "25MB"):
        told = [
            kind for kind, _ in events(graph_of(cap=cap)) if kind in ("wait", "mm", "tanh_backward")
        ]
        first = told.index("wait")
        assert set(told[first:]) == {"wait"}


def test_s9_4_what_reads_the_first_bucket_comes_before_the_wait_for_the_second() -> None:
    low = graph_of(cap=64, update=True)
    told = [
        (kind, x) if kind == "wait" else kind for kind, x in events(low) if kind in ("wait", "sub")
    ]
    assert told == [("wait", 0), "sub", ("wait", 1), "sub", ("wait", 2), "sub", ("wait", 3), "sub"]


def test_s9_9_four_layers_of_2000_give_three_fused_all_reduces_then_three_waits() -> None:
    for update in (False, True):
        low = graph_of(
            update=update, axes={"dp": 8}, args=([S((2000, 2000))] * 4, S((160, 2000))), cap="25MB"
        )
        told = only(low, "start", "wait")
        assert told[:3] == [("start", 0), ("start", 1), ("start", 2)] and sorted(told[3:]) == [
            ("wait", 0),
            ("wait", 1),
            ("wait", 2),
        ]
        assert not update or told[3:] == sorted(told[3:]), "what is used first is waited for first"
        assert [c.kind for c in low.collectives if c.bucket is not None] == ["all_reduce"] * 3


@pytest.mark.parametrize("n", [2, 3, 8, 64])
def test_s1_2_all_reduce_and_wait_stay_above_one_rank(n: int) -> None:
    low = graph_of(axes={"dp": n}, cap=64, args=(FOUR, S((n, 4))))
    starts = [
        node
        for node in low.program.graph.nodes
        if node.target is torch.ops._c10d_functional.all_reduce.default
    ]
    waits = [node for node in low.program.graph.nodes if node.target is WAIT]
    assert len(starts) == len(waits) == 4, "four gradients, in the first of which the loss rides"
    assert all([user.target for user in node.users] == [WAIT] for node in starts)
    assert low.program.elided == ()


def test_s1_2_at_one_rank_they_are_elided_and_the_program_says_so() -> None:
    low = graph_of(axes={"dp": 1}, cap=64)
    assert not [node for node in low.program.graph.nodes if "c10d" in str(node.target)]
    assert low.plan.buckets == () and low.collectives == ()
    assert (
        low.program.elided
        and f"{len(low.program.elided)} collectives over axes of size 1 were removed" in str(low)
    )
    assert set(low.plan.local) == {f"params[{i}]" for i in range(4)}, "nothing to send"


def test_s1_2_only_the_axis_of_one_rank_is_elided() -> None:
    low = graph_of(axes={"dp": 1, "tp": 2}, placed=P(None, "tp"), cap=64)
    assert {c.axis for c in low.collectives} == {"tp"}
    low = graph_of(axes={"dp": 2, "tp": 1}, placed=P(None, "tp"), cap=64)
    assert {c.axis for c in low.collectives} == {"dp"} and len(low.plan.buckets) == 4


def test_each_start_has_one_wait_and_stands_before_it() -> None:
    for placed in (WHOLE, ROWS):
        for cap in (1, 130, "25MB"):
            told = only(graph_of(placed, cap=cap, update=True), "start", "wait")
            numbers = sorted({b for _, b in told})
            assert numbers == list(range(len(numbers)))
            assert [told.count((kind, b)) for b in numbers for kind in ("start", "wait")] == [
                1,
                1,
            ] * len(numbers)
            assert all(told.index(("start", b)) < told.index(("wait", b)) for b in numbers)


def test_a_gather_starts_while_the_layer_before_is_computed() -> None:
    low = graph_of(ROWS, cap=1)
    gathers = {b.index for b in low.plan.buckets if b.kind == "all_gather" and b.phase == "forward"}
    told = [
        (kind, x) if kind != "mm" else kind
        for kind, x in events(low)
        if kind == "mm" or x in gathers
    ]
    products = [i for i, x in enumerate(told) if x == "mm"][:4]
    for layer in range(1, 4):
        start, wait = told.index(("start", layer)), told.index(("wait", layer))
        assert start < products[layer - 1] < wait < products[layer], told
        assert layer < 2 or products[layer - 2] < start, (
            "and no earlier: what is gathered takes memory"
        )


@pytest.mark.parametrize("placed", [WHOLE, ROWS], ids=str)
@pytest.mark.parametrize("limit", [1, 64, 100, 128, 200, 10**6])
def test_no_more_bytes_are_on_their_way_than_max_in_flight(placed: sf.P, limit: int) -> None:
    low = graph_of(placed, cap=64, max_in_flight=limit, update=True)
    size = {b.index: b.nbytes + b.riding for b in low.plan.buckets}
    flying: dict[int, int] = {}
    for kind, b in only(low, "start", "wait"):
        if kind == "start":
            flying[b] = size[b]
        else:
            del flying[b]
        assert len(flying) < 2 or sum(flying.values()) <= limit, f"{flying} with {limit}"


def test_a_limit_of_bytes_in_flight_changes_no_bucket() -> None:
    plans = {
        graph_of(placed, cap=100, max_in_flight=limit).plan
        for placed in (WHOLE, ROWS)
        for limit in (1, 100, "1GiB")
    }
    assert len(plans) == 2


def test_gradients_of_one_layer_that_are_ready_together_start_in_one_order_on_all_ranks() -> None:
    fn = lambda params, x: sum(((x @ w) ** 2).mean() for w in params)
    orders = set()
    for rank in range(3):
        with sf.fake_world(3, rank=rank, numerics=False):
            mesh = sf.make_mesh((3,), ("dp",))
            low = sf.shard(sf.bucketed_grad(fn, cap=1), mesh, (ROWS, ROWS), backend="aten").lower(
                FOUR, S((7, 4))
            )
            orders.add(tuple(only(low, "start", "wait")))
    assert len(orders) == 1
