"""`Hardware` and `Link`: the speeds of devices and links, for predictions of step times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch

from .accepted import accept
from .collectives import COLLECTIVES
from .errors import ShardError
from .types import Cost, MeshAxes

NODE, NETWORK = "node", "network"  # what joins the devices of a node, and nodes


@attrs.frozen
class Efficiency:
    """The fractions of a device's peak rates that programs reach, from 0 to 1.

    Args:
        product8: the fraction of `Hardware.flops8` that matrix products of 8-bit floats reach.
        product16: the fraction of `Hardware.flops` that matrix products in 16 bits reach.
        product32: the fraction of `Hardware.flops32` that matrix products in dtypes wider than 16
            bits reach.
        attention: the fraction of the peak rate (`flops8`, `flops` or `flops32`) that fused
            attention reaches.
        memory: the fraction of `Hardware.memory` that programs reach.
        link: the fraction of `Hardware.link` that collectives inside a node reach.
        network: the fraction of `Hardware.network` that collectives between nodes reach.

    Raises:
        ShardError: a fraction is not a number greater than 0 and at most 1.

    Source: docs/time-model.md, which cites the source of each fraction of a peak rate that shardfn
        uses for a named GPU, such as H100.

    Example:
        >>> import attrs, shardfn as sf
        >>> half = sf.Efficiency(product16=0.5)
        >>> card = sf.Hardware(
        ...     "a card",
        ...     flops=2e12,
        ...     flops32=1e12,
        ...     memory=1e12,
        ...     link=1e11,
        ...     latency=1e-5,
        ...     efficiency=half,
        ... )
        >>> card.compute(1e12, 0.0, torch.bfloat16)
        1.0
    """

    product8: float = 1.0
    product16: float = 1.0
    product32: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    link: float = 1.0
    network: float = 1.0

    def __attrs_post_init__(self) -> None:
        accept("Efficiency", **attrs.asdict(self))


@attrs.frozen
class Link:
    """The speed of the network links among the ranks of one mesh axis. Sharding propagation uses
    `sf.Link` to compute the cost of collectives.

    Args:
        latency: seconds that a collective takes in addition to the time for its bytes.
        bandwidth: bytes per second that one rank can send.

    Raises:
        PlacementError: raised by `make_mesh(links=)` if the latency is negative, or the bandwidth
            is not positive.

    Source: the alpha-beta model.

    Example:
        >>> import shardfn as sf
        >>> sf.Link(latency=10e-6, bandwidth=450e9)
        Link(latency=1e-05, bandwidth=450000000000.0)
    """

    latency: float
    bandwidth: float

    def send(self, kind: str, nbytes: float, n: int) -> float:
        """Return the seconds that a ring collective of `nbytes` bytes over n ranks takes."""
        accept("Link.send", kind=kind, nbytes=nbytes, n=n)
        row = COLLECTIVES.get(kind)
        if row is None:
            got, needed = f"kind is {kind!r}", f"one of {', '.join(COLLECTIVES)}"
            raise ShardError.of("Link.send, kind", got, needed=needed, fix="'all_reduce'")
        share = 1.0 if row.is_message else row.rounds * (n - 1) / n
        return self.latency + share * nbytes / self.bandwidth


def costs_of_links(links: Sequence[Link]) -> tuple[Cost, ...]:
    """Convert the links of mesh axes to costs: bytes over the fastest of them."""
    fastest = max((link.bandwidth for link in links), default=1.0)
    return tuple(
        Cost(start=max(1.0, link.latency * fastest), byte=fastest / link.bandwidth)
        for link in links
    )


@attrs.frozen
class Hardware:
    """The speed of one kind of node: its devices, their memory and their links.

    Args:
        name: a name for printing.
        flops: floating-point operations per second, in 16-bit matrix products.
        flops32: floating-point operations per second, in matrix products of dtypes wider than 16
            bits.
        memory: bytes per second between the device and its memory.
        link: bytes per second that one rank can send to another rank of its node.
        latency: seconds that a collective takes in addition to the time for its bytes.
        node: the number of devices of one node. By default, `link` connects all devices, as if they
            were on one node.
        network: bytes per second that one rank can send to another node.
        network_latency: seconds that a collective between nodes takes in addition to the time for
            its bytes.
        capacity: the size of a device's memory, in bytes, or None if the size is not known.
        flops8: operations per second, in matrix products of 8-bit floats. By default, `flops8`
            equals `flops`.
        launch: seconds that the device needs to start one kernel.
        efficiency: the fractions of the peak rates that programs reach; by default, 1 for every
            rate.
        power: the fraction of its arithmetic rate, from 0 to 1, that the device reaches under its
            power limit. `power` does not reduce the rates of memory and links.
        float8: whether the prediction assumes that 16-bit matrix products run in 8 bits, with
            dynamic scales. With `float8`, the prediction includes the casts to 8 bits: each operand
            is read twice, and written once in 8 bits.

    Raises:
        ShardError: a rate, size or latency is not a number, or is out of range.

    Source: the roofline model (Williams et al. 2009) and the alpha-beta model.

    Example:
        >>> round(1e3 * H100.send("all_reduce", 2**30, 8), 2)
        5.89
    """

    name: str
    flops: float
    flops32: float
    memory: float
    link: float
    latency: float
    node: int | None = None
    network: float = 0.0
    network_latency: float = 0.0
    capacity: float | None = None
    flops8: float | None = None
    launch: float = 0.0
    efficiency: Efficiency = Efficiency()
    power: float = 1.0
    float8: bool = False

    def __attrs_post_init__(self) -> None:
        is_figure = lambda field, _: field.name not in ("name", "efficiency")
        accept("Hardware", efficiency=self.efficiency, **attrs.asdict(self, filter=is_figure))

    def peak(self, dtype: torch.dtype) -> float:
        """Return the peak rate of matrix products of a dtype, in operations per second."""
        accept("Hardware.peak", dtype=dtype)
        if dtype.itemsize == 1:
            return self.flops8 or self.flops
        return self.flops if dtype.itemsize == 2 else self.flops32

    def compute(
        self, flops: float, nbytes: float, dtype: torch.dtype, is_attention: bool = False
    ) -> float:
        """Return the seconds that an op takes: the larger of the times of its arithmetic and of its
        memory traffic.
        """
        accept(
            "Hardware.compute", flops=flops, nbytes=nbytes, dtype=dtype, is_attention=is_attention
        )
        share = self.efficiency
        shares = {1: share.product8, 2: share.product16}
        reached = share.attention if is_attention else shares.get(dtype.itemsize, share.product32)
        arithmetic = flops / (self.power * reached * self.peak(dtype))
        return self.launch + max(arithmetic, nbytes / (share.memory * self.memory))

    def send(self, kind: str, nbytes: float, n: int) -> float:
        """Return the seconds that a collective over n ranks of one node takes."""
        return self._inside().send(kind, nbytes, n)

    def _inside(self) -> Link:
        """Return the link of a node."""
        return Link(self.latency, self.efficiency.link * self.link)

    def links(self, axes: MeshAxes) -> dict[str, Link]:
        """Return one `Link` for each axis of a mesh whose ranks fill the nodes in row-major order.
        Ranks on the same node send to other nodes in parallel.
        """
        links = {}
        physical = physical_links(self, axes)
        inside, network = self._inside(), self.efficiency.network * self.network
        near = 1  # ranks from one to the next on this axis
        for name, size in reversed([*zip(axes.names, axes.sizes, strict=True)]):
            if physical[name] == NODE:
                links[name] = inside
            else:
                together = max(1, (self.node or 1) // near)
                bandwidth = min(inside.bandwidth, together * network)
                links[name] = Link(self.network_latency, bandwidth)
            near *= size
        return links


def physical_links(hardware: Hardware, axes: MeshAxes) -> dict[str, str]:
    """Return what each axis of a mesh sends over, NODE or NETWORK, if its ranks fill nodes in
    row-major order: axes with one answer share the bandwidth of that link.
    """
    physical = {}
    size = 1  # ranks of this axis and of those inside of it
    for name, n in reversed([*zip(axes.names, axes.sizes, strict=True)]):
        size *= n
        is_inside = hardware.node is None or size <= hardware.node
        physical[name] = NODE if is_inside else NETWORK
    return physical


def hardware_of(hardware: Hardware | str, where: str = "Lowered.time") -> Hardware:
    """Return hardware that is given as such, or by its name in HARDWARE, in
    large or small letters.

    Raises:
        ShardError: HARDWARE has no such name.
    """
    if isinstance(hardware, Hardware):
        return hardware
    if isinstance(hardware, str) and hardware.upper() in HARDWARE:
        return HARDWARE[hardware.upper()]
    raise ShardError.of(
        where,
        f"hardware is {hardware!r}",
        needed=f"the name of a known device ({', '.join(HARDWARE)}), or an sf.Hardware",
        fix="sf.Hardware(name, flops, ...) with the figures of the device, or "
        "sf.measure_hardware() for this machine",
    )


def links_of(links: Mapping[str, Link] | None, axes: Sequence[str]) -> Mapping[str, Link]:
    """Check the links of some mesh axes, and return them.

    Raises:
        ShardError: the mesh has no such axis, or a value is not a link.
    """
    for axis, link in (links or {}).items():
        if axis not in axes or not isinstance(link, Link):
            raise ShardError.of(
                "Lowered.time",
                f"links[{axis!r}] is {link!r}",
                needed=f"an sf.Link for one of the axes {', '.join(axes)}",
                fix="sf.Link(latency=10e-6, bandwidth=50e9)",
            )
    return links or {}


# The shares that an H100 of 700 W reaches. All are published, see docs/time-model.md.
PUBLISHED = Efficiency(
    product8=0.65,
    product16=0.73,
    product32=0.73,
    attention=0.35,
    memory=0.7,
    link=0.71,
    network=0.71,
)
# NVIDIA's datasheets of the SXM modules: dense BF16, TF32 and FP8, memory, NVLink in one direction;
# of the DGX systems: 8 modules, one network card for each. The latencies are round figures.
A100 = Hardware(
    "A100 SXM, NVLink",
    flops=312e12,
    flops32=156e12,
    memory=2.04e12,
    link=300e9,
    latency=10e-6,
    node=8,
    network=25e9,
    network_latency=20e-6,
    capacity=80e9,
    efficiency=PUBLISHED,
)
H100 = Hardware(
    "H100 SXM, NVLink",
    flops=989e12,
    flops32=494e12,
    memory=3.35e12,
    link=450e9,
    latency=10e-6,
    node=8,
    network=50e9,
    network_latency=20e-6,
    capacity=80e9,
    flops8=1979e12,
    efficiency=PUBLISHED,
)
# Bytes a second that a rank of an H100 sends. The planner counts time in such bytes.
SENT = H100.efficiency.link * H100.link
# The card of torchtitan's benchmarks: 96 GB of HBM2e, one network card of 400 Gb/s each. Its power
# limit is 500 W in place of 700 W. `power` is fitted, see docs/time-model.md.
H100_96GB = attrs.evolve(
    H100, name="H100 96 GB HBM2e, 500 W", memory=2.4e12, capacity=96e9, power=0.755
)
H200 = attrs.evolve(H100, name="H200 SXM, NVLink", memory=4.8e12, capacity=141e9)
B200 = Hardware(
    "B200 SXM, NVLink",
    flops=2.25e15,
    flops32=1.1e15,
    memory=8e12,
    link=900e9,
    latency=10e-6,
    node=8,
    network=50e9,
    network_latency=20e-6,
    capacity=180e9,
    flops8=4.5e15,
    efficiency=PUBLISHED,
)
# The datasheet of GB200 NVL72: 72 modules of one NVLink domain.
GB200 = attrs.evolve(
    B200, name="GB200 NVL72", flops=2.5e15, flops32=1.25e15, flops8=5e15, node=72, capacity=186e9
)
HARDWARE = {
    "A100": A100,
    "H100": H100,
    "H100-96GB": H100_96GB,
    "H200": H200,
    "B200": B200,
    "GB200": GB200,
}
