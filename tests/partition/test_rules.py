"""Every sharding rule, proved: each choice of each rule is run on pieces and compared with the
plain op, in float64.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pieces
import pytest
import samples
import torch
from effort import EFFORT

import shardfn as sf
from shardfn.partition import layout, rules
from shardfn.partition.rule_api.strategy import Choice, replicated
from shardfn.types import PENDING, Marks

aten = torch.ops.aten
CUDA_ONLY = {
    f"aten._scaled_dot_product_{kind}.default"
    for kind in (
        "flash_attention",
        "flash_attention_backward",
        "efficient_attention",
        "efficient_attention_backward",
        "cudnn_attention",
        "cudnn_attention_backward",
    )
}
LINES = (
    (2,),
    (3,),
    (7,),
)  # 7 ranks: more than most dims, so that some chunks are empty
GRIDS = ((2, 2), (2, 3))
COARSE, PAIRS, FEW = (
    1,
    3,
    1,
    # how many are tried of the coarser units, of the pairs of choices on a grid, of a pointwise
    # op's ways
)
Placed = tuple[list[Marks], list[Marks]]


def choices(op: pieces.OneOp, units: Sequence[int] = (1, 2, 3)) -> list[Choice]:
    """What the rule offers for a call on one axis, in these units."""
    rule = rules.find(op.call.target)
    found = dict.fromkeys(
        rule(op.call) if rule and op.call.ins else [replicated(op.call)]
    )
    return [
        _coarser(c, u, o)
        for c in found
        for u in units
        for o in ((1, 2, 3) if len(units) > 1 else (1,))
        if o == 1 or rules.takes_strided(op.call, c)
    ]


def _coarser(choice: Choice, unit: int, outer: int) -> Choice:
    ins, outs = choice
    return tuple(layout.scaled(m, unit, outer) for m in ins), tuple(
        layout.scaled(m, unit, outer) for m in outs
    )


def placed(
    op: pieces.OneOp, per_axis: Sequence[Choice], sizes: Sequence[int]
) -> Placed | None:
    """The marks of inputs and results if each axis takes its choice; None where they cannot be
    placed so.
    """
    ins = [tuple(c[0][i] for c in per_axis) for i in range(len(op.call.ins))]
    outs = [tuple(c[1][o] for c in per_axis) for o in range(len(op.call.outs))]
    found_ins = [
        _fit(x.shape, m, sizes) for x, m in zip(op.call.ins, ins, strict=True)
    ]
    found_outs = [
        _fit(x.shape, m, sizes) for x, m in zip(op.call.outs, outs, strict=True)
    ]
    if None in found_ins or None in found_outs:
        return None
    return found_ins, found_outs


def _fit(shape: Sequence[int], marks: Marks, sizes: Sequence[int]) -> Marks | None:
    pending = {m for m in marks if m in PENDING}
    return None if len(pending) > 1 else layout.canonical(shape, marks, sizes)


def plain_ways(op: pieces.OneOp, sizes: Sequence[int]) -> Iterator[Placed]:
    """Every choice of the rule on one axis, once."""
    for choice in choices(op, (1,)):
        if (found := placed(op, [choice] * len(sizes), sizes)) is not None:
            yield found


def some_ways(
    op: pieces.OneOp, sizes: Sequence[int], most: int, units: Sequence[int]
) -> Iterator[Placed]:
    """Ways at random: a choice for each axis, in any units."""
    draw, offered = random.Random(f"{op.call.target} {sizes}"), choices(op, units)
    seen: set[Any] = set()
    for _ in range(20 * most):
        found = placed(op, draw.choices(offered, k=len(sizes)), sizes)
        key = None if found is None else (tuple(found[0]), tuple(found[1]))
        if key is not None and key not in seen and len(seen) < most:
            seen.add(key)
            yield found


def ways(op: pieces.OneOp, sizes: Sequence[int], most: int | None) -> list[Placed]:
    """The ways to try: at most so many of all, else every plain one and some in coarser units."""
    if most is None:
        return [
            *plain_ways(op, sizes),
            *some_ways(op, sizes, COARSE * EFFORT, (2, 3)),
        ]
    return list(some_ways(op, sizes, most * EFFORT, (1, 1, 2, 3)))


def prove(
    name: str,
    position: int,
    meshes: Sequence[tuple[int, ...]],
    most: int | None = None,
) -> None:
    """Run a sample in the ways that its rule knows; all failures at once."""
    op = pieces.OneOp(samples.resolve(name), *samples.make(name, position))
    failed = []
    for sizes in meshes:
        for ins, outs in ways(op, sizes, most):
            try:
                op.prove(ins, outs, sizes)
            except Exception as error:
                failed.append(
                    f"{said(op, ins, outs, sizes)}\n      {type(error).__name__}: "
                    f"{str(error)[:300]}"
                )
    if failed:
        pytest.fail(
            "\n  ".join([f"{len(failed)} wrong", *failed[:8]]), pytrace=False
        )


def said(
    op: pieces.OneOp, ins: list[Marks], outs: list[Marks], sizes: Sequence[int]
) -> str:
    """A placed call in one line."""
    shapes = ", ".join(
        f"{tuple(x.shape)} {m}" for x, m in zip(op.tensors, ins, strict=True)
    )
    made = ", ".join(
        f"{tuple(x.shape)} {m}" for x, m in zip(op.results, outs, strict=True)
    )
    return f"{op.call.target} on {sizes}: {shapes} -> {made}"


def numbered(table: dict[str, Any]) -> list[Any]:
    return [
        pytest.param(name, k, id=f"{name.removeprefix('aten.')}-{k}")
        for name, found in table.items()
        for k in range(len(found))
    ]


@pytest.mark.parametrize(("name", "position"), numbered(samples.IN_TABLES))
def test_every_choice_of_a_rule_is_right_on_one_axis(
    name: str, position: int
) -> None:
    prove(name, position, LINES)


@pytest.mark.parametrize(("name", "position"), numbered(samples.IN_TABLES))
def test_choices_are_independent_on_two_axes(name: str, position: int) -> None:
    prove(name, position, GRIDS, most=PAIRS)


@pytest.mark.parametrize("name", list(samples.POINTWISE))
def test_every_choice_of_a_pointwise_op_is_right(name: str) -> None:
    for position in range(len(samples.POINTWISE[name])):
        prove(name, position, LINES[position % 2 : position % 2 + 1])
        prove(name, position, ((7,), GRIDS[position % 2]), most=FEW)


def test_every_op_of_the_tables_has_samples() -> None:
    assert {str(op) for op in rules.RULES} - samples.IN_TABLES.keys() == CUDA_ONLY
    assert {
        name
        for name in samples.POINTWISE
        if not rules.pointwise.is_pointwise(samples.resolve(name))
    } == set()


TABLE, ROWS = (
    torch.arange(10.0, dtype=torch.float64).view(5, 2),
    torch.tensor([4, 3, 2, 1, 0]),
)
WIDE = ROWS[:, None].expand(5, 2)
LOOKUPS = {
    "embedding": (aten.embedding.default, (TABLE, ROWS), "sum"),
    "gather": (aten.gather.default, (TABLE, 0, WIDE), "sum"),
    "scatter": (aten.scatter.value, (TABLE, 0, WIDE[:3], -1.0), 0),
    "scatter_add": (aten.scatter_add.default, (TABLE, 0, WIDE, TABLE), 0),
}


@pytest.mark.parametrize("name", list(LOOKUPS))
def test_a_table_cut_over_two_axes_is_read_and_written_at_its_own_offset(
    name: str,
) -> None:
    """5 rows on 2 x 2 ranks: pieces of 2, 1, 1, 1 rows, so that equal sizes do not mean equal
    offsets.
    """
    target, args, made = LOOKUPS[name]
    op = pieces.OneOp(target, args, {})
    rest = [("R", "R")] * (len(op.tensors) - 1)
    op.prove([(0, 0), *rest], [(made, made)], (2, 2))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["embedding", "gather"])
def test_a_lookup_does_not_see_what_other_rows_of_the_table_hold(
    name: str, bad: float
) -> None:
    target, (table, *args), _ = LOOKUPS[name]
    table = table.clone()
    table[0] = table[2] = bad
    pieces.OneOp(target, (table, *args), {}).prove(
        [(0,), ("R",)], [("sum",)], (3,)
    )


def test_a_rank_with_nothing_to_add_keeps_its_own_term() -> None:
    index, values = torch.tensor([0, 1]), TABLE[:2]
    add = pieces.OneOp(
        aten.scatter_add.default,
        (TABLE, 0, index[:, None].expand(2, 2), values),
        {},
    )
    put = pieces.OneOp(aten.index_put.default, (TABLE, [index], values, True), {})
    for op in (add, put):
        if (("sum", 0, 0), ("sum",)) in choices(op, (1,)):
            op.prove([("sum",), (0,), (0,)], [("sum",)], (3,))


def test_an_op_without_a_rule_is_only_run_on_whole_values() -> None:
    op = pieces.OneOp(aten.roll.default, (torch.ones(5, 3), [1], [0]), {})
    assert rules.find(op.call.target) is None
    assert choices(op, (1,)) == [(("R",), ("R",))]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_reshape_of_what_a_rank_holds_expanded_is_a_copy(n: int) -> None:
    """Its strides on a rank are not those of the whole, and torch's fake tensors allow views
    that are none.
    """
    x = torch.arange(1.0)
    fn = lambda x: (
        x.unsqueeze(1).expand(1, 3).unsqueeze(0).expand(2, 1, 3).reshape(1, 1, 6)
    )
    with sf.fake_world(n):
        got = sf.shard(fn, sf.make_mesh((n,), ("a",)), sf.P("a"), backend="aten")(
            x
        )
        assert torch.equal(sf.full(got), fn(x))
