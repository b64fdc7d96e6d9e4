"""`loss.backward()` through a call whose parameters are on stages: the gradients of one device."""

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
