"""A link slower than the machine: Gloo behind a model of one serial link, and what an ideal
schedule would do on it.
"""

from __future__ import annotations

import datetime
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

NAME = "slow_gloo"


@attrs.define
class Link:
    """One serial link: what is put on it waits for what was put there before.

    Args:
        latency: seconds that each collective takes on top of its bytes.
        bandwidth: bytes a second.
        free: when it has carried everything so far, by `time.perf_counter`.

    Example:
        >>> link = Link(latency=1.0, bandwidth=10.0)
        >>> (link.book(20, now=5.0), link.book(20, now=6.0))  # the second waits for the first
        (8.0, 11.0)
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    free: float = 0.0

    def book(self, nbytes: float, now: float) -> float:
        """When a collective of that many bytes, started now, is through."""
        self.free = max(self.free, now) + self.seconds(nbytes)
        return self.free

    def seconds(self, nbytes: float) -> float:
        """How long the link is taken by one collective."""
        return self.latency + nbytes / self.bandwidth


class SlowWork(dist.Work):
    """Work of Gloo's that is done no earlier than the link says. Waiting sleeps, and takes no
    processor time.
    """

    def __init__(self, works: Sequence[Any], outputs: list[Tensor], due: float) -> None:
        super().__init__()
        self.works, self.outputs, self.due = works, outputs, due

    def is_completed(self) -> bool:
        return time.perf_counter() >= self.due and all(work.is_completed() for work in self.works)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        for work in self.works:
            work.wait()
        time.sleep(max(0.0, self.due - time.perf_counter()))
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """What DDP waits for."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()

        def finish() -> None:
            self.wait()
            future.set_result(self.outputs)

        threading.Thread(target=finish, daemon=True).start()
        return future


class SlowGloo(dist.ProcessGroup):
    """Gloo, with reductions and gathers of tensors put on a link; the rest, which sets things
    up, is not delayed.

    A ring of n ranks carries 2 (n - 1) / n of a tensor that is reduced over each link, and half
    of that when it is gathered or reduce-scattered. The methods have the names that torch
    calls. They call Gloo's own: a base class's method would keep Python's lock, which Gloo's
    threads need to let go of tensors (torch 2.13).
    """

    def __init__(self, gloo: dist.ProcessGroupGloo, link: Link) -> None:
        super().__init__(gloo.rank(), gloo.size())
        self.gloo, self.link, self.share = (gloo, link, (gloo.size() - 1) / gloo.size())
        self._register_backend(
            torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo
        )  # what has no method here

    def getBackendName(self) -> str:
        return NAME

    def allreduce(self, tensors: list[Tensor], opts: Any) -> SlowWork:
        return self.slowed([self.gloo.allreduce(tensors, opts)], tensors, 2 * nbytes(tensors))

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> SlowWork:
        works = [
            self.gloo._allgather_base(out, x, opts) for out, x in zip(outputs, inputs, strict=True)
        ]
        return self.slowed(works, outputs, nbytes(outputs))

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> SlowWork:
        works = [
            self.gloo._reduce_scatter_base(out, x, opts)
            for out, x in zip(outputs, inputs, strict=True)
        ]
        return self.slowed(works, outputs, nbytes(inputs))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        return self.gloo.allgather(outputs, inputs, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        return self.gloo.broadcast(tensors, opts)

    def barrier(self, opts: Any) -> Any:
        return self.gloo.barrier(opts)

    def slowed(self, works: Sequence[Any], outputs: list[Tensor], whole: int) -> SlowWork:
        """Put what has been started on the link, as one collective."""
        return SlowWork(works, outputs, self.link.book(whole * self.share, time.perf_counter()))


def nbytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of some tensors."""
    return sum(x.nbytes for x in tensors)


def register() -> Link:
    """Make `slow_gloo` a backend of torch.distributed.

    Returns:
        The link that every group of that backend in this process sends over; free and fast
        until it is told otherwise.
    """
    link = Link()

    def group(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> SlowGloo:
        return SlowGloo(dist.ProcessGroupGloo(store, rank, size, timeout), link)

    dist.Backend.register_backend(NAME, group, devices=["cpu"])
    return link


def ideal_end(sent: Sequence[int], ready: Sequence[float], link: Link) -> float:
    """When the last bucket is through, if each is put on an idle link as soon as it can be.

    Args:
        sent: bytes of each bucket, in order.
        ready: when its last gradient is there.
        link: how fast it is.

    Returns:
        The time, on the clock of `ready`.

    Example:
        >>> ideal_end([4, 4], [10.0, 11.0], Link(bandwidth=1.0))
        18.0
    """
    free = Link(link.latency, link.bandwidth)
    return max(free.book(n, now) for n, now in zip(sent, ready, strict=True))


def hidden_share(total: float, exposed: float, ideal: float) -> float:
    """How much of the communication that could be hidden behind computation was hidden.

    Args:
        total: what all collectives take on the link.
        exposed: by how much the step is longer than without communication.
        ideal: by how much it would be with the ideal schedule.

    Example:
        >>> hidden_share(total=10.0, exposed=4.0, ideal=2.0)
        0.75
    """
    return (total - exposed) / (total - ideal)
