"""What `bench.gpu.check` runs: small programs and the demo's train step in three worlds, compared
with the CPU in float64, then timed.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
import time
import traceback
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch._inductor.codecache import PyCodeCache

import shardfn as sf
from shardfn import P
from shardfn_demo import gpt, train

from .jobs import CHECKED, LARGER, QUICK, Job, Step, plain_step
from .programs import Found, found, references
from .races import QUICK_ROUNDS, ROUNDS, Race, one_rank, raced, sharded_step

STEPS = 3
KERNEL = {
    "cuda": "async_compile.triton(",
    "cpu": "async_compile.cpp_pybinding(",
}  # how generated code names a kernel

# The largest relative difference from the CPU in float64: of the loss, and of a parameter (in
# norm) after STEPS steps.
# Adam divides a gradient by its own size, so rounding in a gradient near zero is not small in
# the parameter: in bfloat16
# it may turn its sign, and nothing is asked of parameters there.
LIMITS = {
    torch.float64: (1e-9, 1e-9),
    torch.float32: (1e-4, 2e-3),
    torch.bfloat16: (2e-2, math.inf),
}


@attrs.frozen(kw_only=True)
class Check:
    """How far one world was from the reference; NaN where it did not get so far."""

    world: str
    dtype: str
    attention: str
    kernels: int | None  # None: nothing was to be compiled
    loss: float
    params: float
    seconds: float
    fault: str


def check(device: str, *, quick: bool) -> int:
    """Run everything, print figures as one line of JSON and as a table.

    Args:
        device: cuda or cpu.
        quick: the smallest model, few rounds.

    Returns:
        0 if every law holds, else 1.
    """
    torch.set_float32_matmul_precision("highest")  # no TF32
    if device == "cpu":
        torch.set_num_threads(1)
    job, start = QUICK if quick else CHECKED, time.perf_counter()
    small = programs(device)
    say("reference: cpu, float64, eager")
    reference = trained(plain_step(job.config), job.start("cpu", torch.float64))
    dtypes = list(LIMITS)[:2] if device == "cpu" else list(LIMITS)
    checks = [
        checked(world, job, device, dtype, reference)
        for world in WORLDS
        for dtype in dtypes
        if (world, dtype) != (GRAPH, torch.float64)  # small programs have it
    ]
    sizes = RACES["quick"] if quick else RACES[device]
    rounds = QUICK_ROUNDS if quick else ROUNDS
    races = [raced(name, job, device, dtype, rounds) for name, (job, dtype) in sizes]
    seconds = time.perf_counter() - start
    rows = [race for size in races if size for race in size]
    print(json.dumps(figures(device, small, checks, rows, seconds)))
    print(table(device, small, checks, rows))
    faults = [x.fault for x in (*small, *checks) if x.fault]
    return int(bool(faults) or None in races)


def programs(device: str) -> list[Found]:
    """The small programs, compared."""
    say("small programs: cpu, float64, 2 simulated ranks")
    wanted = references()
    with one_rank(device) as mesh:
        rows = []
        for name, value in wanted.items():
            say(f"{name}, {device}, float64")
            rows.append(found(name, mesh, value))
    return rows


def say(text: str) -> None:
    """Where the run is, so that one that hangs can be understood."""
    print(f"... {text}", flush=True)


def trained(step: Step, args: tuple[Any, Any, Any, Any]) -> tuple[list[float], Any]:
    """The losses of STEPS steps and the parameters after them."""
    params, state, x, y = args
    losses = []
    for _ in range(STEPS):
        params, state, loss = step(params, state, x, y)
        losses.append(float(sf.full(loss)))
    return losses, sf.full(params)


@contextlib.contextmanager
def compiled(config: gpt.Config, device: str, **options: Any) -> Iterator[Any]:
    """The step compiled with Inductor, in a real world of one rank."""
    with one_rank(device) as mesh:
        yield sharded_step(config, mesh, **options)


@contextlib.contextmanager
def eight_ranks(config: gpt.Config, device: str) -> Iterator[Any]:
    """The step run op by op, on 8 simulated ranks that share the device: data parallel 2 x
    tensor parallel 4.
    """
    where = gpt.placements(gpt.init(config))
    where_state = {"step": P(), "m": where, "v": where}
    with sf.fake_world(8):
        mesh = sf.make_mesh((2, 4), ("dp", "tp"), device_type=device)
        ins, outs = ((where, where_state, P("dp"), P("dp")), (where, where_state, P()))
        yield sf.shard(train.step(config), mesh, ins, outs, backend="aten")


def recorded(config: gpt.Config, device: str) -> Any:
    """The compiled step in the memory of its arguments, on a GPU as a CUDA graph."""
    graphs = device == "cuda"
    return compiled(config, device, donate_argnums=(0, 1), cuda_graphs=graphs)


GRAPH = "1 rank, CUDA graph"
WORLDS = {"1 rank, inductor": compiled, GRAPH: recorded, "8 simulated ranks, aten": eight_ranks}
RACES = {
    "cuda": (
        ("demo", (CHECKED, torch.float32)),
        ("larger", (LARGER, torch.float32)),
        ("larger", (LARGER, torch.bfloat16)),
    ),
    "cpu": (("demo", (CHECKED, torch.float32)),),
    "quick": (("quick", (QUICK, torch.float32)),),
}


def checked(
    world: str, job: Job, device: str, dtype: torch.dtype, reference: tuple[list[float], Any]
) -> Check:
    """Train in one world and compare; a failure is a result, since the others are still worth
    having.
    """
    name = str(dtype).removeprefix("torch.")
    say(f"{world}, {device}, {name}")
    start, nan = time.perf_counter(), float("nan")
    attention, kernels, loss, params, fault = "?", None, nan, nan, ""
    try:
        before = len(PyCodeCache.modules)
        with WORLDS[world](job.config, device) as step:
            losses, got = trained(step, job.start(device, dtype))
            attention = attention_of(step, job.start(device, dtype))
        kernels = None if "simulated" in world else written(before, device)
        loss = max(abs(a - b) / abs(b) for a, b in zip(losses, reference[0], strict=True))
        params = max(distance(a, b) for a, b in zip(leaves(got), leaves(reference[1]), strict=True))
        fault = faults_of(dtype, loss, params, kernels)
    except Exception as error:
        traceback.print_exc()
        fault = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    seconds = time.perf_counter() - start
    return Check(
        world=world,
        dtype=name,
        attention=attention,
        kernels=kernels,
        loss=loss,
        params=params,
        seconds=seconds,
        fault=fault,
    )


def faults_of(dtype: torch.dtype, loss: float, params: float, kernels: int | None) -> str:
    """What does not hold, if anything."""
    most_loss, most_params = LIMITS[dtype]
    faults = [] if loss <= most_loss else [f"loss off by {loss:.1e}, at most {most_loss:.0e}"]
    faults += (
        []
        if params <= most_params
        else [f"parameters off by {params:.1e}, at most {most_params:.0e}"]
    )
    faults += ["no kernel was generated"] if kernels == 0 else []
    return "; ".join(faults)


def leaves(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree."""
    out: list[torch.Tensor] = []
    sf.tree_map(out.append, tree)
    return out


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference, relative to the norm."""
    return float((got.cpu().double() - wanted).norm() / wanted.norm().clamp(min=1e-30))


def attention_of(step: Any, args: tuple[Any, ...]) -> str:
    """Which attention kernels the captured program calls."""
    targets = {str(node.target) for node in step.trace(*args).program.graph.graph.nodes}
    names = [t.split(".")[1] for t in targets if "attention" in t and "backward" not in t]
    return ", ".join(sorted(n.removeprefix("_scaled_dot_product_") for n in names)) or "math"


def written(before: int, device: str) -> int:
    """The kernels in the modules that Inductor has loaded since."""
    files = [module.__file__ for module in PyCodeCache.modules[before:]]
    return sum(open(file).read().count(KERNEL[device]) for file in files if file)


def figures(
    device: str, small: list[Found], checks: list[Check], races: list[Race], seconds: float
) -> dict[str, Any]:
    """Everything that was found, for a machine to read."""
    return {
        "device": torch.cuda.get_device_name()
        if device == "cuda"
        else platform.processor() or "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "seconds": round(seconds, 1),
        "programs": [attrs.asdict(x, value_serializer=sayable) for x in small],
        "checks": [attrs.asdict(c, value_serializer=sayable) for c in checks],
        "milliseconds": [attrs.asdict(r) | {"ratio": r.ratio} for r in races],
    }


def sayable(record: Any, field: Any, value: Any) -> Any:
    """JSON has no NaN."""
    return None if isinstance(value, float) and math.isnan(value) else value


def table(device: str, small: list[Found], checks: list[Check], races: list[Race]) -> str:
    """What was found, for people."""
    kind = {"cuda": "Triton", "cpu": "C++"}[device]
    lines = [f"{'program, float64':<35}{'off':>9}{'s':>7}  verdict"]
    lines += [f"{x.program:<35}{x.off:>9.1e}{x.seconds:>7.1f}  {x.fault or 'holds'}" for x in small]
    lines.append(
        f"{'world':<25}{'dtype':<10}{'attention':<23}{kind:>7}"
        f"{'loss off':>10}{'params off':>12}{'s':>7}  verdict"
    )
    for c in checks:
        kernels = "" if c.kernels is None else c.kernels
        numbers = f"{kernels:>7}{c.loss:>10.1e}{c.params:>12.1e}{c.seconds:>7.1f}"
        lines.append(f"{c.world:<25}{c.dtype:<10}{c.attention:<23}{numbers}  {c.fault or 'holds'}")
    lines.append(
        f"{'train step, ms':<25}{'dtype':<10}{'results in':<23}"
        f"{'shardfn':>17}{'torch.compile':>14}  ratio"
    )
    lines += [
        f"{r.size:<25}{r.dtype:<10}{r.form:<23}{r.shardfn:>17.2f}{r.plain:>14.2f}  {r.ratio:.3f}"
        for r in races
    ]
    return "\n".join(lines)
