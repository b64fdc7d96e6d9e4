"""A GPT's step on 2 and 4 real ranks as a pipeline, `make bench-pipeline`: shardfn beside
torch.distributed.pipelining, each schedule beside the same one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

import shardfn as sf
from shardfn.compile.loops import CompiledLoop

WIDTH, HEADS, VOCABULARY, LENGTH, BATCH, MICROBATCHES, LAYERS = 256, 4, 512, 128, 16, 8, 8
ROUNDS, WARM = 15, 2
TARGET = 1.00  # of the best of torch's steps of the same kind
# ours, torch's, and stages a rank
KINDS = {
    "gpipe": ("gpipe", schedules.ScheduleGPipe, 1),
    "1f1b": ("1f1b", schedules.Schedule1F1B, 1),
    "interleaved": ("interleaved", schedules.ScheduleInterleaved1F1B, 2),
    "zero bubble": ("zero_bubble", schedules.ScheduleInterleavedZeroBubble, 1),
}
Step = Callable[[], float]


class Block(nn.Module):
    """One layer of the GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(rows, length, 3, HEADS, width // HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.after(x))))


class Part(nn.Module):
    """Some layers of the GPT, with the embedding before the first, and the head after the last."""

    def __init__(self, blocks: Sequence[nn.Module], *, first: bool, last: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if first else None
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def whole() -> Part:
    """The GPT, with the same parameters on each rank."""
    torch.manual_seed(0)
    return Part([Block() for _ in range(LAYERS)], first=True, last=True)


def parts_of(model: Part, count: int) -> list[Part]:
    """The GPT in stages of equal numbers of layers, which share its parameters."""
    size = LAYERS // count
    parts = []
    for s in range(count):
        blocks = list(model.blocks)[s * size : (s + 1) * size]
        part = Part(blocks, first=False, last=False)
        part.embedding = model.embedding if s == 0 else None
        part.head = model.head if s == count - 1 else None
        parts.append(part)
    return parts


def stage_of(path: str, count: int) -> int:
    """The stage of a parameter of the GPT."""
    if path.startswith("blocks."):
        return int(path.split(".")[1]) * count // LAYERS
    return 0 if path.startswith("embedding") else count - 1


def ours(name: str, mesh: Any, chunks: int, batch: tuple[Any, Any]) -> Step:
    """The step of shardfn."""
    fn, parameters, _ = sf.functionalize(whole())
    size = mesh.size()
    count = size * chunks
    specs = {}
    for path in parameters:
        chunk, at = divmod(stage_of(path, count), size)
        specs[path] = sf.P(pp=sf.Stage(at, chunk))

    def loss(parameters: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_of(fn(parameters, {}, x)[0], y)

    step = sf.shard(
        sf.pipelined_grad(loss, MICROBATCHES, schedule=name),
        mesh,
        in_placements=(specs, None, None),
    )
    placed = sf.distribute(dict(parameters), mesh, specs)

    def run() -> float:
        value, _ = step(placed, *batch)
        return value.to_local().item()

    return run


def theirs(kind: Any, chunks: int, batch: tuple[Any, Any]) -> Step:
    """The step of torch.distributed.pipelining, eager, as it is."""
    rank, size = dist.get_rank(), dist.get_world_size()
    count = size * chunks
    parts = parts_of(whole(), count)
    device = torch.device("cpu")
    mine = [PipelineStage(parts[s], s, count, device) for s in range(rank, count, size)]
    is_multiple = issubclass(kind, schedules.PipelineScheduleMulti)
    run_schedule = kind(mine if is_multiple else mine[0], MICROBATCHES, loss_fn=loss_of)
    has_last = (count - 1) % size == rank

    def run() -> float:
        for s in range(rank, count, size):
            parts[s].zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        inputs = (batch[0],) if rank == 0 else ()
        run_schedule.step(*inputs, target=batch[1] if has_last else None, losses=losses)
        return float(torch.stack(losses).mean()) if has_last else 0.0

    return run


def on_rank(rank: int, size: int, folder: str, rounds: int, only: str | None) -> None:
    """Time all steps in turn on one rank."""
    torch.set_num_threads(1)
    store = (Path(folder) / "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    torch.manual_seed(1)
    shape = (BATCH, LENGTH)
    batch = torch.randint(0, VOCABULARY, shape), torch.randint(0, VOCABULARY, shape)
    mesh = sf.make_mesh((size,), ("pp",))
    rows = []
    for kind, (name, rival, chunks) in KINDS.items():
        if only not in (None, kind):
            continue
        steps: dict[str, Step] = {}
        steps["shardfn"] = ours(name, mesh, chunks, batch)
        steps["torch"] = theirs(rival, chunks, batch)
        values = {who: [step() for _ in range(WARM)][-1] for who, step in steps.items()}
        if rank == size - 1 or values["torch"]:
            assert abs(values["shardfn"] - values["torch"]) < 1e-4, values
        taken: dict[str, list[float]] = {who: [] for who in steps}
        for _ in range(rounds):
            for who, step in steps.items():
                dist.barrier()
                start = time.perf_counter()
                step()
                dist.barrier()
                taken[who].append(time.perf_counter() - start)
        busy, total = measured_idle(steps["shardfn"])
        share = torch.tensor([busy, total])
        dist.all_reduce(share)
        median = {who: statistics.median(t) for who, t in taken.items()}
        rows.append((kind, median, 1 - float(share[0] / share[1])))
    if rank == 0:
        for kind, median, idle in rows:
            ratio = median["shardfn"] / median["torch"]
            verdict = "met" if ratio <= TARGET else "missed"
            print(
                f"| {size} | {kind} | {1e3 * median['shardfn']:.1f} | {1e3 * median['torch']:.1f} "
                f"| {ratio:.2f} {verdict} | {idle:.1%} |",
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()


def measured_idle(step: Step) -> tuple[float, float]:
    """The seconds in which a rank's actions ran, and those of the step."""
    spent = 0.0
    call = CompiledLoop.run_graph

    def timed(loop: CompiledLoop, which: int, inputs: Any) -> Any:
        nonlocal spent
        start = time.perf_counter()
        outs = call(loop, which, inputs)
        spent += time.perf_counter() - start
        return outs

    CompiledLoop.run_graph = timed  # type: ignore[method-assign]
    try:
        dist.barrier()
        start = time.perf_counter()
        step()
        dist.barrier()
        return spent, time.perf_counter() - start
    finally:
        CompiledLoop.run_graph = call  # type: ignore[method-assign]


def main(argv: Sequence[str] | None = None) -> int:
    """Time the steps on 2 and 4 ranks, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.pipeline")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", choices=KINDS)
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(
        f"A GPT of {LAYERS} layers, width {WIDTH}, {BATCH} x {LENGTH} tokens, {MICROBATCHES} "
        "microbatches; medians, steps in turn, one thread each"
    )
    print("| ranks | schedule | shardfn ms | torch ms | ratio | idle |")
    print("|---|---|---|---|---|---|")
    for size in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(on_rank, (size, folder, args.rounds, args.only), size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
