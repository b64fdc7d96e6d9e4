"""What the stages cost on the demo's training step: capture, partition, simulation, and a world
of a million ranks. And what the capture of one line costs under each transform; `--lines` prints
that alone.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import shardfn as sf
from shardfn import P
from shardfn.runtime import cache
from shardfn_demo import adamw, gpt, train

ROUNDS = 5


def seconds(fn: Callable[[], Any]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def step_and_args() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The demo's step, and arguments for it."""
    config = gpt.Config()
    params = gpt.init(config)
    x, y = torch.randint(
        0,
        config.vocab,
        (2, train.BATCH, config.context),
        generator=torch.Generator().manual_seed(0),
    )
    return train.step(config), (params, adamw.init(params), x, y)


def sharded(step: Callable[..., Any], mesh: Any, args: tuple[Any, ...], batch: Any) -> Any:
    """The step, placed as Megatron does."""
    placed = gpt.placements(args[0])
    return sf.shard(
        step, mesh, (placed, {"step": P(), "m": placed, "v": placed}, batch, batch), backend="aten"
    )


def staging(
    n: int, shape: tuple[int, ...], names: tuple[str, ...], batch: Any, *, numerics: bool
) -> dict[str, float]:
    """Seconds for the mesh, for capture, and for partition with the passes, in a world of n;
    and how many calls were captured.
    """
    step, args = step_and_args()
    with sf.fake_world(n, numerics=numerics):
        made: list[Any] = []
        mesh_seconds = seconds(lambda: made.append(sf.make_mesh(shape, names)))
        cache.clear()
        fn = sharded(step, made[0], args, batch)
        traced: list[Any] = []
        capture = seconds(lambda: traced.append(fn.trace(*args)))
        partition = seconds(traced[0].lower)
    nodes = sum(node.op == "call_function" for node in traced[0].program.graph.graph.nodes)
    return {
        "mesh": mesh_seconds,
        "capture": capture,
        "partition": partition,
        "both": capture + partition,
        "nodes": nodes,
    }


def simulation() -> tuple[float, float]:
    """Seconds of one eager step on one device, and of one step of 8 simulated ranks,
    interleaved.
    """
    step, args = step_and_args()
    plain = train.step(gpt.Config(), value_and_grad=train.plain_value_and_grad)
    alone, eight = [], []
    with sf.fake_world(8):
        mesh = sf.make_mesh((2, 4), ("dp", "tp"))
        fn = sharded(step, mesh, args, P("dp"))
        ours, theirs = fn(*args), plain(*args)
        torch.testing.assert_close(sf.full(ours[2]), theirs[2], rtol=1e-5, atol=0)
        before = dict(cache.counts)
        for _ in range(3 * ROUNDS):
            alone.append(seconds(lambda: plain(*args)))
            eight.append(seconds(lambda: fn(*args)))
        assert dict(cache.counts) == before, "a second call captures and compiles nothing"
    return statistics.median(alone), statistics.median(eight)


def again(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same function as a new one, which has no capture yet."""

    def called(*args: Any) -> Any:
        return fn(*args)

    return called


def one_line() -> dict[str, Callable[[], Any]]:
    """A capture of one line under each transform. The line is a new function each time."""
    x = torch.ones(3)

    def stepped(c: torch.Tensor, y: torch.Tensor) -> Any:
        return sf.scan(lambda c, y: (c + y, c * y), c, y)

    def pushed(x: torch.Tensor) -> Any:
        return sf.jvp(lambda x: x * x, (x,), (x,))

    squares = lambda x: (x * x).sum()
    return {
        "jit": lambda: sf.jit(again(squares), backend="aten").trace(x),
        "grad": lambda: sf.grad(again(squares)).trace(x),
        "value_and_grad": lambda: sf.value_and_grad(again(squares)).trace(x),
        "bucketed_grad": lambda: sf.bucketed_grad(again(squares)).trace(x),
        "vmap": lambda: sf.vmap(again(squares)).trace(torch.ones(2, 3)),
        "jvp": lambda: sf.jit(again(pushed), backend="aten").trace(x),
        "hessian": lambda: sf.hessian(again(squares)).trace(x),
        "scan": lambda: sf.jit(again(stepped), backend="aten").trace(x, torch.ones(4, 3)),
    }


def print_lines() -> None:
    """The processor time of each of those captures, and of the demo's, in turn: least and median.
    Other work on the machine adds little to the least.
    """
    step, args = step_and_args()
    demo = lambda: sf.jit(again(step), backend="aten").trace(*args)
    cases = {**one_line(), "the demo's step": demo}
    times: dict[str, list[float]] = {name: [] for name in cases}
    for k in range(3 * ROUNDS):
        for name, capture in cases.items():
            if name in one_line() or k < 3:
                start = time.process_time()
                capture()
                times[name].append(time.process_time() - start)
    for name, found in times.items():
        rest = found[1:]  # the first imports what torch needs
        print(
            f"capture, {name:<20} {min(rest) * 1e3:7.1f} ms  "
            f"median {statistics.median(rest) * 1e3:7.1f}"
        )


def median(rows: list[dict[str, float]], key: str) -> float:
    """The median of one column."""
    return statistics.median(row[key] for row in rows)


def main() -> None:
    """Print the figures."""
    torch.set_num_threads(1)
    print_lines()
    if "--lines" in sys.argv:
        return
    staging(
        8, (2, 4), ("dp", "tp"), P("dp"), numerics=True
    )  # imports, and torch's own first-time work
    demo, small, large = [], [], []
    for _ in range(ROUNDS):
        demo.append(staging(8, (2, 4), ("dp", "tp"), P("dp"), numerics=True))
        small.append(staging(8, (2, 2, 2), ("pp", "dp", "tp"), P(("pp", "dp")), numerics=False))
        large.append(
            staging(2**20, (64, 128, 128), ("pp", "dp", "tp"), P(("pp", "dp")), numerics=False)
        )
    for label, rows in (
        ("dp 2 x tp 4, simulated", demo),
        ("8 ranks, 3-D, no values", small),
        ("2**20 ranks, 3-D, no values", large),
    ):
        print(
            f"{label:<30}"
            + "  ".join(
                f"{key} {median(rows, key):5.2f} s"
                for key in ("mesh", "capture", "partition", "both")
            )
        )
    nodes = median(demo, "nodes")
    print(
        f"partition, a node of {nodes:<4.0f}      "
        f"{median(demo, 'partition') / nodes * 1e3:.2f} ms  (limit 0.5)"
    )
    print(
        "2**20 ranks / 8 ranks          "
        f"{median(large, 'both') / median(small, 'both'):.2f}  (limit 2)"
    )
    alone, eight = simulation()
    print(f"one device, eager              {alone * 1e3:.0f} ms a step")
    print(
        f"8 simulated ranks              {eight * 1e3:.0f} ms a step, "
        f"{eight / (8 * alone):.2f} x 8 x one device  (limit 1.5)"
    )


if __name__ == "__main__":
    main()
