"""A GPT's step on 2 and 4 real ranks as a pipeline, `make bench-pipeline`: shardfn beside
torch.distributed.pipelining, each schedule beside the same one, in time and in memory.
"""

from __future__ import annotations

import argparse
import ctypes
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
MIB = 2**20
# runs a step; returns its loss, and the norm of this rank's gradients if asked for
Step = Callable[[bool], tuple[float, float]]


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

    def run(is_checked: bool = False) -> tuple[float, float]:
        value, gradients = step(placed, *batch)
        own = [x.to_local() for x in gradients.values()] if is_checked else []
        return value.to_local().item(), norm_of(own)

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

    def run(is_checked: bool = False) -> tuple[float, float]:
        losses: list[torch.Tensor] = []
        inputs = (batch[0],) if rank == 0 else ()
        run_schedule.step(*inputs, target=batch[1] if has_last else None, losses=losses)
        own = [parts[s] for s in range(rank, count, size)]
        parameters = [x for part in own for x in part.parameters()] if is_checked else []
        norm = norm_of([x.grad for x in parameters if x.grad is not None])
        for part in own:
            part.zero_grad(set_to_none=True)
        return float(torch.stack(losses).detach().mean()) if has_last else 0.0, norm

    return run


def norm_of(tensors: Sequence[torch.Tensor]) -> float:
    """The norm of tensors as one vector."""
    return float(sum((x.detach().double().square().sum() for x in tensors), torch.zeros(()))) ** 0.5


def on_rank(rank: int, size: int, folder: str, rounds: int, only: str | None) -> None:
    """Time all steps in turn on one rank."""
    torch.set_num_threads(1)
    store = (Path(folder) / "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    torch.manual_seed(1)
    shape = (BATCH, LENGTH)
    batch = torch.randint(0, VOCABULARY, shape), torch.randint(0, VOCABULARY, shape)
    mesh = sf.make_mesh((size,), ("pp",))
    for kind, (name, rival, chunks) in KINDS.items():
        if only not in (None, kind):
            continue
        steps: dict[str, Step] = {}
        steps["shardfn"] = ours(name, mesh, chunks, batch)
        steps["torch"] = theirs(rival, chunks, batch)
        check_equal(steps, is_last=rank == size - 1)
        taken: dict[str, list[float]] = {who: [] for who in steps}
        for _ in range(rounds):
            for who, step in steps.items():
                dist.barrier()
                start = time.perf_counter()
                step(False)
                dist.barrier()
                taken[who].append(time.perf_counter() - start)
        median = {who: statistics.median(t) for who, t in taken.items()}
        busy, total = measured_idle(steps["shardfn"])
        share = torch.tensor([busy, total])
        dist.all_reduce(share)
        peaks = torch.tensor([measured_peak(step) for step in steps.values()])
        dist.all_reduce(peaks, dist.ReduceOp.MAX)
        if rank == 0:
            ratio = median["shardfn"] / median["torch"]
            verdict = "met" if ratio <= TARGET else "missed"
            print(
                f"| {size} | {kind} | {1e3 * median['shardfn']:.0f} | {1e3 * median['torch']:.0f} "
                f"| {ratio:.2f} {verdict} | {1 - float(share[0] / share[1]):.1%} "
                f"| {peaks[0] / MIB:.0f} | {peaks[1] / MIB:.0f} |",
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()


def check_equal(steps: dict[str, Step], *, is_last: bool) -> None:
    """Warm the steps, and assert that their losses and gradients are equal."""
    found = {who: [step(True) for _ in range(WARM)][-1] for who, step in steps.items()}
    (value, norm), (wanted, wanted_norm) = found["shardfn"], found["torch"]
    assert not is_last or abs(value - wanted) < 1e-4, found
    assert abs(norm - wanted_norm) < 1e-4 * wanted_norm, found


def measured_peak(step: Step) -> int:
    """The bytes that a warm step adds to the resident memory of its process, at their peak.

    Freed memory goes back to the system first. Then the system forgets its peak.
    """
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    dist.barrier()
    step(False)
    dist.barrier()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """A row of /proc/self/status, in bytes."""
    rows = Path("/proc/self/status").read_text().splitlines()
    (row,) = [row for row in rows if row.startswith(f"{field}:")]
    return 1024 * int(row.split()[1])


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
        step(False)
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
        f"microbatches; medians, steps in turn, one thread each, {os.cpu_count()} cores; MiB that "
        "a warm step adds to the resident memory of the rank where it adds the most"
    )
    print("| ranks | schedule | shardfn ms | torch ms | ratio | idle | shardfn MiB | torch MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for size in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(on_rank, (size, folder, args.rounds, args.only), size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
