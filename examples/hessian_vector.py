"""The largest curvature of a loss, by power iteration with products of the Hessian and a vector:
forward over reverse mode, with parameters that are fully sharded.

python examples/hessian_vector.py
python examples/hessian_vector.py --fake 8
torchrun --nproc-per-node=2 examples/hessian_vector.py
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

WIDTH, BATCH = 16, 24


def model() -> nn.Module:
    """The model, with the same first values on every rank."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, 1))
    return net.double()


def curvature(ranks: int, steps: int, backend: str) -> list[float]:
    """The estimate after each step, on n ranks."""
    fn, params, buffers = sf.functionalize(model())
    mesh = sf.make_mesh((ranks,), ("dp",))
    plan = sf.strategy("zero3", params, mesh)

    def loss_fn(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (fn(params, buffers, x)[0].squeeze(-1) - y).square().mean()

    def iterate(params: Any, vector: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        grad = lambda p: sf.grad(loss_fn)(p, x, y)
        _, product = sf.jvp(grad, (params,), (vector,))
        squares = torch.stack([v.square().sum() for v in product.values()])
        length = squares.sum().sqrt()
        return sf.tree_map(lambda v: v / length, product), length

    step = sf.shard(
        iterate,
        mesh,
        (plan.params, plan.params, plan.batch, plan.batch),
        (plan.params, P()),
        backend=backend,
    )
    random = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, WIDTH, generator=random, dtype=torch.float64)
    params = vector = sf.distribute(params, mesh, plan.params)
    found = []
    for _ in range(steps):
        # a unit vector times the Hessian is as long as the curvature along it
        vector, length = step(params, vector, x, x[:, 0].sin())
        found.append(sf.full(length).item())
    if mesh.get_rank() == 0:
        for number, value in enumerate(found):
            print(f"step {number}  curvature {value:.9f}")
    return found


def main(given: Sequence[str] | None = None) -> list[float]:
    """Estimate, and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fake", type=int, help="ranks of a world in this process")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--backend", default="inductor", help="or aten, op by op")
    args = parser.parse_args(given)
    ranks = args.fake or int(os.environ.get("WORLD_SIZE", "1"))
    with sf.fake_world(args.fake) if args.fake else contextlib.nullcontext():
        return curvature(ranks, args.steps, args.backend)


if __name__ == "__main__":
    main()
