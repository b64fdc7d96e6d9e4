"""One step of an optimizer on flat lists: torch's own, eager and in a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.capture.optimizers.layout import STARTED
from shardfn.capture.optimizers.recipe import Recipe
from shardfn.capture.optimizers.step import Step, as_numbers
from tests.support.stages.bodies import lowered

F64 = torch.float64
PATHS = ["w", "b"]
W = torch.tensor([[0.5, -1.0], [2.0, 0.25]], dtype=F64)
B = torch.tensor([1.0, -3.0], dtype=F64)
GRADS = [W.sin(), B.cos()]
RECIPES = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
}


def step_of(name: str) -> Step:
    cls, options = RECIPES[name]
    return Step(Recipe(f"optim({cls.__name__})", cls, options, ()))


def torchs(name: str, steps: int, **options: Any) -> list[torch.Tensor]:
    """The parameters after some steps of torch's optimizer."""
    cls, own = RECIPES[name]
    params = [x.clone() for x in (W, B)]
    optimizer = cls(params, **{**own, **options})
    for k in range(steps):
        for p, g in zip(params, GRADS, strict=True):
            p.grad = g * (k + 1)
        optimizer.step()
    return params


def state_after(like: Any, flat: Any) -> Any:
    feed = iter(flat)
    return {path: {n: next(feed) for n in own} for path, own in like.items()}


def run(step: Step, take: Any, steps: int, options: Any) -> list[torch.Tensor]:
    """The parameters after some steps of ours."""
    params, state = [W, B], step.first(PATHS, [W, B], options)
    for k in range(steps):
        grads = [g * (k + 1) for g in GRADS]
        new = take(PATHS, params, grads, state, options)
        params, state = list(new[:2]), state_after(state, new[2:])
    return params


@pytest.mark.parametrize("name", RECIPES)
def test_eager_steps_are_torchs(name: str) -> None:
    step = step_of(name)
    found = run(step, step.eager, 3, {})
    torch.testing.assert_close(found, torchs(name, 3), rtol=0, atol=0)
    assert W[0, 0] == 0.5, "the parameters that were given stay as they are"


@pytest.mark.parametrize("name", RECIPES)
def test_steps_in_a_graph_are_torchs(name: str) -> None:
    step = step_of(name)
    grads = [g * 1 for g in GRADS]

    def two(w: Any, b: Any, *own: Any) -> Any:
        states = state_after(first, own)
        one = step.updated(PATHS, [w, b], grads, states, {})
        more = [g * 2 for g in GRADS]
        after = state_after(first, one[2:])
        return list(step.updated(PATHS, list(one[:2]), more, after, {})[:2])

    first = step.first(PATHS, [W, B], {})
    flat = [x for own in first.values() for x in own.values()]
    found = lowered(two, W, B, *flat)(W, B, *flat)
    torch.testing.assert_close(found, torchs(name, 2), rtol=1e-12, atol=0)


def test_options_replace_those_of_the_recipe() -> None:
    step = step_of("momentum")
    rate = torch.tensor(0.5)
    found = run(step, step.eager, 2, {"lr": rate})
    torch.testing.assert_close(found, torchs("momentum", 2, lr=0.5))
    assert as_numbers({"lr": rate, "betas": (rate, 1)}) == {
        "lr": 0.5, "betas": (0.5, 1),
    }  # fmt: skip


def test_a_parameter_without_a_gradient_stays_with_its_state() -> None:
    step = step_of("Adam")
    state = step.first(PATHS, [W, B], {})
    w, b, *own = step.eager(PATHS, [W, B], [None, GRADS[1]], state, {})
    assert torch.equal(w, W) and not torch.equal(b, B)
    after = state_after(state, own)
    assert int(after["w"]["step"]) == 0 and int(after["b"]["step"]) == 1


def test_in_a_graph_it_stays_as_if_there_was_no_step() -> None:
    step = step_of("momentum")
    state = step.first(["w"], [W], {})
    flat = [*state["w"].values()]

    def run(w: Any, *own: Any) -> Any:
        return list(step.updated(["w"], [w], [None], state_after(state, own), {}))

    found = lowered(run, W, *flat)(W, *flat)
    torch.testing.assert_close(found, [W, *flat], rtol=0, atol=0)


def test_a_first_step_unlike_the_others_is_noted() -> None:
    step = step_of("momentum")
    state = step.first(PATHS, [W, B], {})
    assert not state["w"][STARTED].item()
    own = step.eager(PATHS, [W, B], GRADS, state, {})[2:]
    assert state_after(state, own)["w"][STARTED].item()
    assert step.layout("w", W.shape, F64).is_late
    assert not step_of("Adam").layout("w", W.shape, F64).is_late


def test_layouts_are_found_once_for_each_kind_of_parameter() -> None:
    step = step_of("Adam")
    one = step.layout("w", (100, 7), F64)
    assert step.layout("other", (50, 9), F64) is one
    assert step.layout("w", (100,), F64) is not one
    assert step.layout("w", (1, 7), F64) is not one
    names = step.names(PATHS, [(W.shape, F64), (B.shape, F64)])
    assert [set(own) for own in names] == [{"step", "exp_avg", "exp_avg_sq"}] * 2


def test_shapes_need_no_values() -> None:
    found = step_of("Adam").shapes(["w"], [((10**6, 10**6), torch.float32)])
    assert found["w"]["exp_avg"].shape == (10**6, 10**6)


WRONG = {
    "the state lacks 'b'": lambda state: {"w": state["w"]},
    "state['w'] has nothing, not ": lambda state: {**state, "w": {}},
    "the state has also 'x'": lambda state: {**state, "x": {}},
}


@pytest.mark.parametrize("text", WRONG)
def test_a_state_of_other_parameters_is_refused(text: str) -> None:
    step = step_of("Adam")
    state = WRONG[text](step.first(PATHS, [W, B], {}))
    with pytest.raises(sf.TreeError) as caught:
        step.eager(PATHS, [W, B], GRADS, state, {})
    assert text in str(caught.value) and "state = opt.init(params)" in str(caught.value)
    assert caught.value.arg_path == "state"
