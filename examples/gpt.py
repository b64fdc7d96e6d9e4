"""Train a small GPT on Python's own source, in any world, without a changed line.

python examples/gpt.py
python examples/gpt.py --fake 8
torchrun --nproc-per-node=2 examples/gpt.py
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import Callable

import torch

import shardfn as sf
from shardfn import P
from shardfn_demo import adamw, gpt, text, train


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT, in any world.")
    parser.add_argument(
        "--fake", type=int, default=0, metavar="N", help="simulate N ranks in this process"
    )
    parser.add_argument(
        "--steps", type=int, default=train.STEPS, help="training steps (default %(default)s)"
    )
    parser.add_argument(
        "--layers", type=int, default=4, help="blocks of the model (default %(default)s)"
    )
    parser.add_argument(
        "--backend", choices=("inductor", "aten"), default="inductor", help="default: %(default)s"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default %(default)s)")
    return parser.parse_args()


def trained(args: argparse.Namespace, n: int, say: Callable[[str], None]) -> list[float]:
    """The losses of a run on n ranks."""
    config = gpt.Config(layers=args.layers)
    # as many ranks share a layer as divide its heads; the rest share the batch
    tp = math.gcd(n, config.heads)
    mesh = sf.make_mesh((n // tp, tp), ("dp", "tp"), device_type=args.device)
    params = gpt.init(config)
    params, state = sf.tree_map(lambda w: w.to(args.device), (params, adamw.init(params)))
    where = gpt.placements(params)
    where_state = {"step": P(), "m": where, "v": where}
    step = sf.shard(
        train.step(config),
        mesh,
        in_placements=(where, where_state, P("dp"), P("dp")),
        out_placements=(where, where_state, P()),
        backend=args.backend,
    )
    params = sf.distribute(params, mesh, where)
    state = sf.distribute(state, mesh, where_state)
    data = text.corpus().to(args.device)
    batches = text.batches(data, batch=train.BATCH, context=config.context)
    say(f"{n} ranks: dp {n // tp} x tp {tp} on {args.device}")
    return train.train(step, params, state, batches, steps=args.steps)


def main() -> None:
    """Train, and print the loss on rank 0."""
    args = arguments()
    n = args.fake or int(os.environ.get("WORLD_SIZE", "1"))
    say = print if os.environ.get("RANK", "0") == "0" else lambda *said: None
    with sf.fake_world(n) if args.fake else contextlib.nullcontext():
        losses = trained(args, n, say)
    for i, loss in enumerate(losses, start=1):
        say(f"step {i:>3}  loss {loss:.6f}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
