"""Fine-tune a frozen model by adapters of low rank (LoRA): gradients and optimizer state exist for
the adapters alone.

python examples/finetune_lora.py
python examples/finetune_lora.py --fake 8
torchrun --nproc-per-node=2 examples/finetune_lora.py
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import shardfn as sf
from shardfn import P

WIDTH, CLASSES, BATCH, RANK, ALPHA = 32, 5, 48, 4, 16.0


def base_model() -> nn.Module:
    """The model that stays as it is; pretend that it has been trained."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH),
        nn.GELU(),
        nn.Linear(4 * WIDTH, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, CLASSES),
    )


def adapters(params: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """For each matrix a product of two narrow ones, which is zero at first."""
    random = torch.Generator().manual_seed(1)
    made = {}
    for name, w in params.items():
        if w.dim() == 2:
            rows, columns = w.shape
            a = torch.randn(RANK, columns, generator=random) / columns**0.5
            made[name] = {"a": a, "b": torch.zeros(rows, RANK)}
    return made


def merged(frozen: Any, lora: Any) -> dict[str, torch.Tensor]:
    """The parameters with their adapters added."""
    out = dict(frozen)
    for name, pair in lora.items():
        out[name] = frozen[name] + pair["b"] @ pair["a"] * (ALPHA / RANK)
    return out


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points, and the class of each."""
    random = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, WIDTH, generator=random)
    return x, x[:, :CLASSES].argmax(1)


def train(ranks: int, steps: int, backend: str) -> list[float]:
    """The losses of a run on n ranks."""
    fn, params, buffers = sf.functionalize(base_model())
    lora = adapters(params)
    mesh = sf.make_mesh((ranks,), ("dp",))
    opt = sf.optim(torch.optim.AdamW, lr=2e-2)
    # the base, which has no gradients, is sharded; the small adapters are replicated
    frozen_in = sf.fsdp(params, mesh)
    plan = sf.strategy("ddp", lora, mesh)
    state_in = opt.state_placements(plan.state, lora)

    def loss_fn(lora: Any, frozen: Any, x: Any, y: Any) -> torch.Tensor:
        logits, _ = fn(merged(frozen, lora), buffers, x)
        return nn.functional.cross_entropy(logits, y)

    def update(lora: Any, state: Any, frozen: Any, x: Any, y: Any) -> Any:
        loss, grads = sf.bucketed_grad(loss_fn)(lora, frozen, x, y)
        lora, state = opt.update(lora, grads, state)
        return lora, state, loss

    step = sf.shard(
        update,
        mesh,
        (plan.params, state_in, frozen_in, plan.batch, plan.batch),
        (plan.params, state_in, P()),
        backend=backend,
    )
    frozen = sf.distribute(params, mesh, frozen_in)
    args = (lora, opt.init(lora))
    args = sf.distribute(args, mesh, (plan.params, state_in))
    losses = []
    for number in range(steps):
        *args, loss = step(*args, frozen, *batch(number))
        losses.append(sf.full(loss).item())
    if mesh.get_rank() == 0:
        every = sum(w.numel() for w in params.values())
        few = sum(x.numel() for pair in lora.values() for x in pair.values())
        print(f"{few} of {every} parameters are trained")
        for number, loss in enumerate(losses):
            print(f"step {number}  loss {loss:.6f}")
    return losses


def main(given: Sequence[str] | None = None) -> list[float]:
    """Train, and print the losses on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fake", type=int, help="ranks of a world in this process")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--backend", default="inductor", help="or aten, op by op")
    args = parser.parse_args(given)
    ranks = args.fake or int(os.environ.get("WORLD_SIZE", "1"))
    with sf.fake_world(args.fake) if args.fake else contextlib.nullcontext():
        return train(ranks, args.steps, args.backend)


if __name__ == "__main__":
    main()
