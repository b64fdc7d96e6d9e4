"""Models of Hugging Face, from small configs."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hub

from .catalogue import BATCH, VOCAB, Model, images, tokens

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
WORDS = {**SIZES, "vocab_size": VOCAB}
GROUPED = {**WORDS, "num_key_value_heads": 2}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2}
NAMES = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def language(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(input_ids=x, labels=x).loss


def pictures(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(pixel_values=x, labels=y).loss


def speech(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(input_features=x, labels=y).loss


def sounds() -> tuple[torch.Tensor, ...]:
    return torch.rand(BATCH, 8, 20), *tokens()


def both(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(input_ids=x, pixel_values=y, return_loss=True).loss


def words_and_pictures() -> tuple[torch.Tensor, ...]:
    return *tokens(), images()[0]


def causal(name: str, **config: Any) -> Any:
    """A maker of a language model, by the name of its architecture."""
    made = getattr(hub, f"{name}Config")
    return lambda: getattr(hub, f"{name}ForCausalLM")(made(**config))


def gpt2() -> Any:
    config = hub.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=VOCAB, n_positions=16, **NAMES
    )
    return hub.GPT2LMHeadModel(config)


def bert() -> Any:
    return hub.BertForMaskedLM(hub.BertConfig(**WORDS))


def vit() -> Any:
    config = hub.ViTConfig(**SIZES, image_size=32, patch_size=16, num_labels=3)
    return hub.ViTForImageClassification(config)


def t5() -> Any:
    config = hub.T5Config(
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return hub.T5ForConditionalGeneration(config)


def rwkv() -> Any:
    config = hub.RwkvConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        attention_hidden_size=32,
        num_hidden_layers=2,
        context_length=16,
    )
    return hub.RwkvForCausalLM(config)


def whisper() -> Any:
    sizes = {
        f"{part}_{key}": n
        for part in ("encoder", "decoder")
        for key, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))
    }
    config = hub.WhisperConfig(
        **sizes,
        vocab_size=VOCAB,
        d_model=32,
        max_source_positions=10,
        max_target_positions=16,
        num_mel_bins=8,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **NAMES,
    )
    return hub.WhisperForConditionalGeneration(config)


def clip() -> Any:
    text = {**WORDS, "max_position_embeddings": 16, **NAMES}
    vision = {**SIZES, "image_size": 32, "patch_size": 16}
    config = hub.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    return hub.CLIPModel(config)


def deepseek() -> Any:
    sizes = {**WORDS, "num_key_value_heads": 4, "moe_intermediate_size": 32}
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
    groups = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "v_head_dim": 8}
    return hub.DeepseekV3ForCausalLM(hub.DeepseekV3Config(**sizes, **ranks, **experts, **groups))


def gpt_oss() -> Any:
    kinds = ["full_attention", "sliding_attention"]
    sizes = {**EXPERTS, "num_local_experts": 4, "head_dim": 8, "sliding_window": 4}
    return hub.GptOssForCausalLM(hub.GptOssConfig(**sizes, layer_types=kinds))


FLOAT = torch.float32  # of models with parts that compute in no other
MODELS = (
    Model("Llama", causal("Llama", **GROUPED), language, tokens),
    Model("Qwen3", causal("Qwen3", **GROUPED, head_dim=8), language, tokens),
    Model("Gemma", causal("Gemma", **GROUPED, head_dim=8), language, tokens),
    Model("GPT-2", gpt2, language, tokens),
    Model("BERT", bert, language, tokens),
    Model("ViT", vit, pictures, images),
    Model("T5", t5, language, tokens),
    Model("Mixtral", causal("Mixtral", **EXPERTS, num_local_experts=4), language, tokens, FLOAT),
    Model(
        "Qwen2-MoE",
        causal(
            "Qwen2Moe",
            **EXPERTS,
            num_experts=4,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        ),
        language,
        tokens,
        FLOAT,
    ),
    Model(
        "Qwen3-MoE",
        causal("Qwen3Moe", **EXPERTS, num_experts=4, moe_intermediate_size=32, head_dim=8),
        language,
        tokens,
        FLOAT,
    ),
    Model("DeepSeek-V3", deepseek, language, tokens, FLOAT),
    Model("gpt-oss", gpt_oss, language, tokens, FLOAT),
    Model(
        "Mamba",
        causal("Mamba", vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4),
        language,
        tokens,
    ),
    Model("RWKV", rwkv, language, tokens, FLOAT),
    Model("Whisper", whisper, speech, sounds),
    Model("CLIP", clip, both, words_and_pictures),
)
