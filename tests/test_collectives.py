"""The table of collectives: every kind is told in full, and a new kind is one row."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import attrs
import pieces
import pytest
import torch

from shardfn import _compat
from shardfn.collectives import (
    COLLECTIVES,
    PARTIAL,
    REPLICATED,
    STEPS,
    CollectiveKind,
    add_row,
    custom_collective_ops,
    kind_of_op,
)
from shardfn.compile.collective_order import collective_events
from shardfn.hardware import H100
from shardfn.partition import collective_bytes
from shardfn.partition.collective_bytes import collectives_in
from shardfn.partition.emission import emit_collectives
from shardfn.partition.emission.graph_builder import Builder
from shardfn.partition.printing import local_text
from shardfn.partition.redistribute import Move, axis_price, kind_of, price
from shardfn.runtime.simulator import Request, simulate
from shardfn.schedule.check import check, sends
from shardfn.types import LocalProgram
from tests.support.reading.source import modules

SIZES = (3,)
MOVE = Move("all_reduce_twice", 0, ("sum",), ("R",))


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
        op="test_collectives.all_reduce_twice",
        rounds=4.0,
        reduces=True,
        payload=collective_bytes.Sender.local,
        emit=emit_collectives.reduce,
        combine=doubled,
    )
    add_row(row)
    yield row
    del COLLECTIVES[row.name]


def program() -> LocalProgram:
    """A program of one rank that redistributes its one input by the new move."""
    axes = pieces.mesh_axes(SIZES)
    b = Builder(axes, (0,), _compat.FakeTensorMode(), "cpu", ("group",))
    with b.mode:
        value = torch.empty(2, 5, dtype=torch.float64)
        term = b.shard(b.placeholder("x", value), value, ("sum",))
        b.about = {"origin": "mm", "source": "f.py:1"}
        result = emit_collectives.apply_move(b, term, MOVE, False)
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
        collectives_in,
    )


def test_a_new_kind_is_priced(row: CollectiveKind) -> None:
    assert price("all_reduce_twice", 90.0, 3) == 2 * price("all_reduce", 90.0, 3) - 1
    once, twice = (H100.send(k, 900, 3) for k in ("all_reduce", "all_reduce_twice"))
    assert twice - H100.latency == pytest.approx(2 * (once - H100.latency))


def test_the_bytes_of_a_new_kind_are_counted(row: CollectiveKind) -> None:
    axes = pieces.mesh_axes(SIZES)
    assert collective_bytes.nbytes((2, 5), 8, MOVE, axes) == 80


def test_a_new_kind_is_emitted_with_its_record_and_passes_the_check(row: CollectiveKind) -> None:
    made = program()
    (start,) = (n for n in made.graph.nodes if "collective" in n.meta)
    record = start.meta["collective"]
    assert start.target is torch.ops.test_collectives.all_reduce_twice.default
    assert (record.kind, record.op, record.nbytes) == ("all_reduce_twice", "sum", 80)
    check(made.graph, made.axes)
    assert sends(start.target)


def test_a_new_kind_is_simulated(row: CollectiveKind) -> None:
    terms = [torch.full((2, 5), 1.0 + rank, dtype=torch.float64) for rank in range(3)]
    results = simulate([program()] * 3, [[x] for x in terms], pieces.ranks(SIZES))
    for (result,) in results:
        assert torch.equal(result, 3 * sum(terms))


def test_a_new_kind_is_printed(row: CollectiveKind) -> None:
    text = str(program())
    assert "1 all_reduce_twice over a, 80 B" in text
    assert "all_reduce_twice[sum, a](%x)" in text


def test_a_new_kind_is_seen_in_generated_code(row: CollectiveKind) -> None:
    code = "torch.ops.test_collectives.all_reduce_twice.default(buf0, 'sum', '0')"
    assert collective_events(code) == [("start", "all_reduce_twice")]
    assert kind_of_op("test_collectives.all_reduce_twice") is row


def test_a_new_kind_of_ours_gets_a_lowering(row: CollectiveKind) -> None:
    assert {o.name() for o in custom_collective_ops()} == {
        "shardfn::halo",
        "shardfn::permute",
        "shardfn::ragged_all_to_all",
        "test_collectives::all_reduce_twice",
    }


def test_a_new_kind_may_carry_a_step_of_a_redistribution(row: CollectiveKind) -> None:
    before = dict(STEPS)
    try:
        add_row(attrs.evolve(row, carries=(PARTIAL, REPLICATED), priced_as="all_reduce"))
        assert kind_of("sum", "R") == kind_of("max", "R") == row.name
        assert kind_of("sum", 0) == "reduce_scatter"
        a, b = (axis_price("sum", x, 90.0, 3, (9,)) for x in ("R", 0))
        assert a == b
    finally:
        STEPS.update(before)
    assert kind_of("sum", "R") == "all_reduce"


def named_elsewhere() -> list[str]:
    """Where the package compares with the name of a kind, or makes a move of one, by its text."""
    found = []
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Compare):
                texts = [node.left, *node.comparators]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Move":
                texts = node.args
            else:
                continue
            inside = [c for text in texts for c in ast.walk(text)]
            values = [c.value for c in inside if isinstance(c, ast.Constant)]
            found += [module.at(node) for value in values if value in COLLECTIVES]
    return found


def test_kinds_are_named_by_the_constants_of_the_table() -> None:
    assert named_elsewhere() == []


@pytest.mark.parametrize("name", [name for name, row in COLLECTIVES.items() if not row.is_message])
def test_every_kind_can_be_counted_emitted_and_simulated(name: str) -> None:
    kind = COLLECTIVES[name]
    assert kind.carries is None or STEPS[kind.carries] == name
    assert None not in (kind.payload, kind.emit, kind.combine)
    assert kind_of_op(kind.op) is kind
    assert sends(kind.overload)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter"])
def test_gradients_travel_in_buckets_of_three_kinds(name: str) -> None:
    assert COLLECTIVES[name].packing is not None
