"""The loop of PyTorch's tutorial of DistributedDataParallel, with two lines changed.

python examples/ddp_tutorial.py
python examples/ddp_tutorial.py --fake 4
torchrun --nproc-per-node=2 examples/ddp_tutorial.py
"""

from __future__ import annotations

import argparse
import contextlib
import os

import torch
from torch import nn, optim

import shardfn as sf
from shardfn import P


class ToyModel(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))


def demo_basic(ranks: int) -> None:
    """Ten steps of SGD. Every rank makes the global batch, and computes on its rows."""
    torch.manual_seed(0)
    model = ToyModel()
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(model.parameters(), lr=0.1)

    mesh = sf.make_mesh((ranks,), ("dp",))
    # was: ddp_model = DDP(model)
    step = sf.shard(lambda x, y: loss_fn(model(x), y), mesh, P("dp"))

    for number in range(10):
        optimizer.zero_grad()
        inputs, labels = torch.randn(30, 10), torch.randn(30, 5)
        loss = step(inputs, labels)  # was: loss_fn(ddp_model(inputs), labels)
        loss.backward()
        optimizer.step()
        if mesh.get_rank() == 0:
            print(f"step {number}  loss {loss.item():.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fake", type=int, help="ranks of a world in this process")
    fake = parser.parse_args().fake
    count = fake or int(os.environ.get("WORLD_SIZE", "1"))
    with sf.fake_world(fake) if fake else contextlib.nullcontext():
        demo_basic(count)
