"""`loss.backward()` through a call whose parameters are on stages, in a pipeline or without one:
the gradients of one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.distributed.tensor import DTensor
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

import shardfn as sf
from shardfn import P
from tests.support.pipelined import MESHES, MODELS, Model, difference, placements, randn

FIRST, LAST = P(pp=0), P(pp=1)
Gradients = list[torch.Tensor | None]


def gradients_of(params: Any) -> Gradients:
    """The gradients of leaves, each placed as its parameter."""
    leaves = tree_leaves(params)
    for x in leaves:
        if isinstance(x, DTensor) and x.grad is not None:
            assert x.grad.placements == x.placements
    return [None if x.grad is None else sf.full(x.grad) for x in leaves]


def on_one_device(model: Model) -> tuple[torch.Tensor, Gradients]:
    params = sf.tree_map(lambda w: w.clone().requires_grad_(), model.params)
    sf.random.state.seed(7)
    value = sf.jit(model.loss, backend="aten")(params, model.batch)
    value.backward()
    return value.detach(), gradients_of(params)


def on_stages(model: Model, coordinates: int, mesh: str) -> tuple[torch.Tensor, Gradients]:
    names, rows = MESHES[mesh]
    sizes = tuple(coordinates if name == "pp" else 2 for name in names)
    with sf.fake_world(math.prod(sizes)):
        over = sf.make_mesh(sizes, names)
        places = placements(model, "1f1b", coordinates, mesh)
        put = lambda w, at: sf.distribute(w.clone(), over, at).requires_grad_()
        params = sf.tree_map(put, model.params, places)
        batch = None if rows is None else P(rows)
        sharded = sf.shard(model.loss, over, in_placements=(places, batch), backend="aten")
        sf.random.state.seed(7)
        value = sharded(params, model.batch)
        value.backward()
        return sf.full(value).detach(), gradients_of(params)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_backward_through_stages_is_that_of_one_device(model: str, mesh: str) -> None:
    coordinates = 3 if mesh == "alone" else 2
    value, gradients = on_stages(MODELS[model](), coordinates, mesh)
    wanted, expected = on_one_device(MODELS[model]())
    assert [g is None for g in gradients] == [g is None for g in expected]
    found = [g for g in gradients if g is not None]
    assert difference([value, found], [wanted, [g for g in expected if g is not None]]) < 1e-10


def products(params: Any, x: torch.Tensor) -> Any:
    hidden = torch.tanh(x @ params[0])
    return hidden, hidden @ params[1], params[0] * params[1], params[1] * 3


def themselves(params: Any, x: torch.Tensor) -> Any:
    return params[1], params[0] + x.sum()


def put(params: Any, x: torch.Tensor) -> Any:
    return (torch.tanh(sf.constrain(x @ params[0], sf.Stage(1)) @ params[1]),)


@pytest.mark.parametrize("outs", [None, FIRST, LAST, P("pp")])
@pytest.mark.parametrize("fn", [products, themselves, put])
def test_results_on_stages_have_cotangents_there(fn: Callable[..., Any], outs: Any) -> None:
    torch.manual_seed(0)
    weights, x = [randn(4, 4), randn(4, 4)], randn(4, 4)
    plain = [w.clone().requires_grad_() for w in weights]
    results = fn(plain, x)
    cotangents = [torch.randn_like(y) for y in results]
    torch.autograd.backward(results, cotangents)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("pp",))
        params = [x.requires_grad_() for x in sf.distribute(weights, mesh, [FIRST, LAST])]
        options = {"out_placements": outs, "backend": "aten"}
        found = sf.shard(fn, mesh, in_placements=([FIRST, LAST], None), **options)(params, x)
        own = [
            sf.distribute(g, mesh, list(y.placements))
            for g, y in zip(cotangents, found, strict=True)
        ]
        torch.autograd.backward(found, own)
        for y, expected in zip(found, results, strict=True):
            assert_close(sf.full(y).detach(), expected.detach(), rtol=0, atol=1e-12)
        for g, w in zip(gradients_of(params), plain, strict=True):
            assert_close(g, w.grad, rtol=0, atol=1e-12)


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    for w in params:
        x = torch.tanh(x @ w)
    return x.square().mean()


def followed(backend: str) -> list[torch.Tensor]:
    """The loss and the local gradients of a call, in the world of the caller."""
    torch.manual_seed(0)
    weights = [randn(4, 4) for _ in range(4)]
    places = [FIRST, FIRST, LAST, LAST]
    mesh = sf.make_mesh((2,), ("pp",))
    params = [x.requires_grad_() for x in sf.distribute(weights, mesh, places)]
    value = sf.shard(loss, mesh, in_placements=(places, None), backend=backend)(params, randn(6, 4))
    value.backward()
    return [x.to_local() for x in (value.detach(), *(w.grad for w in params))]


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_real_ranks_have_the_gradients_of_the_simulator(backend: str) -> None:
    real = run_ranks(2, followed, backend)
    with sf.fake_world(2):
        simulated = followed("aten")
    for rank, values in enumerate(real):
        for x, y in zip(values, simulated, strict=True):
            if backend == "aten":
                assert torch.equal(x, y.shards[rank])
            assert_close(x, y.shards[rank], rtol=0, atol=1e-12)


def test_each_half_names_its_stages() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("pp",))
        places = [FIRST, LAST]
        weights = [x.requires_grad_() for x in sf.distribute([randn(4, 4)] * 2, mesh, places)]
        sharded = sf.shard(loss, mesh, in_placements=(places, None), backend="aten")
        lowered = sharded.lower(weights, randn(24, 4))
    backward = lowered.backward
    assert backward is not None
    assert backward.stage(1).out_paths == backward.program.out_paths
    assert {len(backward.stage(k).in_paths) for k in (0, 1)} == {len(backward.partition.ins)}
    assert backward.time("H100").total > 0
    sent = [x for x in lowered.collectives if x.axis == "pp"]
    assert [x.nbytes for x in sent] == [24 * 4 * 8, 8]  # the activation, and the loss
    assert sum(x.nbytes for x in backward.collectives if x.axis == "pp") == 24 * 4 * 8


def by_microbatches(schedule: str = "1f1b", **options: Any) -> Any:
    """A call of (params, batch) in three microbatches."""
    return sf.pipelined_grad(loss_of, 3, schedule=schedule, **options)


def loss_of(params: Any, batch: Any) -> torch.Tensor:
    x, y = batch
    for w in params:
        x = torch.tanh(x @ w) + x
    return (x - y).square().mean()


def with_aux(params: Any, batch: Any) -> Any:
    return loss_of(params, batch), {"rows": (batch[0] @ params[0]).sum(1), "first": batch[1] > 0}


def in_stages(
    step: Callable[[Any, Any], Any], after: Callable[[Any, Any, Any], None], **options: Any
) -> Any:
    """The results of a step on two stages, and the gradients of its parameters after a call of
    `after(results, params, batch)`.
    """
    torch.manual_seed(0)
    weights, batch = [randn(4, 4), randn(4, 4)], (randn(6, 4), randn(6, 4))
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("pp",))
        params = [x.requires_grad_() for x in sf.distribute(weights, mesh, [FIRST, LAST])]
        sharded = sf.shard(step, mesh, ([FIRST, LAST], None), backend="aten", **options)
        results = sharded(params, batch)
        after(results, params, batch)
        return sf.tree_map(lambda x: sf.full(x).detach(), results), gradients_of(params)


def expected() -> Any:
    torch.manual_seed(0)
    weights, batch = [randn(4, 4), randn(4, 4)], (randn(6, 4), randn(6, 4))
    return sf.accumulate(sf.value_and_grad(loss_of), 3)(weights, batch)


@pytest.mark.parametrize(
    ("model", "schedule", "mesh"),
    [
        ("mlp", "1f1b", "alone"),
        ("mlp", "zero_bubble", "dp"),
        ("mlp", "gpipe", "zero3"),
        ("gpt", "interleaved", "alone"),
        ("gpt", "zbv", "tp"),
        ("late_parameters", "dualpipev", "zero3"),
        ("scanned", "1f1b", "dp"),
        ("checkpointed", "zero_bubble", "alone"),
    ],
)
def test_backward_of_the_value_of_a_pipeline_gives_its_gradients(
    model: str, schedule: str, mesh: str
) -> None:
    made = MODELS[model]()
    sf.random.state.seed(7)
    value, gradients = sf.accumulate(sf.value_and_grad(made.loss), 3)(made.params, made.batch)
    names, rows = MESHES[mesh]
    with sf.fake_world(2 ** len(names)):
        over = sf.make_mesh((2,) * len(names), names)
        places = placements(made, schedule, 2, mesh)
        put = lambda w, at: sf.distribute(w.clone(), over, at).requires_grad_()
        params = sf.tree_map(put, made.params, places)
        derivative = sf.pipelined_grad(made.loss, 3, schedule=schedule)
        step = lambda params, batch: derivative(params, batch)[0] / 4
        batch = None if rows is None else P(rows)
        sharded = sf.shard(step, over, in_placements=(places, batch), backend="aten")
        sf.random.state.seed(7)
        found = sharded(params, made.batch)
        (2 * found).backward()
        assert difference(sf.full(found).detach(), value / 4) < 1e-10
        halves = sf.tree_map(lambda g: g / 2, tree_leaves(gradients))
        assert difference(gradients_of(params), halves) < 1e-10


def test_the_gradients_that_a_call_returns_are_those_of_its_backward() -> None:
    (value, gradients), own = in_stages(by_microbatches(), lambda out, *_: out[0].backward())
    assert difference((value, gradients), expected()) < 1e-10
    assert difference(own, expected()[1]) < 1e-10


def test_a_call_for_its_value_runs_the_pipeline_and_keeps_its_gradients() -> None:
    step = lambda params, batch: by_microbatches()(params, batch)[0]
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("pp",))
        params = sf.distribute([randn(4, 4), randn(4, 4)], mesh, [FIRST, LAST])
        followed = [x.requires_grad_() for x in params]
        sharded = sf.shard(step, mesh, ([FIRST, LAST], None), backend="aten")
        lowered = sharded.lower(followed, (randn(6, 4), randn(6, 4)))
    assert len([x for x in lowered.collectives if x.kind == "send"]) == 3
    backward = lowered.backward
    assert backward is not None
    assert not backward.collectives


def test_a_backward_of_aux_or_gradients_of_a_pipeline_is_refused_by_name() -> None:
    def grow(out: Any, *_: Any) -> None:
        (value, aux), gradients = out
        assert not aux["first"].requires_grad
        with pytest.raises(sf.ShardError) as error:
            torch.autograd.backward(gradients[1], gradients[1].detach(), retain_graph=True)
        text = str(error.value)
        assert "result[1][1] depends on a result of pipelined_grad that is not its value" in text
        assert (
            "try: call backward() only on the loss value that pipelined_grad returns; or call"
            in text
        )
        with pytest.raises(sf.ShardError, match=r"result\[0\]\[1\]\['rows'\] depends on a result"):
            torch.autograd.backward(aux["rows"], aux["rows"].detach(), retain_graph=True)
        value.backward()

    step = sf.pipelined_grad(with_aux, 3, has_aux=True)
    _, own = in_stages(step, grow)
    assert difference(own, expected()[1]) < 1e-10


def test_a_backward_of_updated_parameters_is_refused_by_name() -> None:
    def step(params: Any, batch: Any) -> Any:
        value, gradients = by_microbatches()(params, batch)
        return value, sf.tree_map(lambda w, g: w - g, params, gradients)

    def grow(out: Any, *_: Any) -> None:
        with pytest.raises(sf.ShardError, match=r"result\[1\]\[0\] depends on a result"):
            torch.autograd.backward(out[1][0], out[1][0].detach())

    in_stages(step, grow)


def test_a_batch_that_autograd_follows_is_refused_by_name() -> None:
    def step(params: Any, batch: Any) -> Any:
        return by_microbatches()(params, (batch[0] * 2, batch[1]))[0]

    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("pp",))
        params = sf.distribute([randn(4, 4), randn(4, 4)], mesh, [FIRST, LAST])
        sharded = sf.shard(step, mesh, ([FIRST, LAST], None), backend="aten")
        with pytest.raises(sf.ShardError) as error:
            sharded(params, (randn(6, 4).requires_grad_(), randn(6, 4)))
    text = str(error.value)
    assert "autograd records batch[0], which pipelined_grad reads but does not" in text
    assert "try: include the argument in argnums= of pipelined_grad, or pass x.detach()" in text


def test_a_model_that_a_call_closes_over() -> None:
    value, gradients = expected()
    torch.manual_seed(0)
    weights, batch = [randn(4, 4), randn(4, 4)], (randn(6, 4), randn(6, 4))
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("pp",))
        params = [x.requires_grad_() for x in sf.distribute(weights, mesh, [FIRST, LAST])]
        step = sf.shard(lambda batch: by_microbatches()(params, batch)[0], mesh, backend="aten")
        found = step(batch)
        found.backward()
        assert difference(sf.full(found).detach(), value) < 1e-10
        assert difference(gradients_of(params), gradients) < 1e-10


def stepped(backend: str) -> list[torch.Tensor]:
    """The value of a pipeline and the local gradients of its backward, in the world of the
    caller.
    """
    torch.manual_seed(0)
    places = [FIRST, FIRST, LAST, LAST]
    mesh = sf.make_mesh((2,), ("pp",))
    params = [
        x.requires_grad_() for x in sf.distribute([randn(4, 4) for _ in range(4)], mesh, places)
    ]
    step = sf.shard(by_microbatches(), mesh, in_placements=(places, None), backend=backend)
    value, gradients = step(params, (randn(6, 4), randn(6, 4)))
    value.backward()
    results = [value.detach(), *(w.grad for w in params), *(g.detach() for g in gradients)]
    return [x.to_local() for x in results]


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_real_ranks_have_the_backward_of_the_simulators_pipeline(backend: str) -> None:
    real = run_ranks(2, stepped, backend)
    with sf.fake_world(2):
        simulated = stepped("aten")
    for rank, values in enumerate(real):
        for x, y in zip(values, simulated, strict=True):
            if backend == "aten":
                assert torch.equal(x, y.shards[rank])
            assert_close(x, y.shards[rank], rtol=0, atol=1e-12)
