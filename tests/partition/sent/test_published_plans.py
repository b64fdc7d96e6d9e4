"""Models of transformers under tensor parallel plans, published or as textbooks have them: the
number of all-reduces that follows from their layers, and no other collective of activations.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import shardfn as sf
from shardfn import P

LAYERS, WIDTH, BATCH, LENGTH, WORDS = 2, 64, 8, 16, 128
SIZES = dict(
    hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=8
)
GROUPED = dict(**SIZES, num_key_value_heads=4, vocab_size=WORDS)
COLUMNS = r"\.(q|k|v|[qkv]_proj|query|key|value|wi|fc1|intermediate\.dense)\.(weight|bias)"
ROWS = r"\.(o|o_proj|out_proj|wo|fc2|output\.dense)\.weight"
HEADS = r".*relative_attention_bias\.weight"


class Case(NamedTuple):
    """A model, its inputs, and how often its activations are reduced in a step."""

    make: Callable[[Any], torch.nn.Module]
    loss: Callable[..., torch.Tensor]
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    reduced: int
    is_published: bool = False


def tokens() -> tuple[torch.Tensor, ...]:
    return (torch.randint(3, WORDS, (BATCH, LENGTH)),)


def words(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(input_ids=x, labels=x).loss


def of_config(kind: str, task: str, **config: Any) -> Callable[[Any], torch.nn.Module]:
    """A maker of a model, given transformers."""
    return lambda hub: getattr(hub, f"{kind}For{task}")(getattr(hub, f"{kind}Config")(**config))


EXPERTS = dict(**GROUPED, num_experts_per_tok=2)
SMALL_EXPERTS = dict(moe_intermediate_size=48, shared_expert_intermediate_size=64)
WHISPER = {
    f"{part}_{key}": n
    for part in ("encoder", "decoder")
    for key, n in (("layers", LAYERS), ("attention_heads", 8), ("ffn_dim", 96))
}
# Of a language model also once for the embedding, and once for the input of the head. A decoder
# that attends to an encoder has three halves, and the gradient of the encoder's result is a sum.
DECODED = 2 * (2 * LAYERS + 3 * LAYERS) + 1
CASES = {
    "Llama": Case(of_config("Llama", "CausalLM", **GROUPED), words, tokens, 4 * LAYERS + 2, True),
    "Qwen3": Case(
        of_config("Qwen3", "CausalLM", **GROUPED, head_dim=8), words, tokens, 4 * LAYERS + 2, True
    ),
    "Mixtral": Case(
        of_config("Mixtral", "CausalLM", **EXPERTS, num_local_experts=4),
        words,
        tokens,
        4 * LAYERS + 2,
        True,
    ),
    "Qwen2-MoE": Case(
        of_config("Qwen2Moe", "CausalLM", **EXPERTS, **SMALL_EXPERTS, num_experts=4),
        words,
        tokens,
        4 * LAYERS + 2,
        True,
    ),
    "BERT": Case(
        of_config("Bert", "MaskedLM", **SIZES, vocab_size=WORDS),
        lambda m, x, k: m(input_ids=x, labels=x, attention_mask=k).loss,
        lambda: (*tokens(), torch.arange(LENGTH).expand(BATCH, -1) % 5 > 0),
        4 * LAYERS,
    ),
    "ViT": Case(
        of_config("ViT", "ImageClassification", **SIZES, image_size=32, patch_size=8),
        lambda m, x, y: m(pixel_values=x, labels=y).loss,
        lambda: (torch.rand(BATCH, 3, 32, 32), torch.arange(BATCH) % 2),
        4 * LAYERS,
    ),
    "T5": Case(
        of_config(
            "T5",
            "ConditionalGeneration",
            vocab_size=WORDS,
            d_model=WIDTH,
            d_kv=8,
            d_ff=96,
            num_layers=LAYERS,
            num_heads=8,
            decoder_start_token_id=0,
        ),
        words,
        tokens,
        DECODED,
    ),
    "Whisper": Case(
        of_config(
            "Whisper",
            "ConditionalGeneration",
            **WHISPER,
            vocab_size=WORDS,
            d_model=WIDTH,
            max_source_positions=LENGTH,
            max_target_positions=LENGTH,
            num_mel_bins=8,
            decoder_start_token_id=1,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        lambda m, x, y: m(input_features=x, labels=y).loss,
        lambda: (torch.rand(BATCH, 8, 2 * LENGTH), *tokens()),
        DECODED,
    ),
}
WITH_EXPERTS = [CASES[name].make for name in ("Mixtral", "Qwen2-MoE")]


def textbook(name: str) -> P:
    """Columns of the first product of each half, rows of the second."""
    if re.search(COLUMNS + "$", name):
        return P("tp")
    sharded = re.search(ROWS + "$", name) or re.fullmatch(HEADS, name)
    return P(None, "tp") if sharded else P()


@pytest.mark.parametrize("name", CASES)
def test_a_step_reduces_activations_as_often_as_its_layers_say(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make(pytest.importorskip("transformers")).double()
    inputs = [x.double() if x.is_floating_point() else x for x in case.inputs()]
    fn, params, buffers = sf.functionalize(model)
    places = {path: textbook(path) for path in params}
    if case.is_published:
        places = sf.placements(params, model.tp_plan, axis="tp")

    def loss(params: Any, *inputs: torch.Tensor) -> torch.Tensor:
        call = lambda *args, **kwargs: fn(params, buffers, *args, **kwargs)[0]
        return case.loss(call, *inputs)

    gradient = sf.grad(loss)  # captured once
    for sizes in ({"tp": 4}, {"dp": 2, "tp": 2}):
        with sf.fake_world(4):
            mesh = sf.make_mesh(tuple(sizes.values()), tuple(sizes))
            batch = P("dp") if "dp" in sizes else P()
            where = (places, *[batch] * len(inputs))
            low = sf.shard(gradient, mesh, where, backend="aten").lower(params, *inputs)
        check(low, case, BATCH // sizes.get("dp", 1) * (LENGTH + (name == "ViT")))


def check(low: Any, case: Case, rows: int) -> None:
    """Activations of so many rows are reduced, and nothing else is sent but small sums: a number
    of each word, for the loss over sharded words, and for each of its experts, and the gradients
    of norms.
    """
    assert {c.kind for c in low.collectives} == {"all_reduce"}
    over_tp = [c.nbytes for c in low.collectives if c.axis == "tp"]
    activation = rows * WIDTH * 8
    assert over_tp.count(activation) == case.reduced
    small = rows * (16 if case.make in WITH_EXPERTS else 4)
    assert all(n <= small for n in over_tp if n != activation)
