"""`measure_hardware`: FLOPs, memory bandwidth and link of the machine that runs this process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..collectives import COLLECTIVES
from ..hardware import Hardware, Link
from ..world import current_world

SIDE = 1024  # of the matrices that are multiplied
COPIED = 2**26  # bytes that are copied
SENT = 2**22  # bytes that are reduced
REPEATS = 7


def measure_hardware(link: Link | None = None) -> Hardware:
    """Measure torch's default device, and the link to the other ranks.

    Under torchrun every rank must call it. The figures are those of the slowest rank, so that
    all ranks have the same.

    Args:
        link: the link among the ranks. None measures it, if there are other ranks; where there
            are none, as in a fake world, sending takes no time.

    Returns:
        The figures, for `Lowered.time`.

    Source: the roofline model (Williams et al. 2009) and the alpha-beta model.

    Example:
        >>> import shardfn as sf
        >>> here = sf.measure_hardware(link=sf.Link(latency=1e-5, bandwidth=1e9))
        >>> here.link
        1000000000.0
    """
    device = torch.get_default_device()
    flops16, flops32 = (_flops(torch.bfloat16, device), _flops(torch.float32, device))
    memory = _memory(device)
    link = link or _link(device)
    figures = torch.tensor(
        [flops16, flops32, memory, -link.latency, link.bandwidth], dtype=torch.float64
    )
    if _is_distributed():
        slowest = figures.to(device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MIN)
        figures = slowest.cpu()
    flops16, flops32, memory, latency, bandwidth = figures.tolist()
    name = f"this machine's {device.type}"
    return Hardware(name, flops16, flops32, memory, bandwidth, -latency)


def _flops(dtype: torch.dtype, device: torch.device) -> float:
    """Measure floating-point operations a second, in matrix products of a dtype."""
    a = torch.ones(SIDE, SIDE, dtype=dtype, device=device)
    return 2 * SIDE**3 / _median_seconds(lambda: a @ a, device)


def _memory(device: torch.device) -> float:
    """Measure the bytes a second that a device reads and writes."""
    a = torch.ones(COPIED // 4, dtype=torch.float32, device=device)
    out = torch.empty_like(a)
    return 2 * COPIED / _median_seconds(lambda: torch.neg(a, out=out), device)


def _link(device: torch.device) -> Link:
    """Measure the link among all ranks by an all-reduce, which sends each byte in
    several rounds.
    """
    if not _is_distributed():
        return Link(latency=0.0, bandwidth=float("inf"))
    one = torch.zeros(1, device=device)
    many = torch.zeros(SENT // 4, device=device)
    n = dist.get_world_size()
    rounds = COLLECTIVES["all_reduce"].rounds * (n - 1) / n
    latency = _median_seconds(lambda: dist.all_reduce(one), device)
    took = _median_seconds(lambda: dist.all_reduce(many), device)
    return Link(latency, rounds * SENT / max(took - latency, 1e-9))


def _is_distributed() -> bool:
    """Return whether other real processes belong to the world."""
    world = current_world()
    return world.kind == "real" and world.size > 1


def _median_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a call, after one that warms up."""
    seconds = []
    for _ in range(1 + REPEATS):
        _synchronize(device)
        start = time.perf_counter()
        call()
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _synchronize(device: torch.device) -> None:
    """Wait until an accelerator has run everything; a CPU needs no wait."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
