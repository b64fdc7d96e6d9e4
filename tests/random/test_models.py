"""Models of Hugging Face, with the dropout of their configs: every mesh computes what one device
does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.testing import assert_close

import shardfn as sf
from shardfn import P, random

transformers = pytest.importorskip("transformers")

VOCAB, CONTEXT, BATCH = 40, 7, 5
TOKENS, WANTED = torch.randint(
    VOCAB, (2, BATCH, CONTEXT), generator=torch.Generator().manual_seed(1)
)
NAMES = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
CALLS = 7  # of dropout: the embedding's, and three in each of two layers


def gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=VOCAB, n_positions=12, **NAMES
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> torch.nn.Module:
    config = transformers.BertConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=VOCAB,
        max_position_embeddings=12,
        **NAMES,
    )
    return transformers.BertForMaskedLM(config)


MODELS: dict[str, Callable[[], torch.nn.Module]] = {"GPT-2": gpt2, "BERT": bert}
# (mesh, placement of every parameter, placement of the tokens)
MESHES: dict[str, tuple[dict[str, int], P, P]] = {
    "data parallel": ({"dp": 8}, P(), P("dp")),
    "data and sequence parallel": ({"dp": 2, "tp": 4}, P(), P("dp", "tp")),
    "fully sharded": ({"dp": 2, "tp": 4}, P("tp"), P("dp")),
}


def module(name: str) -> torch.nn.Module:
    """The model in training mode, with the same parameters on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[name]().double().train()


def loss_of(out: Any, y: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in float64; GPT-2's own loss is in float32."""
    return torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), y.flatten())


def on_one_device(name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients by torch's autograd."""
    model = module(name)
    random.state.seed(3)
    with random.plain():
        loss = loss_of(model(TOKENS), WANTED)
        loss.backward()
    assert random.state.get()["default"].tolist() == [3, 0, CALLS]
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def sharded(
    name: str, axes: dict[str, int], placed: P, batch: P
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients on a mesh over the current world."""
    fn, params, buffers = sf.functionalize(module(name))

    def loss(params: Any, buffers: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out, _ = fn(params, buffers, x)
        return loss_of(out, y)

    mesh = sf.make_mesh(tuple(axes.values()), tuple(axes))
    step = sf.shard(sf.value_and_grad(loss), mesh, (placed, P(), batch, batch), backend="aten")
    random.state.seed(3)
    out = sf.tree_map(sf.full, step(params, buffers, TOKENS, WANTED))
    assert random.state.get()["default"].tolist() == [3, 0, CALLS]
    return out


def close(got: Any, wanted: Any) -> None:
    assert_close(got, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_eight_simulated_ranks_train_with_the_dropout_of_one_device(name: str, mesh: str) -> None:
    axes, placed, batch = MESHES[mesh]
    with sf.fake_world(8):
        found = sharded(name, axes, placed, batch)
    close(found, on_one_device(name))


@pytest.mark.parametrize("name", MODELS)
def test_two_processes_train_with_the_dropout_of_one_device(name: str) -> None:
    for got in run_ranks(2, sharded, name, {"dp": 2}, P("dp"), P("dp")):
        close(got, on_one_device(name))


@pytest.mark.parametrize("name", MODELS)
def test_the_dropout_changes_the_loss(name: str) -> None:
    with torch.no_grad():
        without = loss_of(module(name).eval()(TOKENS), WANTED)
    assert abs(float(without - on_one_device(name)[0])) > 1e-3
