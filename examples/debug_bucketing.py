"""A small data-parallel step in a fake world of 8, to stop in with pdb: docs/debug-bucketing.md."""

from __future__ import annotations

from typing import Any

import torch

import shardfn as sf
from shardfn import P


def loss_fn(params: Any, batch: Any) -> torch.Tensor:
    """Mean square error of three layers."""
    x, y = batch
    for layer in params:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return ((x - y) ** 2).mean()


def step(params: Any, batch: Any) -> tuple[Any, torch.Tensor]:
    """One step of gradient descent."""
    loss, grads = sf.bucketed_grad(loss_fn, cap="2KB", first_cap="1KB")(params, batch)
    return sf.tree_map(lambda p, g: p - 0.1 * g, params, grads), loss


def main() -> None:
    """Lower the step, which runs the bucketing pass, and run it."""
    torch.manual_seed(0)
    params = [{"w": torch.randn(16, 16), "b": torch.zeros(16)} for _ in range(3)]
    batch = torch.randn(64, 16), torch.randn(64, 16)
    with sf.fake_world(8):
        mesh = sf.make_mesh((8,), ("dp",))
        train = sf.shard(step, mesh, in_placements=(P(), P("dp")), backend="aten")
        print(train.lower(params, batch).plan)
        print(sf.full(train(params, batch)[1]))


if __name__ == "__main__":
    main()
