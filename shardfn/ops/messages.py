"""Messages of a pipeline between real ranks: sent as soon as they are made, received ahead.

Every receive is posted before it is needed, in the order in which its sender sends, so no send
waits for a rank that waits for it, whatever the backend buffers.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist

from .. import _compat
from ..source_text import Origin, located
from ..types import Aval

# A value of one coordinate: a kind, and numbers that tell values of this kind apart.
#   ("in", i)          the i-th input, the same for every microbatch
#   ("row", i, k)      microbatch k of the i-th stacked input
#   ("value", s, k)    of microbatch k; s is a slot of the plan
#   ("sum", j)         of the gradients so far
Ref = tuple[Any, ...]
AHEAD = 2  # receives that are posted before they are needed, from each coordinate


@attrs.frozen
class Message:
    """A tensor that one coordinate sends to another.

    Args:
        source: the coordinate that sends it.
        target: the coordinate that receives it.
        number: of the message among all of the pipeline, equal on both.
        value: on the coordinate, where it is sent from or received as.
        aval: of the local tensor, which is dense.
        about: the op that makes it.
        source_line: of the user's program, where that is.
        action: which makes it, of a stage and a microbatch; None for a parameter, or a sum.
    """

    source: int
    target: int
    number: int
    value: Ref
    aval: Aval
    about: str
    source_line: str | None = None
    action: str | None = None
    module: str | None = None  # the path of the submodule of that line

    @property
    def origin(self) -> Origin:
        """The line and the module that it comes from."""
        return {"source": self.source_line, "module": self.module}


@attrs.frozen
class Send:
    """An instruction to send a value."""

    message: Message
    axis: str
    group: str


@attrs.frozen
class Receive:
    """An instruction to receive a value."""

    message: Message
    axis: str
    group: str


def shown(message: Message) -> str:
    """Describe a message in an error."""
    route = f"from coordinate {message.source} to {message.target}"
    of = "" if message.action is None else f" of {message.action}"
    place = located(**message.origin)
    line = f", at {place}" if place else ""
    return f"{message.about}{of}, {message.aval.shape} {message.aval.dtype} {route}{line}"


class Exchange:
    """The messages of one run of a pipeline on one rank.

    Args:
        receives: what the rank's coordinate receives.
    """

    def __init__(self, receives: Sequence[Receive]) -> None:
        self.sending: list[tuple[Any, torch.Tensor]] = []
        self.received: dict[int, tuple[Any, torch.Tensor]] = {}
        self.coming: dict[int, collections.deque[Receive]] = {}
        for x in sorted(receives, key=lambda x: x.message.number):
            self.coming.setdefault(x.message.source, collections.deque()).append(x)
        for row in self.coming.values():
            self.post(row, AHEAD)

    def post(self, row: collections.deque[Receive], count: int) -> None:
        """Post the next receives from a coordinate."""
        for _ in range(min(count, len(row))):
            what = row.popleft()
            self.received[what.message.number] = _receive(what)

    def __call__(self, what: Send | Receive, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Start a send, or wait for a message."""
        if isinstance(what, Send):
            x = _dense(values[0], what.message.aval)
            self.sending = [pair for pair in self.sending if not pair[0].is_completed()]
            if x.numel():
                self.sending.append((_send(what, x), x))
            return []
        number = what.message.number
        row = self.coming[what.message.source]
        while number not in self.received and row:
            self.post(row, 1)
        work, x = self.received.pop(number)
        self.post(row, 1)
        if work is not None:
            work.wait()
        return [x]

    def finish(self) -> None:
        """Wait for the sends that are still on their way."""
        for work, _ in self.sending:
            work.wait()
        self.sending.clear()


def empty(aval: Aval) -> torch.Tensor:
    """Make a tensor of these metadata, without values."""
    return torch.empty_strided(aval.shape, aval.stride, dtype=aval.dtype, device=aval.device)


def _dense(x: torch.Tensor, aval: Aval) -> torch.Tensor:
    """A tensor in the memory layout that its receiver has."""
    return x if tuple(x.stride()) == aval.stride else empty(aval).copy_(x)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor, as it is sent."""
    return x.as_strided((x.numel(),), (1,))


def _send(what: Send, x: torch.Tensor) -> Any:
    message = what.message
    channel, places = _channel(what.group, message.source, message.target)
    target = places[message.target]
    return dist.isend(_flat(x), group=channel, group_dst=target, tag=message.number)


def _receive(what: Receive) -> tuple[Any, torch.Tensor]:
    message = what.message
    x = empty(message.aval)
    if not x.numel():
        return None, x
    channel, places = _channel(what.group, message.source, message.target)
    source = places[message.source]
    return dist.irecv(_flat(x), group=channel, group_src=source, tag=message.number), x


def _channel(name: str, source: int, target: int) -> tuple[Any, dict[int, int]]:
    """The process group that carries messages in one direction, and the ranks of both ends in it.
    Gloo tells messages apart by their tags; other backends have a group for each direction.
    """
    group = _compat.named_group(name)
    if dist.get_backend(group) == dist.Backend.GLOO:
        return group, {source: source, target: target}
    return _pair(group, source, target), {source: 0, target: 1}


@functools.cache
def _pair(group: Any, source: int, target: int) -> Any:
    ranks = [dist.get_global_rank(group, at) for at in (source, target)]
    backend = dist.get_backend(group)
    return dist.new_group(ranks, backend=backend, use_local_synchronization=True, sort_ranks=False)
