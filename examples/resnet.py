"""Train a small residual network with batch norm and momentum: statistics are those of the global
batch, whatever the number of ranks.

python examples/resnet.py
python examples/resnet.py --fake 8
torchrun --nproc-per-node=2 examples/resnet.py
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

import shardfn as sf
from shardfn import P

CLASSES, SIZE, SAMPLES, BATCH = 4, 8, 44, 16  # the last batch has 12 images


class Block(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.around = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(h)) + self.around(x))


def network() -> nn.Module:
    """The network, with the same first values on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        Block(3, 8, 1),
        Block(8, 16, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


def images() -> list[tuple[torch.Tensor, int]]:
    """Noise with a brighter quarter, whose place is the class."""
    random = torch.Generator().manual_seed(0)
    out = []
    for i in range(SAMPLES):
        x = torch.randn(3, SIZE, SIZE, generator=random)
        row, column = divmod(i % CLASSES, 2)
        half = SIZE // 2
        x[:, row * half :, column * half :][:, :half, :half] += 1
        out.append((x, i % CLASSES))
    return out


def train(ranks: int, epochs: int, backend: str) -> list[float]:
    """The losses of a run on n ranks."""
    fn, params, buffers = sf.functionalize(network())
    mesh = sf.make_mesh((ranks,), ("dp",))
    plan = sf.strategy("zero1", params, mesh)
    data = DataLoader(images(), batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]
    batches = sf.loader(data, mesh, plan.batch)
    opt = sf.optim(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
    rates = opt.schedule(OneCycleLR, max_lr=0.2, total_steps=epochs * len(batches))
    state_in = opt.state_placements(plan.state, params)

    def loss_fn(params: Any, buffers: Any, x: Any, y: Any) -> Any:
        logits, buffers = fn(params, buffers, x)
        return nn.functional.cross_entropy(logits, y), buffers

    def update(params: Any, state: Any, buffers: Any, batch: Any, options: Any) -> Any:
        found, grads = sf.bucketed_grad(loss_fn, has_aux=True)(params, buffers, *batch)
        loss, buffers = found
        params, state = opt.update(params, grads, state, **options)
        return params, state, buffers, loss

    step = sf.shard(
        update,
        mesh,
        (plan.params, state_in, P(), plan.batch, P()),
        (plan.params, state_in, P(), P()),
        backend=backend,
    )
    args = (params, opt.init(params), buffers)
    args = sf.distribute(args, mesh, (plan.params, state_in, P()))
    losses = []
    for _ in range(epochs):
        for batch in batches:
            *args, loss = step(*args, batch, rates.options)
            rates.step()
            losses.append(sf.full(loss).item())
    if mesh.get_rank() == 0:
        for number, loss in enumerate(losses):
            print(f"step {number}  loss {loss:.6f}")
    return losses


def main(given: Sequence[str] | None = None) -> list[float]:
    """Train, and print the losses on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fake", type=int, help="ranks of a world in this process")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--backend", default="inductor", help="or aten, op by op")
    args = parser.parse_args(given)
    ranks = args.fake or int(os.environ.get("WORLD_SIZE", "1"))
    with sf.fake_world(args.fake) if args.fake else contextlib.nullcontext():
        return train(ranks, args.epochs, args.backend)


if __name__ == "__main__":
    main()
