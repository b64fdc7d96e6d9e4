"""The law of pipelines: a step of stages is the step of accumulated gradients on one device."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import pytest
import torch
from torch.utils._pytree import tree_leaves

import shardfn as sf
from shardfn.ops.pipeline import Pipeline
from tests.support.pipelined import MESHES, MODELS, difference, gpt, mlp, ran, randn, updated

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev")
COORDINATES = (2, 3, 4)
# These meet every schedule on all meshes with all numbers of microbatches.
WHOLE = ("mlp", "gpt", "late_readers")
PRODUCT = itertools.product(WHOLE, SCHEDULES, COORDINATES, range(1, 9), MESHES)
# The others meet every schedule; meshes and microbatches take turns.
TURNS = zip(itertools.cycle((3, 1, 4, 8, 2, 6, 4)), itertools.cycle(MESHES), strict=False)
OTHERS = itertools.product([x for x in MODELS if x not in WHOLE], SCHEDULES, COORDINATES)
CASES = [*PRODUCT, *((*case, *turn) for case, turn in zip(OTHERS, TURNS, strict=False))]
ROWS = {5: 20, 7: 21}  # of the batch, if 24 cannot be split into so many microbatches


@pytest.mark.parametrize(("model", "schedule", "coordinates", "microbatches", "mesh"), CASES)
def test_a_pipeline_computes_what_one_device_accumulates(
    model: str, schedule: str, coordinates: int, microbatches: int, mesh: str
) -> None:
    whole = MODELS[model]()
    rows = ROWS.get(microbatches, 24)
    cut = attrs.evolve(whole, batch=sf.tree_map(lambda x: x[:rows], whole.batch))
    assert ran(cut, schedule, coordinates, microbatches, mesh=mesh).gap < 1e-10


@pytest.mark.parametrize("model", MODELS)
def test_every_model_runs_on_two_coordinates(model: str) -> None:
    assert ran(MODELS[model](), "1f1b", 2, 3).gap < 1e-10


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_runs_fewer_microbatches_than_stages(schedule: str) -> None:
    assert ran(mlp(), schedule, 3, 2).gap < 1e-10


@pytest.mark.parametrize("mesh", MESHES)
def test_dropout_has_the_numbers_of_one_device_on_every_mesh(mesh: str) -> None:
    assert ran(gpt(), "1f1b", 2, 2, mesh=mesh).gap < 1e-10


def test_an_optimizer_and_the_norm_of_all_gradients_stand_in_the_step() -> None:
    optimizer = sf.optim(torch.optim.AdamW, lr=0.01)

    def make(derivative: Any) -> Any:
        def step(params: Any, batch: Any) -> Any:
            value, gradients = derivative(params, batch)
            gradients, norm = sf.clip_by_global_norm(gradients, 0.1)
            params, state = optimizer.update(params, gradients, optimizer.init(params))
            return value, norm, params, state

        return step

    assert ran(mlp(), "1f1b", 2, 3, mesh="dp", step=make).gap < 1e-10


def test_aux_has_a_row_for_each_microbatch() -> None:
    model = mlp()

    def loss(params: Any, batch: Any) -> Any:
        value = model.loss(params, batch)
        return value, {"twice": 2 * value, "rows": batch[0].sum(1)}

    step = ran(attrs.evolve(model, loss=loss), "1f1b", 2, 3, has_aux=True)
    assert step.gap < 1e-10


def test_without_a_pipeline_the_value_and_the_gradients_are_right_too() -> None:
    model = mlp(4)

    def step(params: Any, batch: Any) -> Any:
        value, gradients = sf.value_and_grad(model.loss)(params, batch)
        return value, gradients, model.loss(params, batch)

    expected = step(model.params, model.batch)
    with sf.fake_world(2):
        places = sf.tree_map(lambda layer: sf.P(pp=layer // 2), model.layers)
        sharded = sf.shard(
            step, sf.make_mesh((2,), ("pp",)), in_placements=(places, None), backend="aten"
        )
        got = sf.full(sharded(model.params, model.batch))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def placed_evenly(function: Any, **options: Any) -> tuple[Any, Any]:
    """A function of (params, batch) of an MLP of four layers: on two stages, and on one device."""
    model = mlp(4)
    places = sf.tree_map(lambda layer: sf.P(pp=layer // 2), model.layers)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("pp",))
        sharded = sf.shard(function, mesh, in_placements=(places, None), backend="aten", **options)
        params = sf.tree_map(lambda w, at: sf.distribute(w.clone(), mesh, at), model.params, places)
        got = sf.full(sharded(params, model.batch))
    return got, function(model.params, model.batch)


def test_derivatives_of_a_pipelined_gradient_are_those_of_one_device() -> None:
    derivative = sf.pipelined_grad(mlp(4).loss, 3)

    def of_squares(params: Any, batch: Any) -> Any:
        def norm(params: Any) -> torch.Tensor:
            _, gradients = derivative(params, batch)
            return torch.stack([(g**2).sum() for g in tree_leaves(gradients)]).sum()

        return sf.grad(norm)(params)

    def along(params: Any, batch: Any) -> Any:
        return sf.jvp(lambda params: derivative(params, batch), (params,), (params,))

    for function in (of_squares, along):
        assert difference(*placed_evenly(function)) < 1e-10


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_gradients_that_are_known_to_be_zero(schedule: str) -> None:
    loss = mlp(4).loss
    sign = lambda params, batch: torch.sgn(loss(params, batch))
    assert difference(*placed_evenly(sf.pipelined_grad(sign, 3, schedule=schedule))) < 1e-10


def test_donated_parameters_are_updated_in_place_of_the_old() -> None:
    derivative = sf.pipelined_grad(mlp(4).loss, 3)

    def step(params: Any, batch: Any) -> Any:
        value, gradients = derivative(params, batch)
        return value, updated(params, gradients)

    assert difference(*placed_evenly(step, donate_argnums=0)) < 1e-10


def test_a_frozen_parameter_stays_on_its_stage() -> None:
    def loss(trained: torch.Tensor, frozen: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(x @ trained) @ frozen).square().mean()

    torch.manual_seed(0)
    args = randn(4, 6), randn(6, 4), randn(12, 4)
    expected = sf.accumulate(sf.value_and_grad(loss), 3, batch_argnums=2)(*args)
    with sf.fake_world(2):
        sharded = sf.shard(
            sf.pipelined_grad(loss, 3, batch_argnums=2),
            sf.make_mesh((2,), ("pp",)),
            in_placements=(sf.P(pp=0), sf.P(pp=1), None),
            backend="aten",
        )
        assert difference(sf.full(sharded(*args)), expected) < 1e-10


def test_gradients_are_reduced_once_after_the_last_microbatch() -> None:
    lowered = ran(mlp(4), "1f1b", 2, 3, mesh="dp", is_lowered=True).lowered
    for program in lowered.programs.values():
        nodes = list(program.graph.nodes)
        (pipeline,) = [node.target for node in nodes if isinstance(node.target, Pipeline)]
        inner = [node for graph in pipeline.graphs for node in graph.nodes]
        assert not any("collective" in node.meta for node in inner)
        reductions = [x for node in nodes if (x := node.meta.get("collective")) and x.axis == "dp"]
        assert len([x for x in reductions if x.nbytes > 8]) == 1  # all gradients; 8: the loss
