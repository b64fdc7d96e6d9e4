"""explain and assert_comms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from message import without_line
from worlds import simulated

import shardfn as sf
from shardfn import P

W = {"a": torch.ones(6, 8), "b": torch.ones(8, 3)}
X = torch.ones(12, 6)


def _loss(w: Any, x: torch.Tensor) -> torch.Tensor:
    return ((x @ w["a"]).tanh() @ w["b"]).square().mean()


@pytest.fixture
def step() -> Iterator[Any]:
    with simulated(dp=2, tp=2, sp=1) as mesh:
        where = {"a": P("dp", "tp"), "b": P("tp", "sp")}
        yield sf.shard(sf.bucketed_grad(_loss), mesh, (where, P("dp")))


def test_s1_2_every_collective_and_those_that_were_removed(step: Any) -> None:
    found = sf.explain(step, W, X)
    assert found.collectives == step.lower(W, X).collectives
    assert found.nbytes == sum(c.nbytes for c in found.collectives)
    assert {c.axis for c in found.collectives} == {"dp", "tp"} and found.elided
    text = str(found)
    assert f"  {found.elided} collectives over axes of one rank were removed\n" in text
    assert "buckets of shard(bucketed_grad(_loss))" in text
    assert f"{__file__}:" in text


def test_shapes_stand_for_tensors_and_both_halves_of_a_backward_count(step: Any) -> None:
    shapes = sf.tree_map(lambda x: sf.ShapeDtype(x.shape), (W, X))
    assert sf.explain(step, *shapes).collectives == sf.explain(step, W, X).collectives
    w = sf.tree_map(lambda x: x.clone().requires_grad_(), W)
    with sf.use_mesh(sf.make_mesh((4,), ("dp",))) as mesh:
        call = sf.shard(_loss, mesh, (P(), P("dp")))
        kinds = [c.kind for c in sf.explain(call, w, X).collectives]
    assert kinds == ["all_reduce"] * 2  # the loss, and a bucket of gradients


def test_a_budget_that_holds_gives_the_explanation(step: Any) -> None:
    found = sf.explain(step, W, X)
    counts = {"all_to_all": 0, "all_gather": 1}
    same = sf.assert_comms(step, W, X, counts=counts, max_bytes=found.nbytes, max_implicit=9)
    assert same == found


def test_all_that_is_over_the_budget_is_listed(step: Any) -> None:
    with pytest.raises(sf.BudgetError) as error:
        sf.assert_comms(step, W, X, counts={"all_gather": 0}, max_bytes="1B", max_implicit=0)
    head, *lines = without_line(error.value).splitlines()
    assert head.startswith(
        "shard(bucketed_grad(_loss)): 1 all_gather, and 0 in the budget: for mm over dp, "
    )
    assert ", but the budget allows 1 B: all_gather for mm over dp, " in lines[0]
    assert (
        "implicit collectives, and at most 0 in the budget: all_gather for mm over dp" in lines[1]
    )
    assert lines[2].startswith("  try: print(sf.explain(")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"counts": {"allreduce": 1}},
            "assert_comms: 'allreduce' in counts\n  needed: kinds of collectives: all_reduce, ",
        ),
        ({"counts": {"all_reduce": -1}}, "assert_comms, counts: counts is {'all_reduce': -1}"),
        ({"max_bytes": "lots"}, "assert_comms, max_bytes: "),
        ({"max_implicit": "no"}, "assert_comms, max_implicit: max_implicit is 'no', a str"),
    ],
)
def test_bad_options(step: Any, options: Any, text: str) -> None:
    with pytest.raises(sf.ShardError) as error:
        sf.assert_comms(step, W, X, **options)
    assert without_line(error.value).startswith(text)


def test_a_plain_function_is_refused() -> None:
    with pytest.raises(sf.ShardError, match="explain: _loss is not a transformed function"):
        sf.explain(_loss, W, X)


@pytest.mark.parametrize("size", [torch.ones(2), torch.tensor(0), 0.5, "much"])
def test_a_budget_that_is_no_number_of_bytes_is_refused(size: Any) -> None:
    with pytest.raises(sf.ShardError, match="assert_comms, max_bytes: .* is not"):
        sf.assert_comms(lambda x: x, torch.ones(2), max_bytes=size)
