"""Equal ops take the strategy of the first of them; a call that differs in anything is weighed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.partition.propagation import walk as walks
from shardfn.partition.rule_api import registry
from tests.support.stages.plans import planned, told

X, W = torch.ones(8, 4), torch.ones(4, 4)
FEW, MANY = 4, 9


@pytest.fixture
def weighed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The ops that are weighed."""
    seen: list[Any] = []
    weigh = walks.Walk.weigh

    def noted(self: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(call.target)
        return weigh(self, call, *args, **kwargs)

    monkeypatch.setattr(walks.Walk, "weigh", noted)
    yield seen


def layers(step: Callable[[Any, Any], Any], count: int = FEW) -> Callable[[Any, Any], list[Any]]:
    """Several times the same step."""

    def run(x: torch.Tensor, w: torch.Tensor) -> list[Any]:
        for _ in range(count):
            x = step(x, w)
        return [x]

    return run


ALIKE: dict[str, Callable[[Any, Any], Any]] = {
    "pointwise": lambda x, w: (x + 1).tanh(),
    "product": lambda x, w: x @ w,
    "views": lambda x, w: x.T.reshape(2, 2, 8).flatten(0, 1).T,
}


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("marks", [((0,), ("R",)), (("R",), ("R",))])
def test_more_layers_need_no_more_choices(name: str, marks: Any, weighed: list[Any]) -> None:
    planned(layers(ALIKE[name]), (X, W), marks)
    few = len(weighed)
    plan = planned(layers(ALIKE[name], MANY), (X, W), marks)
    assert few == len(weighed) - few < len(told(plan))


def test_the_plan_is_that_of_weighing_each_op(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).relu() + x.sum(0) * w.T.mean()

    for marks in [((0,), ("R",)), ((1,), (0,)), (("R",), (1,)), ((0,), (1,))]:
        short = told(planned(layers(step), (X, W), marks))
        with monkeypatch.context() as patch:
            patch.setattr(walks, "strategy_cache_key", lambda *args: None)
            assert told(planned(layers(step), (X, W), marks)) == short


DIFFERENT: dict[str, Callable[[Any, Any], list[Any]]] = {
    "number": lambda x, w: [x.sum(0), x.sum(1)],
    "dtype": lambda x, w: [x.exp(), x.double().exp()],
    "size": lambda x, w: [x.exp(), x[:4].exp()],
    "type of a number": lambda x, w: [x + 1, x + 1.0, x + True],
    "strides": lambda x, w: [w.exp(), w.T.exp()],
    "one value twice": lambda x, w: [w * (w + 1), w * w],
    "name of an argument": lambda x, w: [x.var(correction=1), x.var(correction=0)],
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_call_that_differs_is_weighed(name: str, weighed: list[Any]) -> None:
    results = DIFFERENT[name](X, W)
    planned(DIFFERENT[name], (X, W), [("R",), ("R",)])
    counts = [weighed.count(target) for target in set(weighed)]
    assert max(counts) == len(results)


def test_another_placement_is_weighed(weighed: list[Any]) -> None:
    plan = planned(lambda x, w: [w.exp(), w.T.exp()], (X, W), [("R",), (0,)])
    assert told(plan)[-1].endswith("1 -> 1") and len(weighed) > 2


def test_an_op_whose_rule_may_read_the_graph_is_weighed(weighed: list[Any]) -> None:
    index = torch.tensor([0, 2, 1])
    looked = lambda x, i: [x[i], x[i]]
    planned(looked, (X, index), [(1,), ("R",)])
    assert weighed.count(torch.ops.aten.index.Tensor) == 2


def test_an_op_with_a_rule_of_the_user_is_weighed(
    monkeypatch: pytest.MonkeyPatch, weighed: list[Any]
) -> None:
    exp = torch.ops.aten.exp.default
    rules = {exp: lambda call: [(("R",), ("R",)), ((0,), (0,))]}
    monkeypatch.setattr(registry, "find", rules.get)
    planned(lambda x: [x.exp(), x.exp()], (X,), [(0,)])
    assert weighed.count(exp) == 2


def test_the_bodies_of_loops_take_the_choices_of_each_other(weighed: list[Any]) -> None:
    def run(count: int) -> int:
        def rows(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            for _ in range(count):
                x, _ = sf.scan(lambda c, _: (torch.tanh(c @ w), None), x, length=3)
            return x

        before = len(weighed)
        with sf.fake_world(2):
            mesh = sf.make_mesh((2,), ("dp",))
            sf.shard(rows, mesh, (None, sf.P("dp")), backend="aten").lower(W, X)
        return len(weighed) - before

    assert 0 < run(4) == run(2)
