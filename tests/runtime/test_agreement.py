"""Ranks compare their plans and their plain tensors; here each rank is a call in one process."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.runtime import agreement
from shardfn.runtime.agreement import VERSIONS, agree, checked, compare_ranks, has_others
from shardfn.runtime.options import Request
from shardfn.schedule import plan_schedule
from tests.support.stages.plans import data_parallel

REQUEST = Request("f", print, print)
PLACED: Any = SimpleNamespace(paths=("x", "n"))


def gathers(monkeypatch: pytest.MonkeyPatch, *others: Any) -> None:
    """Each comparison gives this rank's text, then that of the other rank in turn."""
    answers = iter(others)

    def texts(where: str, mine: str) -> list[str]:
        kind, value = json.loads(mine)
        other = next(answers, value)
        return [mine, json.dumps([kind, other])]

    monkeypatch.setattr(agreement, "texts_of_ranks", texts)
    monkeypatch.setattr(agreement, "has_others", lambda placed: True)


def test_ranks_that_compare_other_things_are_in_different_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = lambda where, mine: [mine, json.dumps(["collectives", 1])]
    monkeypatch.setattr(agreement, "texts_of_ranks", texts)
    with pytest.raises(sf.DivergenceError) as caught:
        agreement.gathered("f", "programs", 1)
    assert str(caught.value) == (
        "f: ranks are in different calls\n  rank 0 compares programs\n  rank 1 compares "
        "collectives\n  try: make the same calls in the same order on every rank"
    )


def test_equal_plans_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    gathers(monkeypatch)
    plan = data_parallel()
    agree("f", plan, plan_schedule(plan, "f"))


def test_the_first_line_that_differs_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = data_parallel()
    mine = [*map(agreement.Line, VERSIONS), *agreement._lines(plan)]
    at = len(VERSIONS) + 3
    theirs = [*mine[:at], ("another step", None)]
    gathers(monkeypatch, "another digest", theirs)
    with pytest.raises(sf.DivergenceError) as caught:
        agree("f", plan, plan_schedule(plan, "f"))
    text = str(caught.value)
    assert text.startswith("f: ranks hold different programs\n")
    assert f"rank 0: {mine[at]}" in text and "rank 1: another step" in text


def test_a_plan_as_lines_knows_shapes_placements_and_sources() -> None:
    lines = [str(line) for line in agreement._lines(data_parallel())]
    assert lines[:2] == ["(a=2)", "in (4, 4) torch.float32 placed ('R',)"]
    assert any("%mm" in line and "at model.py:mm" in line for line in lines)
    assert any("all_reduce ('sum',) -> ('R',)" in line for line in lines)


def test_ranks_of_one_machine_compare_devices_by_type() -> None:
    def line(number: int) -> str:
        graph = torch.fx.Graph()
        device = torch.device("cuda", number)
        where = {"device": device, "shape": [2, device]}
        node = graph.call_function(torch.ops.aten.zeros.default, ([2],), where)
        return agreement._line(SimpleNamespace(node=node, made=())).text

    assert line(0) == line(3)
    assert "cuda" in line(0)


def row(x: torch.Tensor, what: str = "argument x") -> Any:
    return [[what, list(x.shape), str(x.dtype)], agreement.digest_of(x)]


def test_a_plain_tensor_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2)
    gathers(monkeypatch, (False, [row(x)]))
    compare_ranks(REQUEST, PLACED, [x, 3])
    gathers(monkeypatch, (False, [row(torch.zeros(2))]))
    with pytest.raises(sf.DivergenceError) as caught:
        compare_ranks(REQUEST, PLACED, [x, 3])
    text = str(caught.value)
    assert text.startswith("f, argument x: a plain tensor that differs between rank 0 and rank 1")
    assert caught.value.arg_path == "x"


def test_a_dtensor_on_one_rank_alone_is_named_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other argument, which is equal, was named when only plain tensors were paired."""
    x, y = torch.ones(2), torch.zeros(2)
    mine: Any = SimpleNamespace(paths=("x", "y"))
    placed = [["argument x", None, ""], ""]
    same = row(y, "argument y")
    cases: list[tuple[list[Any], str]] = [
        ([placed, same], "a plain tensor on rank 0, a DTensor on rank 1"),
        ([same], "a plain tensor on rank 0, no tensor on rank 1"),
    ]
    for theirs, text in cases:
        gathers(monkeypatch, (False, theirs))
        with pytest.raises(sf.DivergenceError) as caught:
            compare_ranks(REQUEST, mine, [x, y])
        assert f"f, argument x: {text}\n" in str(caught.value)
        assert caught.value.arg_path == "x"


def test_other_shapes_are_left_to_the_comparison_of_plans_while_staging(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.ones(2)
    gathers(monkeypatch, (True, [row(torch.ones(3))]))
    compare_ranks(REQUEST, PLACED, [x, 3], staging=True)
    gathers(monkeypatch, (False, [row(torch.ones(3))]))
    with pytest.raises(sf.DivergenceError):
        compare_ranks(REQUEST, PLACED, [x, 3], staging=True)


def test_calls_are_compared_under_shardfn_check_only(monkeypatch: pytest.MonkeyPatch) -> None:
    run = lambda leaves: "ran"
    monkeypatch.delenv("SHARDFN_CHECK", raising=False)
    assert checked(run, REQUEST, PLACED) is run
    monkeypatch.setenv("SHARDFN_CHECK", "1")
    x = torch.ones(2)
    gathers(monkeypatch, (False, [row(torch.zeros(2))]))
    with pytest.raises(sf.DivergenceError):
        checked(run, REQUEST, PLACED)([x, 3])


def test_lazy_bits_do_not_count_and_values_do() -> None:
    z = torch.tensor([1 + 2j])
    assert agreement.digest_of(z.conj()) == agreement.digest_of(torch.tensor([1 - 2j]))
    assert agreement.digest_of(torch.tensor(0.0)) != agreement.digest_of(torch.tensor(-0.0))


@pytest.mark.parametrize(
    ("kind", "size", "mesh"), [("fake", 2, 1), ("real", 1, 1), ("real", 2, None)]
)
def test_a_call_without_other_ranks_compares_nothing(kind: str, size: int, mesh: Any) -> None:
    placed: Any = SimpleNamespace(world=SimpleNamespace(kind=kind, size=size), mesh=mesh)
    assert not has_others(placed)
