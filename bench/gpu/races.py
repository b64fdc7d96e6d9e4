"""How long a train step takes, next to `torch.compile` of the same step in plain PyTorch.

Each contender trains its own copy of the model, one step in turn. With results in new memory, in
the memory of the step before (donated, or written in place), and with the kernels recorded as a
CUDA graph: by `cuda_graphs=True`, and by hand around `torch.compile`.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
import torch.distributed as dist

import shardfn as sf
from shardfn import P
from shardfn_demo import gpt, train

from .jobs import Job, plain_step

WARM, ROUNDS, QUICK_ROUNDS = 5, 40, 5
Advance = Callable[[], torch.Tensor]  # trains one step, and returns its loss
NEW, SAME, GRAPH = "new memory", "same memory", "CUDA graph"


@attrs.frozen(kw_only=True)
class Race:
    """Median milliseconds of a train step, by shardfn and by torch.compile."""

    size: str
    dtype: str
    form: str
    shardfn: float
    plain: float

    @property
    def ratio(self) -> float:
        return self.shardfn / self.plain


@contextlib.contextmanager
def one_rank(device: str) -> Iterator[Any]:
    """A mesh of a real world of one rank."""
    try:
        yield sf.make_mesh((1,), ("dp",), device_type=device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def sharded_step(config: gpt.Config, mesh: Any, **options: Any) -> Any:
    """The step, compiled with Inductor for one rank."""
    ins = (P(), P(), P("dp"), P("dp"))
    return sf.shard(train.step(config), mesh, ins, backend="inductor", **options)


def raced(size: str, job: Job, device: str, dtype: torch.dtype, rounds: int) -> list[Race] | None:
    """Time the contenders in turn. None if one fails."""
    name = str(dtype).removeprefix("torch.")
    print(f"... timing {size}, {device}, {name}", flush=True)
    try:
        with one_rank(device) as mesh:
            contenders = {
                (who, form): make(job, mesh, device, dtype)
                for (who, form), make in CONTENDERS.items()
                if form != GRAPH or device == "cuda"
            }
            times = in_turn(contenders, device, rounds)
    except Exception:
        traceback.print_exc()
        return None
    middle = {key: statistics.median(row) for key, row in times.items()}
    forms = dict.fromkeys(form for _, form in middle)
    return [
        Race(
            size=size,
            dtype=name,
            form=form,
            shardfn=middle["shardfn", form],
            plain=middle["plain", form],
        )
        for form in forms
    ]


def _chained(step: Any, args: tuple[Any, ...]) -> Advance:
    """A step that is fed with its own results."""
    at, batch = list(args[:2]), args[2:]

    def advance() -> torch.Tensor:
        *at[:], loss = step(*at, *batch)
        return loss

    return advance


def _sharded(**options: Any) -> Callable[..., Advance]:
    def make(job: Job, mesh: Any, device: str, dtype: torch.dtype) -> Advance:
        step = sharded_step(job.config, mesh, **options)
        return _chained(step, job.start(device, dtype))

    return make


def _plain(job: Job, _: Any, device: str, dtype: torch.dtype) -> Advance:
    step = torch.compile(plain_step(job.config), fullgraph=True, dynamic=False)
    return _chained(step, job.start(device, dtype))


def _in_place(job: Job, _: Any, device: str, dtype: torch.dtype) -> Advance:
    plain, args = plain_step(job.config), job.start(device, dtype)

    def step(params: Any, state: Any, x: Any, y: Any) -> torch.Tensor:
        *new, loss = plain(params, state, x, y)
        sf.tree_map(lambda old, value: old.copy_(value), (params, state), tuple(new))
        return loss

    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    return functools.partial(compiled, *args)


def _recorded(job: Job, _: Any, device: str, dtype: torch.dtype) -> Advance:
    advance = _in_place(job, _, device, dtype)
    advance()  # compiles it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # does not run it
        loss = advance()

    def replay(_: Advance) -> torch.Tensor:
        graph.replay()
        return loss.clone()

    return functools.partial(replay, advance)  # keeps its arguments alive


BY_HAND = "plain", GRAPH
CONTENDERS: dict[tuple[str, str], Callable[..., Advance]] = {
    ("shardfn", NEW): _sharded(),
    ("plain", NEW): _plain,
    ("shardfn", SAME): _sharded(donate_argnums=(0, 1)),
    ("plain", SAME): _in_place,
    ("shardfn", GRAPH): _sharded(donate_argnums=(0, 1), cuda_graphs=True),
    BY_HAND: _recorded,
}


def in_turn(contenders: dict[Any, Advance], device: str, rounds: int) -> dict[Any, list[float]]:
    """Milliseconds of each contender in each round, after warm-up of equal losses.

    Raises:
        ArithmeticError: the losses differ.
    """
    told: dict[Any, float] = {}
    for _ in range(WARM):
        told = {key: float(sf.full(run())) for key, run in contenders.items()}
    # the step that was recorded by hand has been trained once more, to compile it
    told.pop(BY_HAND, None)
    low, high = min(told.values()), max(told.values())
    if high - low > 2e-2 * abs(low):
        raise ArithmeticError(f"the steps to be timed have different losses: {told}")
    times: dict[Any, list[float]] = {key: [] for key in contenders}
    for _ in range(rounds):
        for key, advance in contenders.items():
            times[key].append(clocked(advance, device))
    return times


def clocked(run: Callable[[], Any], device: str) -> float:
    """Milliseconds of a call, until the GPU has run its last kernel."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    run()
    wait()
    return (time.perf_counter() - start) * 1e3
