"""A GPT's step on 2 and 4 real ranks as a pipeline, `make bench-pipeline`: shardfn beside
torch.distributed.pipelining, each schedule beside the same one, in time and in memory; the share of
a step in which ranks wait, beside the predicted one; what a pipeline adds to capture and lowering.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

import shardfn as sf
from shardfn.compile.loops import CompiledLoop
from shardfn.ops.messages import Exchange, Send
from shardfn.pipelines.named import schedule_of
from shardfn.pipelines.running import spans_of

WIDTH, HEADS, VOCABULARY, LENGTH, BATCH, MICROBATCHES, LAYERS = 256, 4, 512, 128, 16, 8, 8
ROUNDS, WARM = 31, 2
TARGET = 1.00  # of the best of torch's steps of the same kind
# ours, torch's, and stages a rank
KINDS = {
    "gpipe": ("gpipe", schedules.ScheduleGPipe, 1),
    "1f1b": ("1f1b", schedules.Schedule1F1B, 1),
    "interleaved": ("interleaved", schedules.ScheduleInterleaved1F1B, 2),
    "zero bubble": ("zero_bubble", schedules.ScheduleInterleavedZeroBubble, 1),
}
MIB = 2**20
STAGES, STAGED = 4, 1.3  # their number, and the most of a capture and lowering without them
TRIPS, SENT = 101, 4 * WIDTH * BATCH * LENGTH // MICROBATCHES  # bytes of an activation
AGREED = 0.005  # seconds in which all ranks learn the moment at which they start
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


@attrs.frozen
class Ours:
    """The step of shardfn, with its arguments."""

    function: Any
    args: tuple[Any, ...]

    def run(self, is_checked: bool = False) -> tuple[float, float]:
        """Run the step."""
        value, gradients = self.function(*self.args)
        own = [x.to_local() for x in gradients.values()] if is_checked else []
        return value.to_local().item(), norm_of(own)

    def predicted_idle(self, here: sf.Hardware, messages: sf.Link) -> float:
        """The share of a step in which this rank does not compute, as `lowered.time` predicts."""
        time = self.function.lower(*self.args).time(here, links={"pp": messages})
        return 1 - time.compute / time.total


def ours(name: str, mesh: Any, chunks: int, batch: tuple[Any, Any]) -> Ours:
    """The step of shardfn by a schedule."""
    fn, parameters, _ = sf.functionalize(whole())
    specs = stages_of(parameters, mesh.size(), chunks)
    step = sf.shard(
        sf.pipelined_grad(loss_by(fn), MICROBATCHES, schedule=name),
        mesh,
        in_placements=(specs, None, None),
    )
    return Ours(step, (sf.distribute(dict(parameters), mesh, specs), *batch))


def loss_by(fn: Any) -> Callable[..., torch.Tensor]:
    """The loss of the GPT as a function of its parameters."""
    return lambda parameters, x, y: loss_of(fn(parameters, {}, x)[0], y)


def stages_of(parameters: Iterable[str], size: int, chunks: int) -> dict[str, sf.P]:
    """The placement of each parameter of the GPT on stages."""
    places = {path: divmod(stage_of(path, size * chunks), size) for path in parameters}
    return {path: sf.P(pp=sf.Stage(at, chunk)) for path, (chunk, at) in places.items()}


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
    here, messages = sf.measure_hardware(), measured_messages()
    for kind, (name, rival, chunks) in KINDS.items():
        if only not in (None, kind):
            continue
        steps: dict[str, Step] = {}
        own = ours(name, mesh, chunks, batch)
        steps["shardfn"] = own.run
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
        idle, predicted = (
            measured_idle(own.run, rounds),
            mean_of(own.predicted_idle(here, messages)),
        )
        schedule = schedule_of(name, size, MICROBATCHES, chunks)
        of_actions = idle_of_actions(own.run, schedule, rounds)
        peaks = torch.tensor([measured_peak(step) for step in steps.values()])
        dist.all_reduce(peaks, dist.ReduceOp.MAX)
        if rank == 0:
            ratio = median["shardfn"] / median["torch"]
            verdict = "met" if ratio <= TARGET else "missed"
            print(
                f"| {size} | {kind} | {1e3 * median['shardfn']:.0f} | {1e3 * median['torch']:.0f} "
                f"| {ratio:.2f} {verdict} | {idle:.1%} | {of_actions:.1%} "
                f"| {predicted:.1%} "
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


def measured_idle(step: Step, rounds: int) -> float:
    """The share of a step in which ranks wait for each other, in the mean of all ranks.

    A rank waits for messages, and at the end for the other ranks: then it takes no processor time.
    Each wait is the median over steps, so that what other processes do once does not count. All
    ranks start a step at one moment, by the clock of the machine.
    """
    waits: list[list[float]] = []
    steps: list[float] = []
    for _ in range(rounds):
        with timed_waits() as times:
            start = common_start()
            step(False)
            last, busy = times.pop()
        busy = time.thread_time() - busy
        ends = torch.tensor(time.perf_counter(), dtype=torch.float64)
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        end = float(ends)
        waits.append([*(until - since for since, until in times), end - last - busy])
        steps.append(end - start)
    waited = sum(map(statistics.median, zip(*waits, strict=True)))
    return mean_of(waited / statistics.median(steps))


def measured_messages() -> sf.Link:
    """The link of messages, which ranks 0 and 1 send there and back: each is on its way alone. A
    collective of two ranks has two such messages, and sums.
    """

    def seconds(numbers: int) -> float:
        x, taken = torch.zeros(numbers), []
        for _ in range(TRIPS):
            dist.barrier()
            start = time.perf_counter()
            if dist.get_rank() == 0:
                dist.send(x, 1)
                dist.recv(x, 1)
            elif dist.get_rank() == 1:
                dist.recv(x, 0)
                dist.send(x, 0)
            taken.append((time.perf_counter() - start) / 2)
        return of_first(statistics.median(taken))

    small, large = seconds(1), seconds(SENT // 4)
    return sf.Link(small, SENT / (large - small))


def of_first(x: float) -> float:
    """Rank 0's number, on all ranks."""
    number = torch.tensor(x, dtype=torch.float64)
    dist.broadcast(number, 0)
    return float(number)


def common_start() -> float:
    """Wait for a moment that all ranks agree on, and return it."""
    moment = torch.tensor(time.perf_counter(), dtype=torch.float64)
    dist.all_reduce(moment, dist.ReduceOp.MAX)
    start = float(moment) + AGREED
    while time.perf_counter() < start:
        pass
    return start


def mean_of(x: float) -> float:
    """The mean of a number over the ranks."""
    total = torch.tensor(x, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def idle_of_actions(step: Step, schedule: sf.Schedule, rounds: int) -> float:
    """The idle share of a schedule whose actions take the processor time that they take here, and
    whose messages take none: the share of a machine on which nothing else runs.
    """
    seconds: dict[tuple[str, int], list[float]] = collections.defaultdict(list)
    with timed_actions(seconds):
        for _ in range(rounds):
            step(False)
    own = {action: statistics.median(times) for action, times in seconds.items()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    costs = {action: cost for one in every for action, cost in one.items()}
    # the first stage has no B of its own if B and W are parted
    rows = spans_of(schedule.table, lambda x: costs.get((x.kind, x.stage), 0.0))
    spans = [span for row in rows for span in row]
    busy = sum(span.end - span.start for span in spans)
    return 1 - busy / (len(rows) * max(span.end for span in spans))


@contextlib.contextmanager
def timed_actions(seconds: dict[tuple[str, int], list[float]]) -> Iterator[None]:
    """Collect the processor time of each run of an action, by its kind and stage."""
    run = CompiledLoop.run_graph

    def timed(loop: CompiledLoop, which: int, inputs: Any) -> Any:
        start = time.thread_time()
        outs = run(loop, which, inputs)
        took = time.thread_time() - start
        action = next(x for x in loop.loop.actions() if x.graph == which)  # type: ignore[attr-defined]
        seconds[action.kind, action.stage].append(took)
        return outs

    CompiledLoop.run_graph = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        CompiledLoop.run_graph = run  # type: ignore[method-assign]


@contextlib.contextmanager
def timed_waits() -> Iterator[list[tuple[float, float]]]:
    """A list that gets the start and the end of each wait of this rank for a message, and last the
    moment after its last message, with the processor time of that moment.
    """
    waits: list[tuple[float, float]] = []
    call, finish = Exchange.__call__, Exchange.finish

    def timed_call(exchange: Exchange, what: Any, values: Any) -> Any:
        start = time.perf_counter()
        outs = call(exchange, what, values)
        if not isinstance(what, Send):
            waits.append((start, time.perf_counter()))
        return outs

    def timed_finish(exchange: Exchange) -> None:
        start = time.perf_counter()
        finish(exchange)
        waits.append((start, time.perf_counter()))
        waits.append((time.perf_counter(), time.thread_time()))

    Exchange.__call__, Exchange.finish = timed_call, timed_finish  # type: ignore[method-assign]
    try:
        yield waits
    finally:
        Exchange.__call__, Exchange.finish = call, finish  # type: ignore[method-assign]


def staging(rounds: int) -> None:
    """Print what capture and lowering of the step in stages take, beside those of the step without
    a pipeline, in processor time: medians of rounds in which each has its turn.
    """
    fn, parameters, _ = sf.functionalize(whole())
    args = dict(parameters), *(torch.zeros((BATCH, LENGTH), dtype=torch.int64) for _ in range(2))
    same = dict.fromkeys(parameters, sf.P())
    rows = same, sf.P("pp"), sf.P("pp")
    stages = stages_of(parameters, STAGES, 1), None, None
    kinds: dict[str, tuple[Callable[[Any], Any], Any]] = {
        "value_and_grad": (sf.value_and_grad, rows),
        "accumulate": (lambda loss: sf.accumulate(sf.value_and_grad(loss), MICROBATCHES), rows),
        "pipelined_grad": (lambda loss: sf.pipelined_grad(loss, MICROBATCHES), stages),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for number in range(1 + rounds):
        for name, (derivative, places) in kinds.items():
            with sf.fake_world(STAGES, numerics=False):
                mesh = sf.make_mesh((STAGES,), ("pp",), device_type="cpu")
                step = sf.shard(derivative(loss_by(fn)), mesh, places, backend="aten")
                times = [time.process_time()]
                traced = step.trace(*args)
                times.append(time.process_time())
                traced.lower()
                times.append(time.process_time())
            if number:  # the first round warms up
                taken[name].append((times[1] - times[0], times[2] - times[1]))
    print(
        f"Capture and lowering of the GPT on {STAGES} stages, numerics=False; processor time, "
        f"medians of {rounds} rounds"
    )
    print("| step | capture s | lowering s | both, of value_and_grad | of accumulate |")
    print("|---|---|---|---|---|")
    medians = {
        name: [statistics.median(part) for part in zip(*times, strict=True)]
        for name, times in taken.items()
    }
    for name, (capture, lowering) in medians.items():
        both = capture + lowering
        one, many = (both / sum(medians[other]) for other in ("value_and_grad", "accumulate"))
        print(f"| {name} | {capture:.2f} | {lowering:.2f} | {one:.2f} | {many:.2f} |")
    ratio = sum(medians["pipelined_grad"]) / sum(medians["value_and_grad"])
    print(
        f"{ratio:.2f} of value_and_grad: {'met' if ratio <= STAGED else 'missed'}, {STAGED} asked"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Time the steps on 2 and 4 ranks, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.pipeline")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--staging", action="store_true", help="capture and lowering alone")
    args = parser.parse_args(argv)
    if args.staging:
        staging(args.rounds)
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(
        f"A GPT of {LAYERS} layers, width {WIDTH}, {BATCH} x {LENGTH} tokens, {MICROBATCHES} "
        f"microbatches; medians, steps in turn, one thread each, {os.cpu_count()} cores; MiB that "
        "a warm step adds to the resident memory of the rank where it adds the most"
    )
    print(
        "| ranks | schedule | shardfn ms | torch ms | ratio | idle | of actions | predicted "
        "| shardfn MiB | torch MiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for size in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(on_rank, (size, folder, args.rounds, args.only), size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
