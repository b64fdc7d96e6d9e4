"""What `bench.gpu.check` runs: the demo's train step in three worlds, compared with the CPU in
float64, then timed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch._inductor.codecache import PyCodeCache

import shardfn as sf
from shardfn import P
from shardfn_demo import adamw, gpt, train

Step = Callable[..., tuple[Any, Any, Any]]

STEPS, WARM, ROUNDS, QUICK_ROUNDS = 3, 5, 40, 5
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
class Job:
    """A model and a batch of tokens to train it on again and again."""

    config: gpt.Config
    batch: int

    def start(
        self, device: str, dtype: torch.dtype
    ) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
        """Parameters, optimizer state, tokens and the tokens that follow: the same on every
        device, but for rounding.
        """
        params = gpt.init(self.config, dtype=dtype)
        state = sf.tree_map(
            lambda x: x.double() if dtype is torch.float64 else x,
            adamw.init(params),
        )
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randint(
            self.config.vocab,
            (2, self.batch, self.config.context),
            generator=generator,
        )
        return sf.tree_map(lambda t: t.to(device), (params, state, x, y))


CHECKED = Job(config=gpt.Config(), batch=8)
LARGER = Job(
    config=gpt.Config(context=256, width=512, heads=8, layers=6), batch=16
)
QUICK = Job(
    config=gpt.Config(vocab=16, context=8, width=16, heads=4, layers=1), batch=4
)


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


@attrs.frozen(kw_only=True)
class Race:
    """Median milliseconds of a train step."""

    size: str
    dtype: str
    shardfn: float
    plain: float

    @property
    def ratio(self) -> float:
        return self.shardfn / self.plain


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
    say("reference: cpu, float64, eager")
    reference = trained(plain_step(job.config), job.start("cpu", torch.float64))
    dtypes = list(LIMITS)[:2] if device == "cpu" else list(LIMITS)
    checks = [
        checked(world, job, device, dtype, reference)
        for world in WORLDS
        for dtype in dtypes
    ]
    sizes = (
        {"quick": QUICK}
        if quick
        else {"demo": CHECKED}
        if device == "cpu"
        else {"demo": CHECKED, "larger": LARGER}
    )
    races = [
        raced(name, timed, device, QUICK_ROUNDS if quick else ROUNDS)
        for name, timed in sizes.items()
    ]
    print(json.dumps(figures(device, checks, races, time.perf_counter() - start)))
    print(table(device, checks, races))
    return int(any(c.fault for c in checks) or None in races)


def say(text: str) -> None:
    """Where the run is, so that one that hangs can be understood."""
    print(f"... {text}", flush=True)


def plain_step(config: gpt.Config) -> Step:
    """The train step in plain PyTorch, without shardfn's transforms."""
    grads_and_loss = torch.func.grad_and_value(
        functools.partial(gpt.loss_fn, heads=config.heads)
    )

    def step(
        params: Any, state: Any, x: torch.Tensor, y: torch.Tensor
    ) -> tuple[Any, Any, torch.Tensor]:
        grads, loss = grads_and_loss(params, x, y)
        params, state = adamw.update(params, grads, state, lr=train.LR)
        return params, state, loss

    return step


def trained(
    step: Step, args: tuple[Any, Any, Any, Any]
) -> tuple[list[float], Any]:
    """The losses of STEPS steps and the parameters after them."""
    params, state, x, y = args
    losses = []
    for _ in range(STEPS):
        params, state, loss = step(params, state, x, y)
        losses.append(float(sf.full(loss)))
    return losses, sf.full(params)


@contextlib.contextmanager
def one_rank(config: gpt.Config, device: str) -> Iterator[Any]:
    """The step compiled with Inductor, in a real world of one rank."""
    try:
        mesh = sf.make_mesh((1,), ("dp",), device_type=device)
        yield sf.shard(
            train.step(config),
            mesh,
            (P(), P(), P("dp"), P("dp")),
            backend="inductor",
        )
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextlib.contextmanager
def eight_ranks(config: gpt.Config, device: str) -> Iterator[Any]:
    """The step run op by op, on 8 simulated ranks that share the device: data parallel 2 x
    tensor parallel 4.
    """
    where = gpt.placements(gpt.init(config))
    where_state = {"step": P(), "m": where, "v": where}
    with sf.fake_world(8):
        mesh = sf.make_mesh((2, 4), ("dp", "tp"), device_type=device)
        ins, outs = (
            (where, where_state, P("dp"), P("dp")),
            (where, where_state, P()),
        )
        yield sf.shard(train.step(config), mesh, ins, outs, backend="aten")


WORLDS = {"1 rank, inductor": one_rank, "8 simulated ranks, aten": eight_ranks}


def checked(
    world: str,
    job: Job,
    device: str,
    dtype: torch.dtype,
    reference: tuple[list[float], Any],
) -> Check:
    """Train in one world and compare; a failure is a result, since the others are still worth
    having.
    """
    name = str(dtype).removeprefix("torch.")
    say(f"{world}, {device}, {name}")
    start, nan = time.perf_counter(), float("nan")
    attention, kernels, loss, params, fault = "?", None, nan, nan, ""
    try:
        before, args = len(PyCodeCache.modules), job.start(device, dtype)
        with WORLDS[world](job.config, device) as step:
            losses, got = trained(step, args)
            attention = attention_of(step, args)
        kernels = written(before, device) if "inductor" in world else None
        loss = max(
            abs(a - b) / abs(b) for a, b in zip(losses, reference[0], strict=True)
        )
        params = max(
            distance(a, b)
            for a, b in zip(leaves(got), leaves(reference[1]), strict=True)
        )
        fault = found(dtype, loss, params, kernels)
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


def found(
    dtype: torch.dtype, loss: float, params: float, kernels: int | None
) -> str:
    """What does not hold, if anything."""
    most_loss, most_params = LIMITS[dtype]
    faults = (
        []
        if loss <= most_loss
        else [f"loss off by {loss:.1e}, at most {most_loss:.0e}"]
    )
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
    return float(
        (got.cpu().double() - wanted).norm() / wanted.norm().clamp(min=1e-30)
    )


def attention_of(step: Any, args: tuple[Any, ...]) -> str:
    """Which attention kernels the captured program calls."""
    targets = {
        str(node.target) for node in step.trace(*args).program.graph.graph.nodes
    }
    names = [
        t.split(".")[1]
        for t in targets
        if "attention" in t and "backward" not in t
    ]
    return (
        ", ".join(sorted(n.removeprefix("_scaled_dot_product_") for n in names))
        or "math"
    )


def written(before: int, device: str) -> int:
    """The kernels in the modules that Inductor has loaded since."""
    files = [module.__file__ for module in PyCodeCache.modules[before:]]
    return sum(open(file).read().count(KERNEL[device]) for file in files if file)


def raced(size: str, job: Job, device: str, rounds: int) -> Race | None:
    """Time the compiled step of shardfn and of torch.compile in turn, each fed with its own
    results.
    """
    say(f"timing {size}, {device}, float32")
    try:
        with one_rank(job.config, device) as step:
            plain = torch.compile(
                plain_step(job.config), fullgraph=True, dynamic=False
            )
            times = in_turn(
                {"shardfn": step, "plain": plain},
                job.start(device, torch.float32),
                device,
                rounds,
            )
    except Exception:
        traceback.print_exc()
        return None
    return Race(
        size=size,
        dtype="float32",
        **{name: statistics.median(found) for name, found in times.items()},
    )


def in_turn(
    steps: dict[str, Step], args: tuple[Any, ...], device: str, rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of each step in each round, after warm-up; all must tell the same last loss."""
    x, y = args[2:]
    at = dict.fromkeys(steps, args[:2])
    times: dict[str, list[float]] = {name: [] for name in steps}
    last = {}
    for turn in range(WARM + rounds):
        for name, step in steps.items():
            (*at[name], last[name]), took = clocked(
                functools.partial(step, *at[name], x, y), device
            )
            if turn >= WARM:
                times[name].append(took)
    told = [float(sf.full(loss)) for loss in last.values()]
    if max(told) - min(told) > 1e-2 * abs(told[0]):
        raise ArithmeticError(
            f"the steps that were timed end at different losses: {told}"
        )
    return times


def clocked(run: Callable[[], Any], device: str) -> tuple[Any, float]:
    """What a call returns, and its milliseconds: on the GPU between two events, from its start
    to its last kernel.
    """
    if device == "cpu":
        start = time.perf_counter()
        return run(), (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    out = run()
    end.record()
    torch.cuda.synchronize()
    return out, begin.elapsed_time(end)


def figures(
    device: str, checks: list[Check], races: list[Race | None], seconds: float
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
        "checks": [attrs.asdict(c, value_serializer=sayable) for c in checks],
        "milliseconds": [attrs.asdict(r) | {"ratio": r.ratio} for r in races if r],
    }


def sayable(record: Any, field: Any, value: Any) -> Any:
    """JSON has no NaN."""
    return None if isinstance(value, float) and math.isnan(value) else value


def table(device: str, checks: list[Check], races: list[Race | None]) -> str:
    """What was found, for people."""
    kind = {"cuda": "Triton", "cpu": "C++"}[device]
    lines = [
        (
            f"{'world':<25}{'dtype':<10}{'attention':<23}{kind:>7}"
            f"{'loss off':>10}{'params off':>12}{'s':>7} "
            " verdict"
        )
    ]
    for c in checks:
        kernels = "" if c.kernels is None else c.kernels
        numbers = f"{kernels:>7}{c.loss:>10.1e}{c.params:>12.1e}{c.seconds:>7.1f}"
        lines.append(
            f"{c.world:<25}{c.dtype:<10}{c.attention:<23}{numbers}  {c.fault or 'holds'}"
        )
    lines.append(
        f"{'train step, ms':<25}{'dtype':<10}{'':<23}{'shardfn':>17}{'torch.compile':>14}  ratio"
    )
    for r in races:
        lines.append(
            f"{r.size:<25}{r.dtype:<33}{r.shardfn:>17.2f}{r.plain:>14.2f}  {r.ratio:.2f}"
            if r
            else "not timed: it failed, see above"
        )
    return "\n".join(lines)
