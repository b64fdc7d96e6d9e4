"""Figures of a device and its links, from which costs in milliseconds are computed."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from .collectives import COLLECTIVES
from .types import Cost

MATMUL = 16  # bits of the dtypes that run at the full rate


@attrs.frozen
class Link:
    """The link among the ranks of one mesh axis. Sharding propagation weighs collectives by its
    figures.

    Args:
        latency: seconds that a collective takes beside its bytes.
        bandwidth: bytes a second that one rank can send.

    Source: the alpha-beta model; `make_mesh(links=)` takes one for each axis.

    Example:
        >>> import shardfn as sf
        >>> sf.Link(latency=10e-6, bandwidth=450e9)
        Link(latency=1e-05, bandwidth=450000000000.0)
    """

    latency: float
    bandwidth: float


def costs(links: Sequence[Link]) -> tuple[Cost, ...]:
    """The costs of the axes, in bytes over the fastest of them."""
    fastest = max((link.bandwidth for link in links), default=1.0)
    return tuple(
        Cost(start=max(1.0, link.latency * fastest), byte=fastest / link.bandwidth)
        for link in links
    )


@attrs.frozen
class Hardware:
    """A device and its links.

    Args:
        name: for people.
        flops: floating-point operations a second, in 16-bit matrix products.
        flops32: the same for wider types.
        memory: bytes a second between the device and its memory.
        link: bytes a second that one rank can send.
        latency: seconds that a collective takes beside its bytes.

    Example:
        >>> round(1e3 * H100.send("all_reduce", 2**30, 8), 2)
        4.19
    """

    name: str
    flops: float
    flops32: float
    memory: float
    link: float
    latency: float

    def compute(self, flops: float, nbytes: float, dtype: torch.dtype) -> float:
        """Seconds of an op: what takes longer, its arithmetic or its memory traffic."""
        rate = self.flops if dtype.itemsize * 8 <= MATMUL else self.flops32
        return max(flops / rate, nbytes / self.memory)

    def send(self, kind: str, nbytes: float, n: int) -> float:
        """Seconds of a collective over n ranks, as a ring: `nbytes` is the full payload."""
        rounds = COLLECTIVES[kind].rounds
        return self.latency + rounds * (n - 1) / n * nbytes / self.link


# NVIDIA's H100 SXM datasheet: dense BF16 and TF32, HBM3, NVLink in one direction; the latency
# is a round figure.
H100 = Hardware(
    "H100 SXM, NVLink",
    flops=989e12,
    flops32=494e12,
    memory=3.35e12,
    link=450e9,
    latency=10e-6,
)
