"""Models of Hugging Face as their documentation calls them: loss and gradients on a mesh are those
of one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P

hub = pytest.importorskip("transformers")

TOKENS = torch.randint(3, 60, (4, 8), generator=torch.Generator().manual_seed(0))
PIXELS = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SMALL = {**SIZES, "num_key_value_heads": 2}


def llama() -> Any:
    return hub.LlamaForCausalLM(hub.LlamaConfig(**SMALL))


def mixtral() -> Any:
    config = hub.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2)
    return hub.MixtralForCausalLM(config)


def t5() -> Any:
    config = hub.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return hub.T5ForConditionalGeneration(config)


def gpt2() -> Any:
    config = hub.GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=16,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    return hub.GPT2LMHeadModel(config)


def vit() -> Any:
    sizes = {key: n for key, n in SIZES.items() if key != "vocab_size"}
    config = hub.ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=3)
    return hub.ViTForImageClassification(config)


def mamba() -> Any:
    config = hub.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    return hub.MambaForCausalLM(config)


def language(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(input_ids=x, labels=x).loss


def images(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(pixel_values=x, labels=torch.tensor([0, 1, 2, 0])).loss


# the model, how its documentation has its loss, its input
MODELS: dict[str, tuple[Callable[[], Any], Callable[..., Any], torch.Tensor]] = {
    "Llama": (llama, language, TOKENS),
    "Mixtral": (mixtral, language, TOKENS),
    "GPT-2": (gpt2, language, TOKENS),
    "T5": (t5, language, TOKENS),
    "ViT": (vit, images, PIXELS),
    "Mamba": (mamba, language, TOKENS),
}


def _model(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name][0]().train()


def _on_one_device(name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and the gradients, by torch."""
    _, loss_of, x = MODELS[name]
    model = _model(name)
    loss = loss_of(model, x)
    loss.backward()
    named = model.named_parameters()
    return loss.detach(), {k: p.grad for k, p in named if p.grad is not None}


def _pure(name: str) -> tuple[Callable[..., Any], Any, Any]:
    """(the loss and its gradients of parameters, buffers and an input; the first two of these)"""
    _, loss_of, _ = MODELS[name]
    fn, params, buffers = sf.functionalize(_model(name))
    call = lambda p, b: lambda **given: fn(p, b, **given)[0]
    loss = lambda p, b, x: loss_of(call(p, b), x)
    return sf.value_and_grad(loss), params, buffers


def _assert_same(found: Any, wanted: Any) -> None:
    loss, gradients = found
    assert_close(loss, wanted[0])
    gradients = {key: gradients[key] for key in wanted[1]}
    assert_close(gradients, wanted[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_on_one_device(name: str) -> None:
    step, params, buffers = _pure(name)
    with simulated(dp=2, tp=2) as mesh:
        batch = P() if name == "ViT" else P("dp")
        step = sf.shard(step, mesh, (P("tp"), P(), batch), backend="aten")
        found = sf.full(step(params, buffers, MODELS[name][2]))
    _assert_same(found, _on_one_device(name))


@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_model_trains_as_on_one_device(name: str) -> None:
    step, params, buffers = _pure(name)
    found = sf.jit(step, backend="inductor")(params, buffers, MODELS[name][2])
    _assert_same(found, _on_one_device(name))


def qwen2_moe() -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    sizes = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
    return hub.Qwen2MoeForCausalLM(hub.Qwen2MoeConfig(**SMALL, **experts, **sizes))


@pytest.mark.parametrize("make", [mixtral, qwen2_moe])
def test_data_parallel_of_experts_sends_no_activation(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SMALL, "num_hidden_layers", 1)
    fn, params, buffers = sf.functionalize(make().train())
    call = lambda p, b: lambda **given: fn(p, b, **given)[0]
    step = sf.value_and_grad(lambda p, b, x: language(call(p, b), x))
    with simulated(dp=3) as mesh:
        sharded = sf.shard(step, mesh, (P(), P(), P("dp")), backend="aten")
        collectives = sharded.lower(params, buffers, TOKENS).collectives
    assert {c.kind for c in collectives} == {"all_reduce"}
    # the loss, and the number of tokens of which it is the mean
    assert len(collectives) <= len(params) + 2


def qwen3_moe() -> Any:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return hub.Qwen3MoeForCausalLM(hub.Qwen3MoeConfig(**SMALL, **sizes, head_dim=8))


def deepseek() -> Any:
    sizes = {**SMALL, "num_key_value_heads": 4, "moe_intermediate_size": 24}
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
    groups = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 0, "v_head_dim": 8}
    return hub.DeepseekV3ForCausalLM(hub.DeepseekV3Config(**sizes, **ranks, **experts, **groups))


def gpt_oss() -> Any:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    layers = {"layer_types": ["sliding_attention"], "sliding_window": 4}
    return hub.GptOssForCausalLM(hub.GptOssConfig(**SMALL, **sizes, **layers))


MAKERS = [mixtral, qwen2_moe, qwen3_moe, deepseek, gpt_oss]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_rows_travel_to_experts_by_the_plan_of_the_model(
    make: Callable[[], Any], experts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No expert is gathered; values and gradients are those of one device."""
    monkeypatch.setitem(SMALL, "num_hidden_layers", 1)
    torch.manual_seed(2)
    model = make().double()
    model.set_experts_implementation(experts)
    fn, params, buffers = sf.functionalize(model)
    call = lambda p: lambda **given: fn(p, buffers, **given)[0]
    step = sf.value_and_grad(lambda p, x: language(call(p), x))
    with simulated(dp=2, ep=2) as mesh:
        plan = sf.strategy(
            "expert", params, mesh, base=sf.placements(params, model.ep_plan, axis="ep")
        )
        ins = (plan.params, P(("dp", "ep")))
        sharded = sf.shard(step, mesh, ins, backend="aten", rows={"ep": "2x"})
        loss, grads = sf.full(sharded(params, TOKENS))
        collectives = sharded.lower(params, TOKENS).collectives
    # gpt_oss adds its biases in place: the gradient passes strided views, which tokens have
    exchanges = 9 if (make, experts) == (gpt_oss, "batched_mm") else 4
    assert sum(c.kind == "ragged_all_to_all" for c in collectives) == exchanges
    assert sum(c.kind == "all_gather" for c in collectives) == 1  # of counts
    wanted, wanted_grads = step(params, TOKENS)
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-8)  # some norms are in float32
    for name, grad in grads.items():
        torch.testing.assert_close(grad, wanted_grads[name], rtol=1e-5, atol=1e-7)
