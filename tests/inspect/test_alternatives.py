"""The strategies that propagation weighed for each op, the cheapest first."""

from __future__ import annotations

import pieces
import torch

from shardfn.inspect.alternatives import considered
from tests.support.stages.plans import planned, program_of

X, W = torch.ones(8, 4), torch.ones(4, 6)
FN = lambda x, w: [x @ w]


def found(ins, sizes=(2,)):
    program = program_of(FN, X, W)
    axes = pieces.mesh_axes(sizes)
    return considered(program, axes, ins, [None], ())


def test_every_strategy_is_listed_by_price() -> None:
    (rows,) = found([(0,), ("R",)]).values()
    assert (rows[0].ins, rows[0].outs, rows[0].price) == ((0, "R"), (0,), 0.0)
    prices = [row.price for row in rows]
    assert prices == sorted(prices) and len(rows) > 3
    assert (("R", "R"), ("R",)) in [(row.ins, row.outs) for row in rows]


def test_each_argument_has_the_bytes_that_it_sends() -> None:
    (rows,) = found([(0,), (1,)]).values()
    by_ins = {row.ins: row.sends for row in rows}
    assert by_ins[0, "R"][0] == 0.0 < by_ins[0, "R"][1]
    assert by_ins["R", 1][1] == 0.0 < by_ins["R", 1][0]


def test_a_slice_sends_nothing() -> None:
    (rows,) = found([("R",), ("R",)]).values()
    assert {row.sends for row in rows if "sum" not in row.ins} == {(0.0, 0.0)}


def test_there_is_a_list_for_each_op_and_axis_by_the_number_of_its_result() -> None:
    plan = planned(FN, (X, W), [(0, "R"), ("R", 1)], sizes=(2, 3))
    number = plan.steps[0].made[0].number
    assert set(found([(0, "R"), ("R", 1)], (2, 3))) == {(number, 0), (number, 1)}
