"""Models as people write them, in pipelines: a step is that of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardfn as sf
from shardfn import P
from tests.support.pipelined import MESHES, Model, difference, gpt, mlp, ran, randn, updated

foreach: Any = torch  # whose names for these ops are private
hub = pytest.importorskip("transformers")

WORDS = 32
LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_heads": 4, "decoder_start_token_id": 0}


def gpt2(layers: int) -> Any:
    """Embeddings are tied; with dropout."""
    config = hub.GPT2Config(
        n_layer=layers, n_embd=16, n_head=2, n_positions=8, vocab_size=WORDS, pad_token_id=0
    )
    return hub.GPT2LMHeadModel(config)


def llama(layers: int) -> Any:
    """Heads share keys and values."""
    config = hub.LlamaConfig(
        **LLAMA, vocab_size=WORDS, num_hidden_layers=layers, num_key_value_heads=2
    )
    return hub.LlamaForCausalLM(config)


def t5(layers: int) -> Any:
    """Two stacks with one embedding; all blocks read the position bias of the first; dropout."""
    config = hub.T5Config(**T5, vocab_size=WORDS, num_layers=layers)
    return hub.T5ForConditionalGeneration(config)


def bert(layers: int) -> Any:
    """Three embeddings are added, and the bias of the head stands before its matrix."""
    config = hub.BertConfig(**LLAMA, vocab_size=WORDS, num_hidden_layers=layers)
    return hub.BertForMaskedLM(config)


MAKERS = {f.__name__: f for f in (gpt2, llama, t5, bert)}


def of_hub(name: str, layers: int) -> tuple[Model, Any]:
    """(a model of Hugging Face as a loss of (params, batch), its module)"""
    torch.manual_seed(0)
    net = MAKERS[name](layers).double().train()
    fn, params, buffers = sf.functionalize(net)
    ids = torch.randint(3, WORDS, (8, 6))

    def loss(params: Any, batch: Any) -> torch.Tensor:
        ids, labels = batch
        more = {"labels": labels} if name == "t5" else {}
        logits = fn(params, buffers, input_ids=ids, **more)[0].logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())  # theirs is in float32

    return Model(loss, params, (ids, ids.roll(1, 1)), None), net


def by_strategy(model: Model, net: Any, mesh: str, **options: Any) -> Callable[[Any], Any]:
    """The placements of sf.strategy("pipeline"), joined with those of the other axis."""

    def places(device_mesh: Any) -> Any:
        base = None
        if mesh in ("dp", "zero3"):
            base = sf.strategy("ddp" if mesh == "dp" else mesh, model.params, device_mesh)
        elif mesh == "tp" and getattr(net, "tp_plan", None):
            base = sf.placements(model.params, net.tp_plan, axis="tp")
        elif mesh == "tp":
            dims = {2: P(None, "tp")}
            base = {name: dims.get(x.dim(), P()) for name, x in model.params.items()}
        return sf.strategy("pipeline", model.params, device_mesh, base=base, **options).params

    return places


def near(name: str, mesh: str) -> float:
    """What a law allows: norms of T5 are in float32, and over shards they add in another order."""
    return 1e-6 if (name, mesh) == ("t5", "tp") else 1e-10


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", MAKERS)
def test_a_model_of_hugging_face_on_stages(name: str, stages: int, mesh: str) -> None:
    model, net = of_hub(name, stages)
    places = by_strategy(model, net, mesh)
    assert ran(model, "1f1b", stages, 2, mesh=mesh, places=places).gap < near(name, mesh)


def test_gpt2_by_patterns() -> None:
    model, net = of_hub("gpt2", 2)
    stages = {"transformer.h.1.*": 1, "transformer.ln_f.*": 1, "**": 0}
    places = by_strategy(model, net, "alone", stages=stages)
    assert ran(model, "zero_bubble", 2, 2, places=places).gap < 1e-10


@pytest.mark.parametrize("name", MAKERS)
def test_stages_by_the_work_of_a_model(name: str) -> None:
    model, net = of_hub(name, 2)
    traced = sf.jit(model.loss).trace(model.params, model.batch)
    places = by_strategy(model, net, "alone", stages=traced)
    assert ran(model, "1f1b", 2, 2, places=places).gap < 1e-10


def test_stages_of_two_towers_follow_the_order_of_the_reads() -> None:
    def loss(params: Any, batch: Any) -> torch.Tensor:
        """A parameter that is read last is the first, as the scale of CLIP."""
        sides = zip(batch, (params["words"], params["pictures"]), strict=True)
        a, b = (torch.tanh(x @ w["0"]) @ w["1"] for x, w in sides)
        return ((a * b).sum(1) * params["scale"].exp()).square().mean()

    torch.manual_seed(0)
    tower = lambda: {"0": randn(4, 8), "1": randn(8, 4)}
    params = {"scale": randn(1), "words": tower(), "pictures": tower()}
    model = Model(loss, params, (randn(24, 4), randn(24, 4)), None)
    traced = sf.jit(loss).trace(model.params, model.batch)
    by_work = by_strategy(model, None, "alone", stages=traced)
    by_order = by_strategy(model, None, "alone")  # the first stage sends the scale
    for places in (by_work, by_order):
        assert ran(model, "1f1b", 2, 3, places=places).gap < 1e-10


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("gpt2", ("transformer.wte.weight", "transformer.wpe.weight"), ("transformer.ln_f.bias",)),
        ("llama", ("model.embed_tokens.weight",), ("model.norm.weight", "lm_head.weight")),
        ("t5", ("shared.weight",), ("decoder.final_layer_norm.weight",)),
        (
            "bert",
            ("bert.embeddings.word_embeddings.weight", "bert.embeddings.LayerNorm.weight"),
            ("cls.predictions.bias", "cls.predictions.transform.dense.weight"),
        ),
    ],
)
def test_even_stages_of_a_model_keep_its_ends_together(
    name: str, first: tuple[str, ...], last: tuple[str, ...]
) -> None:
    model, net = of_hub(name, 4)
    with sf.fake_world(4):
        places = by_strategy(model, net, "alone")(sf.make_mesh((4,), ("pp",)))
    at = {path: place.stages["pp"] for path, place in places.items()}
    assert {at[path] for path in first} == {0}
    assert {at[path] for path in last} == {3}
    assert {*at.values()} == {0, 1, 2, 3}


# Mixed precision


def in_float32(model: Model) -> Model:
    cast = lambda x: x.float() if x.is_floating_point() else x
    return Model(
        model.loss, sf.tree_map(cast, model.params), sf.tree_map(cast, model.batch), model.layers
    )


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("make", [gpt, mlp])
def test_mixed_precision_is_that_of_one_device(make: Any, mesh: str) -> None:
    whole = make()
    lower = sf.mixed_precision(whole.loss, compute=torch.float32, params=torch.float64)
    model = Model(lower, whole.params, whole.batch, whole.layers)
    step = ran(model, "1f1b", 2, 3, mesh=mesh)
    exact = ran(whole, "1f1b", 2, 3, mesh=mesh)
    assert step.gap < 1e-5
    assert difference(step.pipelined[1], exact.pipelined[1]) > 1e-9  # it did compute in float32


def test_mixed_precision_in_bfloat16_has_the_bits_of_one_device() -> None:
    whole = in_float32(gpt())
    lower = sf.mixed_precision(whole.loss)
    model = Model(lower, whole.params, whole.batch, whole.layers)
    assert ran(model, "1f1b", 2, 3).gap == 0


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(("initial", "is_finite"), [(2.0**8, True), (2.0**30, False)])
def test_a_scaled_loss_in_float16(initial: float, is_finite: bool, mesh: str) -> None:
    model = in_float32(mlp())
    scaler = sf.loss_scale(initial)
    half = sf.mixed_precision(model.loss, compute=torch.float16)
    scale = scaler.init()

    def scaled(params: Any, batch: Any) -> torch.Tensor:
        return scaler.scale(half(params, batch), scale)

    def make(derivative: Any) -> Any:
        def step(params: Any, batch: Any) -> Any:
            _, gradients = derivative(params, batch)
            gradients, finite = scaler.unscale(gradients, scale)
            params = scaler.select(finite, updated(params, gradients), params)
            return params, scaler.update(scale, finite)

        return step

    model = Model(scaled, model.params, model.batch, model.layers)
    step = ran(model, "1f1b", 2, 3, mesh=mesh, step=make)
    assert step.gap < 1e-3
    # a step whose gradients are not finite is skipped on all stages
    assert (difference(step.pipelined[0], model.params) > 1e-3) == is_finite


# BatchNorm


def with_batch_norm() -> tuple[Any, Any, Any, Any]:
    """(a loss of (params, buffers, batch) with the new buffers, its arguments)"""
    torch.manual_seed(0)
    block = lambda: [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()]
    net = nn.Sequential(*block(), *block(), nn.Linear(6, 6)).double().train()
    fn, params, buffers = sf.functionalize(net)

    def loss(params: Any, buffers: Any, batch: Any) -> Any:
        out, after = fn(params, buffers, batch[0])
        return F.mse_loss(out, batch[1]), after

    return loss, params, buffers, (randn(24, 6), randn(24, 6))


@pytest.mark.parametrize("mesh", ["alone", "dp"])
@pytest.mark.parametrize("on_stages", [False, True])
def test_buffers_of_batch_norm_are_those_that_accumulate_returns(
    mesh: str, on_stages: bool
) -> None:
    loss, params, buffers, batch = with_batch_norm()
    options: Any = {"has_aux": True, "batch_argnums": 2}
    plain = sf.value_and_grad(loss, has_aux=True)
    expected = sf.accumulate(plain, 3, batch_argnums=2)(params, buffers, batch)
    names, rows = MESHES[mesh]
    stage = lambda path: P(pp=int(path.split(".")[0] >= "3"))
    with sf.fake_world(2 ** len(names)):
        places = {path: stage(path) for path in params}
        own = {path: stage(path) if on_stages else P() for path in buffers}
        ins = places, own, None if rows is None else P(rows)
        step = sf.pipelined_grad(loss, 3, **options)
        mesh_of_ranks = sf.make_mesh((2,) * len(names), names)
        got = sf.shard(step, mesh_of_ranks, ins, backend="aten")(params, buffers, batch)
        got = sf.full(got)
    assert difference(got, expected) < 1e-10
    assert got[0][1]["1.running_mean"].shape == (3, 6)  # one row for each microbatch


def test_buffers_that_a_closed_over_module_writes_are_refused() -> None:
    norm = nn.BatchNorm1d(6, affine=False).double().train()
    model = mlp(2)

    def loss(params: Any, batch: Any) -> torch.Tensor:
        return model.loss(params, (norm(batch[0]), batch[1]))

    with sf.fake_world(2), pytest.raises(sf.CaptureError) as error:
        places = [{"w": P(pp=k), "b": P(pp=k)} for k in range(2)]
        mesh = sf.make_mesh((2,), ("pp",))
        step = sf.shard(sf.pipelined_grad(loss, 3), mesh, (places, None), backend="aten")
        step(model.params, model.batch)
    assert "the function writes in place to an argument or a closed-over tensor" in str(error.value)
    assert "sf.functionalize(module)" in str(error.value)


# Layers that are computed again, or stacked


def stacked(dropout: float = 0.0, again: bool = False) -> Model:
    """Each of four stages is a scan over its stack of layers."""
    torch.manual_seed(0)
    stack = lambda: {"w": randn(3, 4, 4), "b": randn(3, 4)}

    def layer(h: Any, w: Any) -> Any:
        h = F.dropout(torch.tanh(h @ w["w"] + w["b"]), dropout) + h
        return h, h.square().mean()

    body = sf.checkpoint(layer) if again else layer

    def loss(params: Any, batch: Any) -> torch.Tensor:
        h, y = batch
        extra = 0.0
        for weights in params:
            h, sizes = sf.scan(body, h, weights)
            extra = extra + 0.01 * sizes.sum()
        return F.mse_loss(h, y) + extra

    batch = randn(24, 4), randn(24, 4)
    return Model(loss, [stack() for _ in range(4)], batch, [{"w": k, "b": k} for k in range(4)])


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("coordinates", [2, 4])
def test_stages_of_stacked_layers(coordinates: int, again: bool, mesh: str) -> None:
    model = stacked(0.2, again)
    assert ran(model, "zero_bubble", coordinates, 3, mesh=mesh).gap < 1e-10


def test_two_stages_of_stacked_layers() -> None:
    assert ran(stacked(), "1f1b", 2, 2).gap < 1e-10


# Whole steps


@pytest.mark.parametrize("mesh", ["alone", "dp", "zero3"])
@pytest.mark.parametrize("donated", [(), (0, 2, 3)])
def test_state_of_an_optimizer_and_an_average_stay_on_stages(
    donated: tuple[int, ...], mesh: str
) -> None:
    model = mlp(4)
    optimizer, average = sf.optim(torch.optim.AdamW, lr=0.01), sf.ema(0.9)

    def loss(params: Any, batch: Any) -> Any:
        return model.loss(params, batch), {"rows": batch[0].sum(1)}

    def make(derivative: Any) -> Any:
        def step(params: Any, batch: Any, state: Any, mean: Any) -> Any:
            (value, aux), gradients = derivative(params, batch)
            gradients, norm = sf.clip_by_global_norm(gradients, 0.1)
            params, state = optimizer.update(params, gradients, state)
            return params, state, average.update(params, mean), value, norm, aux

        return step

    def twice(step: Any, params: Any, state: Any, mean: Any) -> Any:
        params, state, mean, *_ = step(params, model.batch, state, mean)
        return step(params, model.batch, state, mean)

    start = model.params, optimizer.init(model.params), average.init(model.params)
    plain = sf.value_and_grad(loss, has_aux=True)
    expected = twice(make(sf.accumulate(plain, 3)), *start)
    names, rows = MESHES[mesh]
    with sf.fake_world(2 ** len(names)):
        device_mesh = sf.make_mesh((2,) * len(names), names)
        params = {str(k): layer for k, layer in enumerate(model.params)}
        base = sf.strategy("zero3", params, device_mesh) if mesh == "zero3" else None
        chosen = sf.strategy("pipeline", params, device_mesh, base=base).params
        places = [chosen[str(k)] for k in range(4)]
        of_state = optimizer.state_placements(places, model.params)
        of_mean = {"count": P(), "average": places}
        ins = places, None if rows is None else P(rows), of_state, of_mean
        derivative = sf.pipelined_grad(loss, 3, has_aux=True)
        step = sf.shard(make(derivative), device_mesh, ins, backend="aten", donate_argnums=donated)
        trees = zip(start, (places, of_state, of_mean), strict=True)
        placed = [sf.distribute(copy.deepcopy(x), device_mesh, at) for x, at in trees]
        results = twice(step, *placed)
        assert difference(sf.full(results), expected) < 1e-10
        assert "Stage(1)" in str(results[2]["average"][3]["w"].placements)


@pytest.mark.parametrize("mesh", MESHES)
def test_ops_on_lists_of_parameters_outside_of_a_pipeline(mesh: str) -> None:
    def make(derivative: Any) -> Any:
        def step(params: Any, batch: Any) -> Any:
            _, gradients = derivative(params, batch)
            weights, own = ([x["w"] for x in tree] for tree in (params, gradients))
            norms = foreach._foreach_norm(own)
            flat = torch.cat([g.flatten() for g in own])
            return list(norms), list(foreach._foreach_sub(weights, own)), flat, flat.norm()

        return step

    assert ran(mlp(4), "1f1b", 2, 3, mesh=mesh, step=make).gap < 1e-10


def test_decay_of_a_list_of_parameters_of_all_stages() -> None:
    model = mlp(4)

    def loss(params: Any, batch: Any) -> torch.Tensor:
        weights = [layer["w"] for layer in params]
        decay = sum(n.square() for n in foreach._foreach_norm(weights))
        flat = torch.cat([w.flatten() for w in weights])
        return model.loss(params, batch) + 0.1 * decay + 0.1 * flat.abs().sum()

    assert ran(Model(loss, model.params, model.batch, model.layers), "1f1b", 2, 3).gap < 1e-10
