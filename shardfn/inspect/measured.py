"""The figures of the machine that runs this process, measured."""

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
    found = link or _link(device)
    figures = torch.tensor(
        [flops16, flops32, memory, -found.latency, found.bandwidth], dtype=torch.float64
    )
    if _others():
        slowest = figures.to(device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MIN)
        figures = slowest.cpu()
    flops16, flops32, memory, latency, bandwidth = figures.tolist()
    name = f"this machine's {device.type}"
    return Hardware(name, flops16, flops32, memory, bandwidth, -latency)


def _flops(dtype: torch.dtype, device: torch.device) -> float:
    """Floating-point operations a second in matrix products."""
    a = torch.ones(SIDE, SIDE, dtype=dtype, device=device)
    return 2 * SIDE**3 / _seconds(lambda: a @ a, device)


def _memory(device: torch.device) -> float:
    """Bytes a second, read and written."""
    a = torch.ones(COPIED // 4, dtype=torch.float32, device=device)
    out = torch.empty_like(a)
    return 2 * COPIED / _seconds(lambda: torch.neg(a, out=out), device)


def _link(device: torch.device) -> Link:
    """The link among all ranks. An all-reduce sends each byte in several rounds."""
    if not _others():
        return Link(latency=0.0, bandwidth=float("inf"))
    one = torch.zeros(1, device=device)
    many = torch.zeros(SENT // 4, device=device)
    n = dist.get_world_size()
    rounds = COLLECTIVES["all_reduce"].rounds * (n - 1) / n
    latency = _seconds(lambda: dist.all_reduce(one), device)
    took = _seconds(lambda: dist.all_reduce(many), device)
    return Link(latency, rounds * SENT / max(took - latency, 1e-9))


def _others() -> bool:
    world = current_world()
    return world.kind == "real" and world.size > 1


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """The median time of a call, after one that warms up."""
    found = []
    for _ in range(1 + REPEATS):
        _synchronize(device)
        start = time.perf_counter()
        call()
        _synchronize(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
