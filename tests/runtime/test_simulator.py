"""The simulator: what ranks receive, and programs that would hang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pieces
import pytest
import torch

import shardfn as sf
from shardfn import _compat
from shardfn.errors import SAME_COLLECTIVES
from shardfn.ops.messages import Message, Receive
from shardfn.partition.collective_bytes import collectives_in
from shardfn.partition.emission.emit_collectives import apply_move
from shardfn.partition.emission.graph_builder import Builder, LocalShard
from shardfn.partition.printing import local_text
from shardfn.partition.redistribute import Move
from shardfn.runtime import simulator
from shardfn.runtime.simulator import Mail, Request, combine, simulate
from shardfn.types import Aval, Collective, LocalProgram

SUM, MAX = ("sum", "R"), ("max", "R")
Step = tuple[str, int, str]  # what is pending, over which axis, at which line


def program(sizes: Sequence[int], shape: tuple[int, ...], steps: Sequence[Step]) -> LocalProgram:
    """A program of one rank that reduces its one input once for each step."""
    axes, names = (pieces.mesh_axes(sizes), [f"group:{k}" for k in range(len(sizes))])
    b = Builder(axes, (0,) * len(sizes), _compat.FakeTensorMode(), "cpu", tuple(names))
    with b.mode:
        value = torch.empty(shape)
        piece = b.shard(b.placeholder("x", value), value, ("R",) * len(sizes))
        for op, axis, line in steps:
            b.about = {"origin": "mm", "source": line}
            before = tuple(op if k == axis else "R" for k in range(len(sizes)))
            pending = LocalShard(piece.node, piece.shape, piece.stride, before, piece.local_shape)
            piece = apply_move(
                b, pending, Move("all_reduce", axis, before, ("R",) * len(sizes)), False
            )
    b.graph.output([piece.node])
    return LocalProgram(
        "f", axes, b.graph, b.graph, ("x",), (), ((),), ("result",), (), local_text, collectives_in
    )


def run(
    sizes: Sequence[int], programs: Sequence[LocalProgram], *values: torch.Tensor
) -> list[torch.Tensor]:
    return [result[0] for result in simulate(programs, [[v] for v in values], pieces.ranks(sizes))]


def divergence(
    sizes: Sequence[int], programs: Sequence[LocalProgram], *values: torch.Tensor
) -> str:
    with pytest.raises(sf.DivergenceError) as error:
        run(sizes, programs, *values)
    return str(error.value)


X = torch.arange(3.0)


def test_ranks_with_the_same_program_meet_at_each_collective() -> None:
    same = program((2, 2), (3,), [("sum", 0, "model.py:1"), ("max", 1, "model.py:2")])
    got = run((2, 2), [same] * 4, X, X + 10, X * 9, -X)
    assert [g.tolist() for g in got] == [[10.0, 10.0, 20.0]] * 4, (
        "sums over a are 10x and 10; over b the larger counts"
    )


def test_ranks_that_ask_for_different_reductions_are_named_with_their_lines() -> None:
    a, b = (
        program((2,), (3,), [("sum", 0, "model.py:3")]),
        program((2,), (3,), [("max", 0, "model.py:7")]),
    )
    assert divergence((2,), [a, b], X, X) == "\n".join([
        "axis a: ranks enter different collectives",
        "  rank 0: all_reduce over a of (3,) torch.float32, at model.py:3",
        "  rank 1: all_reduce over a of (3,) torch.float32, at model.py:7",
        f"  try: {SAME_COLLECTIVES}",
    ])  # fmt: skip


def test_ranks_that_ask_for_different_shapes_are_named_with_their_lines() -> None:
    a, b = (
        program((2,), (3,), [("sum", 0, "model.py:3")]),
        program((2,), (2,), [("sum", 0, "model.py:3")]),
    )
    assert divergence((2,), [a, b], X, X[:2]) == "\n".join([
        "axis a: ranks enter different collectives",
        "  rank 0: all_reduce over a of (3,) torch.float32, at model.py:3",
        "  rank 1: all_reduce over a of (2,) torch.float32, at model.py:3",
        f"  try: {SAME_COLLECTIVES}",
    ])  # fmt: skip


def test_a_rank_that_asks_for_nothing_more_leaves_the_others_waiting() -> None:
    a, b = program((3,), (3,), [("sum", 0, "model.py:3")]), program((3,), (3,), [])
    assert divergence((3,), [a, b, a], X, X, X) == "\n".join([
        "simulator: deadlock: blocked in collectives that the other ranks of the group never "
"enter",
        "  rank 0: all_reduce over a of (3,) torch.float32, at model.py:3",
        "  rank 2: all_reduce over a of (3,) torch.float32, at model.py:3",
    ])  # fmt: skip


def test_ranks_that_take_the_axes_in_another_order_wait_for_ever() -> None:
    a = program((2, 2), (3,), [("sum", 0, "model.py:1"), ("sum", 1, "model.py:2")])
    b = program((2, 2), (3,), [("sum", 1, "model.py:2"), ("sum", 0, "model.py:1")])
    assert divergence((2, 2), [a, b, b, a], X, X, X, X) == "\n".join([
        "simulator: deadlock: blocked in collectives that the other ranks of the group never "
"enter",
        "  rank 0: all_reduce over a of (3,) torch.float32, at model.py:1",
        "  rank 1: all_reduce over b of (3,) torch.float32, at model.py:2",
        "  rank 2: all_reduce over b of (3,) torch.float32, at model.py:2",
        "  rank 3: all_reduce over a of (3,) torch.float32, at model.py:1",
    ])  # fmt: skip


def test_groups_go_on_without_waiting_for_other_groups() -> None:
    """Ranks of different rows may be in different collectives, as long as each group agrees."""
    once = program((2, 2), (3,), [("sum", 1, "model.py:1")])
    twice = program((2, 2), (3,), [("sum", 1, "model.py:1"), ("sum", 1, "model.py:2")])
    got = run((2, 2), [once, once, twice, twice], X, X, X, X)
    assert [g.tolist() for g in got] == [(2 * X).tolist()] * 2 + [(4 * X).tolist()] * 2


def test_only_eight_waiting_ranks_are_listed() -> None:
    waits, ends = (program((11,), (3,), [("sum", 0, "model.py:3")]), program((11,), (3,), []))
    text = divergence((11,), [ends, *[waits] * 10], *[X] * 11)
    assert [line.split(":")[0] for line in text.splitlines()[1:]] == [
        f"  rank {r}" for r in range(1, 9)
    ]


def asked(kind: str, values: Sequence[torch.Tensor], op: str | None = None) -> list[torch.Tensor]:
    """What each rank receives that asks for this with its value."""
    record = Collective(kind, "a", 0, op, "node", None, False)
    return combine([Request(record, (), v) for v in values])


VALUES = [
    torch.randn(6, generator=torch.Generator().manual_seed(s), dtype=torch.float64)
    for s in range(3)
]
STACKED = torch.stack(VALUES)


@pytest.mark.parametrize(
    ("op", "reduce"), [("sum", torch.sum), ("max", torch.amax), ("min", torch.amin)]
)
def test_reductions_equal_torchs(op: str, reduce: object) -> None:
    whole = reduce(STACKED, 0)
    for got in asked("all_reduce", VALUES, op):
        torch.testing.assert_close(got, whole, rtol=1e-14, atol=0)
    for got, wanted in zip(asked("reduce_scatter", VALUES, op), whole.chunk(3), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-14, atol=0)


def test_an_all_gather_gives_everyone_every_value_in_the_order_of_ranks() -> None:
    for got in asked("all_gather", VALUES):
        assert torch.equal(got, torch.cat(VALUES))


def test_an_all_to_all_is_a_transpose() -> None:
    got = torch.stack(asked("all_to_all", VALUES)).view(3, 3, 2)
    assert torch.equal(got, STACKED.view(3, 3, 2).transpose(0, 1))
    back = asked("all_to_all", asked("all_to_all", VALUES))
    assert all(torch.equal(a, b) for a, b in zip(back, VALUES, strict=True)), "and its own inverse"


def test_a_gather_of_scattered_parts_is_the_reduction() -> None:
    parts = asked("reduce_scatter", VALUES, "sum")
    assert torch.equal(asked("all_gather", parts)[0], asked("all_reduce", VALUES, "sum")[0])


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_what_ranks_receive_shares_no_memory(kind: str) -> None:
    got = asked(kind, VALUES, "sum" if "reduce" in kind else None)
    addresses = {g.untyped_storage().data_ptr() for g in (*got, *VALUES)}
    assert len(addresses) == 6


def test_integers_and_booleans_reduce_too() -> None:
    ints = [torch.tensor([1, 2]), torch.tensor([3, -4])]
    assert asked("all_reduce", ints, "sum")[1].tolist() == [4, -2]
    assert asked("all_reduce", ints, "min")[0].tolist() == [1, -4]
    bools = [torch.tensor([True, False]), torch.tensor([False, False])]
    assert asked("all_reduce", bools, "sum")[0].tolist() == [True, False]
    assert asked("all_reduce", [torch.empty(0)] * 2, "sum")[0].shape == (0,)


def test_ranks_that_wait_for_messages_that_nobody_sends_are_named() -> None:
    aval = Aval((2, 3), (3, 1), torch.float32, "cpu")
    group = pieces.mesh_axes((2,))

    def waiting(source: int, target: int) -> Any:
        made = f"F of stage {source}, microbatch 5"
        message = Message(source, target, 0, ("value", 1, 0), aval, "%mm", "model.py:4", made)
        yield Mail(Receive(message, group.names[0], "group:0"), [])

    with pytest.raises(sf.DivergenceError) as error:
        simulator._lockstep([waiting(1, 0), waiting(0, 1)], [(0,), (1,)], group)
    what = "(2, 3) torch.float32 from coordinate"
    assert str(error.value) == "\n".join([
        "simulator: deadlock: blocked in messages that no rank sends",
        f"  rank 0: waits for %mm of F of stage 1, microbatch 5, {what} 1 to 0, at model.py:4",
        f"  rank 1: waits for %mm of F of stage 0, microbatch 5, {what} 0 to 1, at model.py:4",
    ])  # fmt: skip
