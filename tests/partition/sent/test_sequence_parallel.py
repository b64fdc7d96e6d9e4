"""A transformer block under torch's published plan of tensor and sequence parallelism: gathers and
scatters of the sequence stand where textbooks have them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import equal
from ranks import run_ranks
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

import shardfn as sf
from shardfn import P

B, HEADS, SIZE = 2, 2, 64
WIDTH = HEADS * SIZE
INNER = ("q", "k", "v", "up")
PLAN: dict[str, ParallelStyle] = {
    "norm_1": SequenceParallel(),
    "norm_2": SequenceParallel(),
    **{name: ColwiseParallel(input_layouts=Shard(1)) for name in INNER},
    "o": RowwiseParallel(output_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}


class Block(nn.Module):
    """Attention and an MLP, each after a norm and before a sum with its input."""

    def __init__(self) -> None:
        super().__init__()
        linear = lambda *sizes: nn.Linear(*sizes, bias=False)
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm_1(x)
        q, k, v = (
            part(y).unflatten(-1, (-1, SIZE)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


def block() -> tuple[nn.Module, Callable[..., torch.Tensor], Any]:
    torch.manual_seed(0)
    module = Block().double()
    fn, params, _ = sf.functionalize(module)
    return module, lambda params, x: fn(params, {}, x)[0], params


def over(mesh: Any, fn: Callable[..., Any], module: nn.Module, params: Any) -> Any:
    places = sf.placements(params, PLAN, mesh=mesh, axis="tp", module=module)
    first = "dp" if "dp" in mesh.mesh_dim_names else None
    inside = P(first, "tp")
    return sf.shard(fn, mesh, (places, inside), backend="aten")


def step(fn: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    return sf.value_and_grad(lambda params, x: fn(params, x).sin().square().sum(), argnums=(0, 1))


def drawn(length: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(length)
    return torch.randn(B, length, WIDTH, generator=g, dtype=torch.float64)


def test_forward_gathers_before_and_scatters_after_each_half() -> None:
    module, fn, params = block()
    x = drawn(6)
    with sf.fake_world(2):
        sharded = over(sf.make_mesh((2,), ("tp",)), fn, module, params)
        equal(sf.full(sharded(params, x)), fn(params, x))
        lowered = sharded.lower(params, x)
        kinds = [c.kind for c in lowered.collectives]
    assert kinds == ["all_gather", "reduce_scatter"] * 2
    assert {c.nbytes for c in lowered.collectives} == {x.nbytes}


def test_a_step_gathers_and_scatters_twice_in_the_forward_and_in_the_backward() -> None:
    """The gradients of the norms are small. The input is computed, as in a model."""
    module, fn, params = block()
    x = drawn(6)
    one = step(lambda params, x: fn(params, x.sin()))
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        sharded = over(mesh, one, module, params)
        equal(sf.full(sharded(params, x)), one(params, x))
        lowered = sharded.lower(params, x)
    count = Counter(c.kind for c in lowered.collectives if c.nbytes == x.nbytes)
    assert count == {"all_gather": 4, "reduce_scatter": 4}
    small = [c.kind for c in lowered.collectives if c.nbytes < x.nbytes]
    assert {*small} == {"all_reduce"}


def of_hub(name: str) -> nn.Module:
    """A model of transformers with one layer."""
    hub = pytest.importorskip("transformers")
    config = getattr(hub, f"{name}Config")(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=WIDTH // 4,
        vocab_size=48,
    )
    torch.manual_seed(0)
    return getattr(hub, f"{name}ForCausalLM")(config).double()


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_a_language_model_sends_what_textbooks_say(name: str) -> None:
    """With its published plan. The embedding scatters and its gradient is gathered, the head
    gathers and its gradient is scattered.
    """
    module = of_hub(name)
    fn, params, _ = sf.functionalize(module)
    tokens = torch.arange(8).view(2, 4) * 5 % 48
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        base = sf.placements(params, module.tp_plan, axis="tp")
        plan = sf.strategy("sequence", params, mesh, base=base)
        layers = ("model.embed_tokens", "model.layers.*")
        sf.pin(module, dict.fromkeys(layers, plan.activations))
        fn, params, buffers = sf.functionalize(module)

        def loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
            out, _ = fn(params, buffers, input_ids=tokens, use_cache=False)
            return out.logits.sin().square().sum()

        one = sf.value_and_grad(loss)
        sharded = sf.shard(one, mesh, (plan.params, P()), backend="aten")
        lowered = sharded.lower(params, tokens)
        equal(sf.full(sharded(params, tokens)), one(params, tokens))
    activation = tokens.numel() * WIDTH * 8
    large = [c for c in lowered.collectives if c.nbytes >= activation]
    count = Counter(c.kind for c in large)
    assert count == {"all_gather": 4 + 2, "reduce_scatter": 4 + 2}


@pytest.mark.parametrize("sizes", [(1, 3), (2, 2)], ids=str)
def test_uneven_sequences_equal_one_device(sizes: tuple[int, int]) -> None:
    module, fn, params = block()
    x = drawn(7)
    wanted = step(fn)(params, x)
    with sf.fake_world(sizes[0] * sizes[1]):
        mesh = sf.make_mesh(sizes, ("dp", "tp"))
        sharded = over(mesh, step(fn), module, params)
        equal(sf.full(sharded(params, x)), wanted)


def _on_two_ranks() -> Any:
    module, fn, params = block()
    sharded = over(sf.make_mesh((2,), ("tp",)), step(fn), module, params)
    return sf.full(sharded(params, drawn(7)))


def test_two_processes_compute_what_the_simulator_does() -> None:
    with sf.fake_world(2):
        simulated = _on_two_ranks()
    for real in run_ranks(2, _on_two_ranks):
        torch.testing.assert_close(real, simulated, rtol=0, atol=0)
