"""Placements of plans change no value: loss and gradients on a mesh are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn

import shardfn as sf
from shardfn import P

Params = dict[str, torch.Tensor]
F64 = torch.float64
X = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).double()


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = (
        nn.Linear(5, 9, dtype=F64),
        nn.Tanh(),
        nn.Linear(9, 3, dtype=F64),
        nn.LayerNorm(3, dtype=F64),
    )
    return nn.Sequential(*layers)


FN, PARAMS, BUFFERS = sf.functionalize(net())


def loss(params: Params, x: torch.Tensor) -> torch.Tensor:
    out, _ = FN(params, BUFFERS, x)
    return (out.exp() * x[:, :3]).mean()


def tensor_parallel(mesh: Any) -> Any:
    return sf.placements(PARAMS, {"0": "colwise", "2": "rowwise"}, mesh=mesh, axis="tp")


def by_hand(mesh: Any) -> Any:
    plan = {"0.*": P("tp"), "2.weight": P(None, "tp"), "**": P()}
    return sf.placements(PARAMS, plan, mesh=mesh)


def all_sharded(mesh: Any) -> Any:
    return sf.fsdp(PARAMS, mesh)


def both(mesh: Any) -> Any:
    return sf.fsdp(PARAMS, mesh, base=tensor_parallel(mesh), min_bytes=30)


CHOICES: list[Callable[[Any], Any]] = [tensor_parallel, by_hand, all_sharded, both]


@pytest.mark.parametrize("shape", [(2, 2), (1, 3)], ids=str)
@pytest.mark.parametrize("choice", CHOICES, ids=lambda f: f.__name__)
def test_a_step_is_that_of_one_device(choice: Callable[[Any], Any], shape: tuple[int, int]) -> None:
    gradients, value = torch.func.grad_and_value(loss)(PARAMS, X)
    with sf.fake_world(shape[0] * shape[1]):
        mesh = sf.make_mesh(shape, ("dp", "tp"))
        where = choice(mesh)
        step = sf.shard(sf.bucketed_grad(loss), mesh, (where, P("dp")), backend="aten")
        found, got = step(PARAMS, X)
        _assert_placed(got, where, mesh)
        torch.testing.assert_close(sf.full(found), value, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(sf.full(got), gradients, rtol=1e-10, atol=1e-12)
        placed = sf.distribute(PARAMS, mesh, where)
        _assert_placed(placed, where, mesh)
        again, _ = step(placed, X)
        assert torch.equal(sf.full(again), sf.full(found))


def _assert_placed(tree: Any, where: Any, mesh: Any) -> None:
    wanted = sf.distribute(PARAMS, mesh, dict(where))
    for name, x in tree.items():
        assert x.placements == wanted[name].placements, name


def test_inside_a_captured_function_they_are_constraints() -> None:
    gradients = torch.func.grad(loss)(PARAMS, X)
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        inner = sf.shard(loss, mesh, (tensor_parallel(mesh), P("dp")))
        step = sf.shard(sf.grad(lambda p, x: inner(p, x)), mesh, backend="aten")
        got = step(PARAMS, X)
        torch.testing.assert_close(sf.full(got), gradients, rtol=1e-10, atol=1e-12)


def test_init_makes_parameters_where_a_plan_places_them() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        where = both(mesh)
        _, made, _ = sf.init(net, mesh, where, sf.random.key(0), backend="aten")
        _assert_placed(made, where, mesh)
        _, alone, _ = sf.init(net, key=sf.random.key(0), backend="aten")
        torch.testing.assert_close(sf.full(made), alone)


def test_placements_of_other_parameters_are_refused_by_name() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        where = sf.placements({"other": X}, {"other": P()})
        step = sf.shard(loss, mesh, (where, P()), backend="aten")
        with pytest.raises(sf.TreeError, match="placements have also .'other'."):
            step(PARAMS, X)


def _on_ranks() -> tuple[Any, Any]:
    mesh = sf.make_mesh((2,), ("tp",))
    where = sf.fsdp(PARAMS, mesh, min_bytes=100)
    placed = sf.distribute(PARAMS, mesh, where)
    step = sf.shard(sf.value_and_grad(loss), mesh, (where, P("tp")), backend="aten")
    return sf.full(step(placed, X))


def test_two_processes_compute_what_one_device_does() -> None:
    gradients, value = torch.func.grad_and_value(loss)(PARAMS, X)
    for found, got in run_ranks(2, _on_ranks):
        torch.testing.assert_close(found, value, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(got, gradients, rtol=1e-10, atol=1e-12)


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TOKENS = torch.randint(3, 60, (4, 8), generator=torch.Generator().manual_seed(0))


def llama(hub: Any) -> nn.Module:
    return hub.LlamaForCausalLM(hub.LlamaConfig(**SIZES)).double()


def mixtral(hub: Any) -> nn.Module:
    """In float32: torch has no grouped matrix product in float64."""
    config = hub.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    return hub.MixtralForCausalLM(config)


@pytest.mark.parametrize("make", [llama, mixtral], ids=lambda f: f.__name__)
def test_a_model_of_hugging_face_trains_under_its_own_plan(make: Callable[[Any], Any]) -> None:
    """Parts of these models compute in float32, whatever their parameters are."""
    hub = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = make(hub)
    value = model(input_ids=TOKENS, labels=TOKENS).loss
    value.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}

    fn, params, buffers = sf.functionalize(model)
    assert list(params) == list(gradients)

    def model_loss(p: Params, b: Params, x: torch.Tensor) -> torch.Tensor:
        out, _ = fn(p, b, input_ids=x, labels=x)
        return out.loss

    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        tp = sf.placements(params, model.tp_plan, mesh=mesh, axis="tp")
        where = sf.fsdp(params, mesh, base=tp, min_bytes="1KB")
        places = (where, P(), P("dp"))
        step = sf.shard(sf.bucketed_grad(model_loss), mesh, places, backend="aten")
        found, got = step(params, buffers, TOKENS)
        near = {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(sf.full(found), value.detach(), **near)
        torch.testing.assert_close(sf.full(got), gradients, **near)
