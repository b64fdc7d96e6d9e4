"""Train a Llama of Hugging Face: AdamW, a cosine schedule, bfloat16, fully sharded x tensor
parallel, checkpoints from which any number of ranks goes on.

python examples/train_llama.py
python examples/train_llama.py --fake 8 --folder /tmp/run --save-every 10
torchrun --nproc-per-node=2 examples/train_llama.py --folder /tmp/run --resume
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import shardfn as sf
from shardfn import P
from shardfn_demo import text

HEADS = 4
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a small Llama.")
    add = parser.add_argument
    add("--fake", type=int, default=0, help="ranks of a world in this process")
    add("--steps", type=int, default=20, help="training steps in all")
    add("--stop", type=int, help="stop after this step, as if interrupted")
    add("--layers", type=int, default=2)
    add("--width", type=int, default=64)
    add("--context", type=int, default=64, help="tokens of a sample")
    add("--batch", type=int, default=16, help="samples of a step, on all ranks")
    add("--lr", type=float, default=3e-3)
    add("--dtype", choices=DTYPES, default="bfloat16", help="of the computation")
    add("--backend", choices=("inductor", "aten"), default="inductor")
    add("--folder", help="of checkpoints")
    add("--save-every", type=int, default=10, help="steps between checkpoints")
    add("--resume", action="store_true", help="go on from the newest checkpoint")
    add("--peak", type=float, help="TFLOP/s of a rank, for the model FLOPs in use")
    add("--tensorboard", metavar="FOLDER", help="write curves for TensorBoard")
    add("--progress", action="store_true", help="a progress bar, in place of lines")
    return parser.parse_args(given)


class Windows(Dataset[torch.Tensor]):
    """The text, one window of tokens a sample."""

    def __init__(self, context: int) -> None:
        self.tokens, self.context = text.corpus(200_000), context

    def __len__(self) -> int:
        return len(self.tokens) // self.context

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.tokens[i * self.context : (i + 1) * self.context]


def model(args: argparse.Namespace) -> LlamaForCausalLM:
    """The model, with the same first values on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.width,
        intermediate_size=3 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=args.context,
        use_cache=False,
    )
    wide = torch.float64 if args.dtype == "float64" else torch.float32
    return LlamaForCausalLM(config).to(dtype=wide)


class Run:
    """A training run on the ranks of a mesh."""

    def __init__(self, args: argparse.Namespace, ranks: int) -> None:
        tp = math.gcd(ranks, HEADS)
        device = "cuda" if torch.cuda.is_available() and not args.fake else "cpu"
        shape = (ranks // tp, tp)
        self.mesh = sf.make_mesh(shape, ("dp", "tp"), device_type=device)
        net = model(args).to(device=device)
        self.fn, params, self.buffers = sf.functionalize(net)
        self.size = sum(w.numel() for w in params.values())
        tensor = sf.placements(params, net.tp_plan, axis="tp", mesh=self.mesh)
        plan = sf.strategy("zero3", params, self.mesh, base=tensor)
        self.opt = sf.optim(
            torch.optim.AdamW,
            lr=args.lr,
            weight_decay=0.1,
            groups={"**norm.weight": {"weight_decay": 0.0}},
        )
        self.rates = self.opt.schedule(CosineAnnealingLR, args.steps)
        state = self.opt.state_placements(plan.state, params)
        self.loss = self.language
        if args.dtype == "bfloat16":
            self.loss = sf.mixed_precision(self.language)
        self.step = sf.shard(
            self.update,
            self.mesh,
            in_placements=(plan.params, state, plan.batch, P()),
            out_placements=(plan.params, state, P(), P()),
            donate_argnums=(0, 1),
            backend=args.backend,
        )
        self.params = sf.distribute(params, self.mesh, plan.params)
        self.state = sf.distribute(self.opt.init(params), self.mesh, state)
        data = DataLoader(
            Windows(args.context), batch_size=args.batch, shuffle=True, drop_last=True
        )
        self.batches = sf.loader(data, self.mesh, plan.batch)
        self.number = 0

    def language(self, params: Any, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of a batch of tokens."""
        out, _ = self.fn(params, self.buffers, input_ids=tokens, labels=tokens)
        return out.loss

    def update(self, params: Any, state: Any, tokens: Any, lr: Any) -> Any:
        """One step: new parameters and optimizer state, the loss, the norm of the gradients."""
        loss, grads = sf.bucketed_grad(self.loss)(params, tokens)
        grads, norm = sf.clip_by_global_norm(grads, 1.0)
        params, state = self.opt.update(params, grads, state, lr=lr)
        return params, state, loss, norm

    def tree(self) -> dict[str, Any]:
        """All that a checkpoint holds."""
        return {
            "params": self.params,
            "state": self.state,
            "rates": self.rates,
            "batches": self.batches,
            "number": self.number,
        }

    def load(self, folder: str) -> None:
        """Go on from the newest checkpoint of a folder."""
        found = sf.load(folder, self.tree())
        self.params, self.state = found["params"], found["state"]
        self.number = found["number"]

    def losses(self, args: argparse.Namespace, report: Callable[..., None]) -> Any:
        """Train; the loss of each step."""
        losses = []
        feed = endless(self.batches)
        last = args.steps if args.stop is None else args.stop
        while self.number < last:
            start = time.perf_counter()
            tokens, lr = next(feed), self.rates.lr
            self.params, self.state, loss, norm = self.step(self.params, self.state, tokens, lr)
            self.rates.step()
            self.number += 1
            losses.append(sf.full(loss).item())
            seconds = time.perf_counter() - start
            figures = {
                "loss": losses[-1],
                "lr": lr[0].item(),  # of the first parameter group
                "norm": sf.full(norm).item(),
                "tokens/s": tokens.numel() / seconds,
            }
            if args.peak:
                # forward and backward: six operations for each parameter and token
                done = 6 * self.size * tokens.numel() / seconds
                figures["mfu"] = done / (self.mesh.size() * args.peak * 1e12)
            report(self.number, figures)
            if args.folder and self.number % args.save_every == 0:
                sf.save(args.folder, self.tree(), step=self.number, keep=2)
        return losses


def endless(batches: Any) -> Any:
    """One pass after another."""
    while True:
        yield from batches


@contextlib.contextmanager
def reports(args: argparse.Namespace) -> Any:
    """Where the figures of each step go: lines or a progress bar, and TensorBoard."""
    writer = bar = task = None
    is_first = os.environ.get("RANK", "0") == "0"
    with contextlib.ExitStack() as stack:
        if args.tensorboard and is_first:
            from torch.utils.tensorboard import SummaryWriter

            writer = stack.enter_context(SummaryWriter(args.tensorboard))
        if args.progress and is_first:
            from rich.progress import Progress

            bar = stack.enter_context(Progress())
            task = bar.add_task("training", total=args.steps)

        def report(number: int, figures: dict[str, float]) -> None:
            digits = 15 if args.dtype == "float64" else 6
            words = "  ".join(f"{name} {x:.{digits}g}" for name, x in figures.items())
            if writer is not None:
                for name, x in figures.items():
                    writer.add_scalar(name, x, number)
            if bar is not None and task is not None:
                bar.update(task, completed=number, description=words)
            elif is_first:
                print(f"step {number}  {words}", flush=True)

        yield report


def main(given: Sequence[str] | None = None) -> list[float]:
    """Train, and print the figures of each step on rank 0."""
    args = arguments(given)
    ranks = args.fake or int(os.environ.get("WORLD_SIZE", "1"))
    with (
        sf.fake_world(args.fake) if args.fake else contextlib.nullcontext(),
        reports(args) as report,
    ):
        run = Run(args, ranks)
        if args.resume:
            run.load(args.folder)
        losses = run.losses(args, report)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
