"""`measure_hardware`: FLOPs, memory bandwidth, start of a kernel and link of the machine that runs
this process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..accepted import accept
from ..collectives import COLLECTIVES
from ..hardware import Efficiency, Hardware, Link
from ..world import current_world

SIDE = 1024  # of the matrices that are multiplied
HEADS, LENGTH, WIDTH = 8, 512, 64  # of the attention
COPIED = 2**26  # bytes that are copied
SENT = 2**22  # bytes that are reduced
STARTS = 100  # kernels that are started
REPEATS = 7


def measure_hardware(link: Link | None = None) -> Hardware:
    """Measure the speed of torch's default device, and of the link to the other ranks.

    Programs reach the measured rates, so the returned `Hardware` has the efficiency 1 for
    everything except attention. The efficiency of attention is the rate of attention divided by the
    rate of matrix products, both in float32.

    Under torchrun, every rank must call `measure_hardware`. On every rank, `measure_hardware`
    returns the rates of the slowest rank.

    Args:
        link: the speed of the link among the ranks. By default, `measure_hardware` measures the
            link if there are other ranks. Without other processes, as in a fake world, the
            `Hardware` has a link on which sending takes no time.

    Returns:
        The measured `Hardware`, for `Lowered.time`.

    Raises:
        ShardError: link is not an `sf.Link`.

    Source: the roofline model (Williams et al. 2009) and the alpha-beta model.

    Example:
        >>> import shardfn as sf
        >>> here = sf.measure_hardware(link=sf.Link(latency=1e-5, bandwidth=1e9))
        >>> here.link
        1000000000.0
    """
    accept("measure_hardware", link=link)
    device = torch.get_default_device()
    flops16, flops32 = (_flops(torch.bfloat16, device), _flops(torch.float32, device))
    attention = min(1.0, _attention_flops(device) / flops32)
    memory, launch = _memory(device), _launch(device)
    link = link or _link(device)
    measured = [flops16, flops32, memory, attention, -launch, -link.latency, link.bandwidth]
    figures = torch.tensor(measured, dtype=torch.float64)
    if _is_distributed():
        slowest = figures.to(device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MIN)
        figures = slowest.cpu()
    flops16, flops32, memory, attention, launch, latency, bandwidth = figures.tolist()
    return Hardware(
        f"this machine's {device.type}",
        flops16,
        flops32,
        memory,
        bandwidth,
        -latency,
        launch=-launch,
        efficiency=Efficiency(attention=attention),
    )


def _flops(dtype: torch.dtype, device: torch.device) -> float:
    """Measure floating-point operations a second, in matrix products of a dtype."""
    a = torch.ones(SIDE, SIDE, dtype=dtype, device=device)
    return 2 * SIDE**3 / _median_seconds(lambda: a @ a, device)


def _attention_flops(device: torch.device) -> float:
    """Measure floating-point operations a second, in fused attention of float32."""
    x = torch.ones(1, HEADS, LENGTH, WIDTH, device=device)
    flops = 4 * HEADS * LENGTH**2 * WIDTH
    return flops / _median_seconds(lambda: F.scaled_dot_product_attention(x, x, x), device)


def _launch(device: torch.device) -> float:
    """Measure the seconds that the start of a kernel takes, of one that follows others."""
    x = torch.ones(1, device=device)

    def start_many() -> None:
        for _ in range(STARTS):
            torch.neg(x, out=x)

    return _median_seconds(start_many, device) / STARTS


def _memory(device: torch.device) -> float:
    """Measure the bytes a second that a device reads and writes."""
    a = torch.ones(COPIED // 4, dtype=torch.float32, device=device)
    out = torch.empty_like(a)
    return 2 * COPIED / _median_seconds(lambda: torch.neg(a, out=out), device)


def _link(device: torch.device) -> Link:
    """Measure the link among all ranks by an all-reduce, which sends each byte in several rounds.
    At least half of the time of a large one is counted as sending.
    """
    if not _is_distributed():
        return Link(latency=0.0, bandwidth=float("inf"))
    one = torch.zeros(1, device=device)
    many = torch.zeros(SENT // 4, device=device)
    n = dist.get_world_size()
    rounds = COLLECTIVES["all_reduce"].rounds * (n - 1) / n
    latency = _median_seconds(lambda: dist.all_reduce(one), device)
    took = _median_seconds(lambda: dist.all_reduce(many), device)
    return Link(latency, rounds * SENT / max(took - latency, took / 2))


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
