"""The table of collectives: every kind is told in full, and a new kind is one row."""

from __future__ import annotations

from collections.abc import Iterator

import pieces
import pytest
import torch

from shardfn import _compat
from shardfn.collectives import COLLECTIVES, MOVES, CollectiveKind, add, started_by
from shardfn.compile.collective_order import events
from shardfn.hardware import H100
from shardfn.partition import payload
from shardfn.partition.emission import moves
from shardfn.partition.emission.builder import Builder
from shardfn.partition.printing import local_text
from shardfn.partition.redistribute import Move, price
from shardfn.runtime.simulator import Request, simulate
from shardfn.schedule.check import check, sends
from shardfn.types import LocalProgram

SIZES = (3,)
MOVE = Move("reduce_twice", 0, ("sum",), ("R",))


@torch.library.custom_op("test_collectives::all_reduce_twice", mutates_args=())
def all_reduce_twice(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    raise AssertionError("only the simulator runs it")


all_reduce_twice.register_fake(lambda x, op, group: torch.empty_like(x))


def doubled(group: list[Request]) -> list[torch.Tensor]:
    """An all-reduce of an all-reduce: n times the sum."""
    total = torch.stack([request.value for request in group]).sum(0)
    return [len(group) * total for _ in group]


@pytest.fixture
def row() -> Iterator[CollectiveKind]:
    """The row of a kind that only this file knows."""
    row = CollectiveKind(
        name="all_reduce_twice",
        move="reduce_twice",
        op="test_collectives.all_reduce_twice",
        rounds=4.0,
        reduces=True,
        payload=payload.Sender.local,
        emit=moves.reduce,
        combine=doubled,
    )
    add(row)
    yield row
    del COLLECTIVES[row.name], MOVES[row.move]


def program() -> LocalProgram:
    """A program of one rank that redistributes its one input by the new move."""
    axes = pieces.mesh_axes(SIZES)
    b = Builder(axes, (0,), _compat.FakeTensorMode(), "cpu", ("group",))
    with b.mode:
        value = torch.empty(2, 5, dtype=torch.float64)
        term = b.piece(b.placeholder("x", value), value, ("sum",))
        b.about = {"origin": "mm", "source": "f.py:1"}
        result = moves.apply_move(b, term, MOVE, False)
    b.graph.output([result.node])
    return LocalProgram(
        "f",
        axes,
        b.graph,
        b.graph,
        ("x",),
        (("sum",),),
        (("R",),),
        ("result",),
        (),
        local_text,
    )


def test_a_new_kind_is_priced(row: CollectiveKind) -> None:
    assert price("reduce_twice", 90.0, 3) == 2 * price("reduce", 90.0, 3) - 1
    once, twice = (H100.send(k, 900, 3) for k in ("all_reduce", "all_reduce_twice"))
    assert twice - H100.latency == pytest.approx(2 * (once - H100.latency))


def test_the_bytes_of_a_new_kind_are_counted(row: CollectiveKind) -> None:
    axes = pieces.mesh_axes(SIZES)
    assert payload.nbytes((2, 5), 8, MOVE, axes) == 80


def test_a_new_kind_is_emitted_with_its_record_and_passes_the_check(
    row: CollectiveKind,
) -> None:
    made = program()
    (start,) = (n for n in made.graph.nodes if "collective" in n.meta)
    record = start.meta["collective"]
    assert start.target is torch.ops.test_collectives.all_reduce_twice.default
    assert (record.kind, record.op, record.nbytes) == (
        "all_reduce_twice",
        "sum",
        80,
    )
    check(made.graph, made.axes)
    assert sends(start.target)


def test_a_new_kind_is_simulated(row: CollectiveKind) -> None:
    terms = [
        torch.full((2, 5), 1.0 + rank, dtype=torch.float64) for rank in range(3)
    ]
    results = simulate([program()] * 3, [[x] for x in terms], pieces.ranks(SIZES))
    for (result,) in results:
        assert torch.equal(result, 3 * sum(terms))


def test_a_new_kind_is_printed(row: CollectiveKind) -> None:
    text = str(program())
    assert "1 all_reduce_twice over a, 80 B" in text
    assert "all_reduce_twice[sum, a](%x)" in text


def test_a_new_kind_is_seen_in_generated_code(row: CollectiveKind) -> None:
    code = "torch.ops.test_collectives.all_reduce_twice.default(buf0, 'sum', '0')"
    assert events(code) == [("start", "all_reduce_twice")]
    assert started_by("test_collectives.all_reduce_twice") is row


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_kind_can_be_counted_emitted_and_simulated(name: str) -> None:
    kind = COLLECTIVES[name]
    assert MOVES[kind.move] is kind
    assert None not in (kind.payload, kind.emit, kind.combine)
    assert started_by(kind.op) is kind
    assert sends(kind.overload)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter"])
def test_gradients_travel_in_buckets_of_three_kinds(name: str) -> None:
    assert COLLECTIVES[name].packing is not None
