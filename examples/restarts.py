"""Train, be killed, start again from the newest step, and end with the same parameters bit for bit.

torchrun --nproc-per-node=2 --max-restarts=20 examples/restarts.py /tmp/run --steps 5000 --kill 20

With `--kill`, an alarm ends a random rank at a random moment of each of the first starts: while
it compiles, in a step, in a save, after the last one. torchrun ends the others, and starts all
again.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pathlib
import random
import signal
from typing import Any

import torch
import torch.distributed as dist

import shardfn as sf
from shardfn import P

ROWS = {"up": P("dp"), "down": P("dp")}
State = dict[str, Any]


def loss_fn(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The mean squared error of a network of two layers that learns its input."""
    return ((torch.tanh(x @ w["up"]) @ w["down"] - x) ** 2).mean()


def step(state: State, x: torch.Tensor) -> State:
    """One step of gradient descent with momentum."""
    grads = sf.grad(loss_fn)(state["w"], x)
    m = sf.tree_map(lambda m, g: 0.9 * m + g, state["m"], grads)
    w = sf.tree_map(lambda w, m: w - 0.05 * m, state["w"], m)
    return {"w": w, "m": m}


def first(mesh: Any) -> State:
    """The state before the first step."""
    numbers = torch.Generator().manual_seed(0)
    w = {
        "up": torch.randn(7, 12, generator=numbers) / 3,
        "down": torch.randn(12, 7, generator=numbers) / 4,
    }
    m = sf.tree_map(torch.zeros_like, w)
    return sf.distribute({"w": w, "m": m}, mesh, {"w": ROWS, "m": ROWS})


def batch(k: int) -> torch.Tensor:
    """The batch of step k, (9, 7), the same in every start."""
    return torch.randn(9, 7, generator=torch.Generator().manual_seed(1 + k))


def digest(state: State) -> str:
    """The digest of all bits of the parameters."""
    values = sf.full(state)["w"]
    found = hashlib.sha256()
    for name in sorted(values):
        found.update(values[name].numpy().tobytes())
    return found.hexdigest()


def trainer(mesh: Any) -> Any:
    """The step over a mesh."""
    places = {"w": ROWS, "m": ROWS}
    return sf.shard(step, mesh, (places, P("dp")), places, backend="aten")


def number_of_start() -> int:
    """How often torchrun has started the job again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def die(starts: int, seed: int) -> None:
    """Have an alarm end one rank of each of the first starts at a random moment."""
    start = number_of_start()
    chance = random.Random(f"{seed} {start}")
    rank = chance.randrange(int(os.environ["WORLD_SIZE"]))
    seconds = chance.uniform(0.1, 10.0)
    if start < starts and rank == int(os.environ["RANK"]):
        signal.setitimer(signal.ITIMER_REAL, seconds)


def main() -> None:
    """Train from the newest step on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kill", type=int, default=0, help="starts that are ended")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    die(options.kill, options.seed)
    mesh = sf.make_mesh((int(os.environ["WORLD_SIZE"]),), ("dp",), timeout=30)
    train = trainer(mesh)
    state, k = first(mesh), 0
    if any(options.folder.glob("step-*/.metadata")):
        saved = sf.load(options.folder, {"state": state, "next": 0})
        state, k = saved["state"], saved["next"]
    rank, start = dist.get_rank(), number_of_start()
    print(f"start {start}: rank {rank} begins at step {k}", flush=True)
    while k < options.steps:
        state, k = train(state, batch(k)), k + 1
        sf.save(options.folder, {"state": state, "next": k}, step=k, keep=2)
    text = digest(state)
    if signal.getitimer(signal.ITIMER_REAL)[0] > 0:
        signal.pause()  # an alarm is still to come
    if rank == 0:
        print(f"parameters {text}", flush=True)


if __name__ == "__main__":
    main()
