"""torch's step on copies of tensors inside a graph: once for each kind of parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardfn.capture import trace
from shardfn.capture.modules.call import running
from shardfn.capture.optimizers import graph as steps
from shardfn.capture.optimizers.graph import after_step, without_copies
from shardfn.capture.optimizers.recipe import Recipe
from shardfn.capture.optimizers.rows import Row
from shardfn.capture.optimizers.step import Step
from tests.support.stages.bodies import lowered
from tests.support.stages.graphs import calls, graph_of

F64 = torch.float64
XS = [torch.tensor(row, dtype=F64) for row in ([1.0, 2.0], [3.0, 5.0], [7.0])]
ADAM = Recipe("optim(Adam)", torch.optim.Adam, {"lr": 0.1}, ())
MOMENTUM = Recipe("optim(SGD)", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, ())


def rows(recipe: Recipe, xs: Any, grads: Any = None) -> list[Row]:
    step = Step(recipe)
    paths = [f"x{i}" for i in range(len(xs))]
    state = step.first(paths, xs, {})
    return step.rows(paths, xs, grads or [x.sin() for x in xs], state)


def in_graph(fn: Any, *args: torch.Tensor) -> torch.fx.GraphModule:
    """The graph of a function that Dynamo leaves as one call."""

    def run(*xs: torch.Tensor) -> Any:
        with running("f"):
            return fn(*xs)

    return lowered(run, *args)


def after(recipe: Recipe, *xs: torch.Tensor) -> list[torch.Tensor]:
    """The parameters after a first step."""
    return [p for p, _ in after_step(recipe, rows(recipe, xs), {})]


def torchs(cls: Any, **options: Any) -> list[torch.Tensor]:
    params = [x.clone() for x in XS]
    for p in params:
        p.grad = p.sin()
    cls(params, **options).step()
    return params


def test_parameters_of_one_kind_share_a_trace(monkeypatch: Any) -> None:
    traced: list[str] = []
    of = trace.traced
    monkeypatch.setattr(steps.trace, "traced", lambda *args: traced.append(args[2]) or of(*args))
    found = in_graph(lambda *xs: after(ADAM, *xs), *XS)(*XS)
    assert traced == ["optim(Adam)"] * 2, "of two and of one element"
    torch.testing.assert_close(found, torchs(torch.optim.Adam, lr=0.1))


class Mean(torch.optim.Optimizer):
    """A step that combines parameters: each moves by the mean of all gradients."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            means = [p.grad.mean() for p in group["params"]]
            for p in group["params"]:
                p -= group["lr"] * sum(means)


MEAN = Recipe("optim(Mean)", Mean, {"lr": 0.5}, ())


def test_a_users_step_sees_all_parameters_together() -> None:
    found = in_graph(lambda *xs: after(MEAN, *xs), *XS)(*XS)
    torch.testing.assert_close(found, torchs(Mean, lr=0.5))


def test_samples_of_a_vmap_have_their_own_steps() -> None:
    batch = torch.stack([XS[0], XS[1], XS[0] * 2])
    batched = torch.func.vmap(lambda x: after(ADAM, x)[0])
    (found,) = in_graph(lambda x: [batched(x)], batch)(batch)
    wanted = batch - 0.1 * batch.sin().sign()  # Adam's first step
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_options_are_inputs_of_the_graph() -> None:
    fn = lambda x, rate: [after_step(ADAM, rows(ADAM, [x]), {"lr": rate})[0][0]]
    module = in_graph(fn, XS[0], torch.tensor(0.1))
    for rate in (0.1, 0.7):
        found = module(XS[0], torch.tensor(rate))
        wanted = torchs(torch.optim.Adam, lr=rate)[:1]
        torch.testing.assert_close(found, wanted)


def test_a_step_works_on_copies() -> None:
    (row,) = rows(MOMENTUM, XS[:1])
    ((param, state),) = steps.stepped(MOMENTUM, [row], {})
    assert torch.equal(state["momentum_buffer"], XS[0].sin())
    assert torch.equal(row.param, XS[0]) and not torch.equal(param, XS[0])


def test_whole_numbers_are_counted_in_float64() -> None:
    copied = steps._copied({"step": torch.tensor(3), "mask": torch.tensor([1])})
    assert copied["step"].dtype == F64 and copied["mask"].dtype == torch.int64
    kept = steps._kept(copied, {"step": torch.tensor(0)})
    assert kept["step"].dtype == torch.int64 and int(kept["step"]) == 3


def test_copies_are_dropped_where_the_layout_is_the_same() -> None:
    aten = torch.ops.aten

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        same = aten.clone.default(x)
        turned = aten.clone.default(x.t(), memory_format=torch.contiguous_format)
        return [aten.copy.default(same, x + 1), turned]

    graph = graph_of(fn, torch.ones(2, 3))
    without_copies(graph)
    graph.lint()
    assert not calls(graph, "copy") and len(calls(graph, "clone")) == 1
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    x = torch.arange(6.0).view(2, 3)
    torch.testing.assert_close(module(x), [x + 1, x.t()])


def test_another_error_than_that_of_a_batch_is_the_users() -> None:
    class Fails(Mean):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError("mine")

    recipe = Recipe("optim(Fails)", Fails, {"lr": 0.5}, ())
    (row,) = rows(MEAN, XS[:1])
    with pytest.raises(RuntimeError, match="mine"):
        after_step(recipe, [row], {})
