"""Differentially private training (DP-SGD): the gradient of each sample is clipped, then the sum
gets noise. `vmap(grad)` inside of `shard` has these gradients with parameters that are sharded;
a hook on a backward has their sum only.

python examples/per_sample_gradients.py
python examples/per_sample_gradients.py --fake 8
torchrun --nproc-per-node=2 examples/per_sample_gradients.py
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

WIDTH, CLASSES, BATCH, CLIP, NOISE, RATE = 16, 4, 24, 1.0, 0.3, 0.2


def model() -> nn.Module:
    """The model, with the same first values on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, CLASSES))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points, and the class of each."""
    random = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, WIDTH, generator=random)
    return x, x[:, :CLASSES].argmax(1)


def private(grads: Any, key: torch.Tensor) -> Any:
    """The mean of clipped gradients with noise.

    Args:
        grads: a tree of gradients, with the samples in dim 0.
        key: of the noise.
    """
    squares = [g.flatten(1).square().sum(1) for g in grads.values()]
    norms = torch.stack(squares).sum(0).sqrt()  # (samples,)
    factors = (CLIP / norms.clamp(min=1e-6)).clamp(max=1.0)
    keys = sf.random.split(key, len(grads))
    out = {}
    for (name, g), one in zip(grads.items(), keys, strict=True):
        total = torch.einsum("n,n...->...", factors, g)
        noise = sf.random.normal(one, total.shape) * (CLIP * NOISE)
        out[name] = (total + noise) / BATCH
    return out


def train(ranks: int, steps: int, backend: str) -> list[float]:
    """The losses of a run on n ranks."""
    fn, params, buffers = sf.functionalize(model())
    mesh = sf.make_mesh((ranks,), ("dp",))
    plan = sf.strategy("zero3", params, mesh)

    def loss_fn(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits, _ = fn(params, buffers, x[None])
        return nn.functional.cross_entropy(logits, y[None])

    def update(params: Any, x: torch.Tensor, y: torch.Tensor, key: Any) -> Any:
        each = sf.vmap(sf.value_and_grad(loss_fn), in_axes=(None, 0, 0))
        losses, grads = each(params, x, y)
        grads = sf.constrain(private(grads, key), plan.grads)
        params = sf.tree_map(lambda w, g: w - RATE * g, params, grads)
        return params, losses.mean()

    step = sf.shard(
        update,
        mesh,
        (plan.params, plan.batch, plan.batch, P()),
        (plan.params, P()),
        backend=backend,
    )
    params = sf.distribute(params, mesh, plan.params)
    keys = sf.random.split(sf.random.key(0), steps)
    losses = []
    for number in range(steps):
        params, loss = step(params, *batch(number), keys[number])
        losses.append(sf.full(loss).item())
    if mesh.get_rank() == 0:
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
