"""One script for both worlds: train, clip, log, save, load on another mesh, evaluate.

python examples/both_worlds.py --fake 4
torchrun --nproc-per-node=4 examples/both_worlds.py
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import tempfile
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import shardfn as sf
from shardfn import P

ROWS = {"up": P("dp"), "down": P("dp")}  # over the mesh that trains
COLUMNS = {"up": P(None, "tp"), "down": P("tp")}  # over the mesh that evaluates


def loss_fn(w: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean squared error of a network of two layers."""
    return ((torch.tanh(x @ w["up"]) @ w["down"] - y) ** 2).mean()


def data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x (30, 16) and y (30, 4), uneven over four ranks."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(30, 16, generator=random), torch.ones(30, 4)


def train(mesh: Any, say: Any) -> dict[str, torch.Tensor]:
    """Five steps of torch's AdamW on DTensors."""
    random = torch.Generator().manual_seed(0)
    w = {
        "up": torch.randn(16, 36, generator=random) / 4,
        "down": torch.randn(36, 4, generator=random) / 6,
    }
    w = {k: torch.nn.Parameter(x) for k, x in sf.distribute(w, mesh, ROWS).items()}
    step = sf.shard(sf.value_and_grad(loss_fn), mesh, (ROWS, P("dp"), P("dp")), backend="aten")
    optimizer = torch.optim.AdamW(w.values(), lr=0.05)
    for i in range(5):
        with torch.no_grad():
            loss, grads = step(w, *data(i))
        for name, g in grads.items():
            w[name].grad = g
        norm = torch.nn.utils.clip_grad_norm_(w.values(), 0.1)
        optimizer.step()
        say(f"step {i}  loss {float(loss):.6f}  norm {float(norm.full_tensor()):.6f}")
    return {name: x.detach() for name, x in w.items()}


def evaluate(mesh: Any, folder: str, say: Any) -> None:
    """The loss of a checkpoint on a mesh of another shape."""
    w = {"up": torch.zeros(16, 36), "down": torch.zeros(36, 4)}
    w = sf.distribute(w, mesh, COLUMNS)
    dcp.load(w, checkpoint_id=folder)
    loss = sf.shard(loss_fn, mesh, (COLUMNS, P("dp"), P("dp")), backend="aten")
    say(f"loaded  loss {float(loss(w, *data(9))):.6f}")


def main() -> None:
    """Run in a fake world, or in torchrun's."""
    parser = argparse.ArgumentParser(description="One script for both worlds.")
    parser.add_argument("--fake", type=int, metavar="N", help="simulate N ranks")
    parser.add_argument(
        "--folder",
        default=f"{tempfile.gettempdir()}/both_worlds",
        help="of the checkpoint; every rank must see it (default %(default)s)",
    )
    args = parser.parse_args()
    n = args.fake or int(os.environ["WORLD_SIZE"])
    say = print if os.environ.get("RANK", "0") == "0" else lambda _: None
    with sf.fake_world(n) if args.fake else contextlib.nullcontext():
        w = train(sf.make_mesh((n,), ("dp",)), say)
        pathlib.Path(args.folder).mkdir(exist_ok=True)
        dcp.save(w, checkpoint_id=args.folder)
        evaluate(sf.make_mesh((2, n // 2), ("dp", "tp")), args.folder, say)


if __name__ == "__main__":
    main()
