"""Loops of Hugging Face as people write them: losses, gradients and words are one device's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P

hub = pytest.importorskip("transformers")

WORDS = torch.randint(3, 31, (6, 5), generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(6) % 3
SIZES = {
    "vocab_size": 31,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def llama(**settings: Any) -> Any:
    torch.manual_seed(0)
    config = hub.LlamaConfig(num_hidden_layers=1, **SIZES, **settings)
    return hub.LlamaForCausalLM(config)


def classifier() -> Any:
    torch.manual_seed(0)
    config = hub.LlamaConfig(num_hidden_layers=1, num_labels=3, pad_token_id=0, **SIZES)
    return hub.LlamaForSequenceClassification(config)


def gradients(model: Any) -> list[torch.Tensor]:
    found = [sf.full(x.grad) for x in model.parameters()]
    model.zero_grad()
    return found


def test_a_compute_loss_that_pops_its_labels_and_returns_outputs() -> None:
    model = classifier()

    def compute_loss(inputs: dict[str, torch.Tensor], return_outputs: bool = False) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs, use_cache=False)
        loss = F.cross_entropy(outputs["logits"], labels)
        return (loss, outputs) if return_outputs else loss

    batch = {"input_ids": WORDS, "labels": LABELS}
    wanted, outputs = compute_loss({**batch}, return_outputs=True)
    wanted.backward()
    plain = gradients(model)
    with simulated(dp=3) as mesh:
        sharded = sf.shard(compute_loss, mesh)
        loss, found = sharded(batch, return_outputs=True)
        assert list(batch) == ["input_ids", "labels"]
        loss.backward()
        assert_close(sf.full(loss), wanted)
        assert_close(sf.full(found.logits), outputs.logits)
        assert type(found) is type(outputs)
        assert_close(gradients(model), plain)


@pytest.mark.parametrize("is_closed_over", [True, False])
def test_gradient_checkpointing_that_a_model_enables(is_closed_over: bool) -> None:
    model = llama()
    model(input_ids=WORDS, labels=WORDS).loss.backward()
    plain = gradients(model)
    model.gradient_checkpointing_enable()
    fn, params, buffers = sf.functionalize(model)

    def loss(words: torch.Tensor) -> torch.Tensor:
        return model(input_ids=words, labels=words, use_cache=False).loss

    def pure(params: Any, words: torch.Tensor) -> torch.Tensor:
        called, _ = fn(params, buffers, input_ids=words, labels=words, use_cache=False)
        return called.loss

    with simulated(dp=2) as mesh:
        if is_closed_over:
            sf.shard(loss, mesh, P("dp"))(WORDS).backward()
            found = gradients(model)
        else:
            step = sf.shard(sf.grad(pure), mesh, (P(), P("dp")))
            found = [*sf.full(step(params, WORDS)).values()]
        assert_close(found, plain)


def test_generate_calls_a_sharded_forward_and_is_refused_inside_of_one() -> None:
    model = llama(pad_token_id=0, eos_token_id=None).eval()
    greedy = {"max_new_tokens": 3, "do_sample": False}
    wanted = model.generate(WORDS, **greedy)
    with simulated(dp=2) as mesh:
        whole = sf.shard(lambda words: model.generate(words, **greedy), mesh)
        with pytest.raises(sf.CaptureError, match="branches on a tensor's value"):
            whole(WORDS)
        forward = sf.shard(model.forward, mesh)
        model.forward = lambda **given: sf.full(forward(**given))
        found = model.generate(WORDS, use_cache=False, **greedy)
    assert torch.equal(found, wanted)
