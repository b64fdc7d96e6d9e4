"""`Links`: the collectives of one rank that are under way. Two over axes that use one physical link
share its bandwidth.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping

import attrs


@attrs.define(eq=False)
class Sending:
    """A collective that was started.

    Args:
        latency: seconds until its first bytes are sent.
        left: seconds that its bytes still take on a link that nothing else uses.
        start: when the link took it up.
        end: when it ended.
    """

    latency: float
    left: float
    start: float | None = None
    end: float | None = None

    def next_end(self, n: int) -> float:
        """Return the seconds until its latency is over, or its bytes are sent beside n - 1
        others.
        """
        return self.latency or n * self.left

    def advance(self, seconds: float, n: int) -> None:
        """Run it for some time, beside n - 1 others."""
        if self.latency:
            self.latency -= seconds
        elif seconds == n * self.left:
            self.left = 0.0
        else:
            self.left -= seconds / n


class Links:
    """The collectives of one rank that are under way.

    Those over one axis follow each other. Those over axes that use one physical link share its
    bandwidth: the bytes of k at once take k times as long.

    Args:
        physical: the physical link of each axis.
    """

    def __init__(self, physical: Mapping[str, str]) -> None:
        self.physical = physical
        self.now = dict.fromkeys(physical.values(), 0.0)
        self.queues: dict[str, collections.deque[Sending]] = {
            axis: collections.deque() for axis in physical
        }

    def start(self, axis: str, sending: Sending, now: float) -> None:
        """Start a collective."""
        self._advance(self.physical[axis], now)
        self.queues[axis].append(sending)

    def finish(self, axis: str, sending: Sending, now: float) -> float:
        """Return the time at which a collective has ended, if nothing starts before."""
        link = self.physical[axis]
        self._advance(link, now)
        while sending.end is None:
            self._advance(link, None)
        return sending.end

    def is_idle(self, now: float) -> bool:
        """Return whether nothing is under way."""
        return not any(self._advance(link, now) for link in self.now)

    def _heads(self, link: str) -> list[Sending]:
        """Return the collectives that use a link now: the first of each axis."""
        heads = []
        for axis, queue in self.queues.items():
            if self.physical[axis] == link:
                while queue and queue[0].end is not None:
                    queue.popleft()
                heads += [queue[0]] if queue else []
        return heads

    def _advance(self, link: str, until: float | None) -> bool:
        """Run what is under way on a link up to a time, or without one up to the next end of a
        latency or of a collective. Return whether something is still under way.
        """
        while heads := self._heads(link):
            now, n = self.now[link], sum(not x.latency for x in heads)
            for x in heads:
                x.start = now if x.start is None else x.start
            seconds = min(x.next_end(n) for x in heads)
            end = now + seconds
            is_cut = until is not None and end > until
            if until is not None and is_cut:
                seconds, end = max(0.0, until - now), max(now, until)
            for x in heads:
                x.advance(seconds, n)
                if not x.latency and not x.left and not is_cut:
                    x.end = end
            self.now[link] = end
            if until is None or is_cut:
                return True
        self.now[link] = max(self.now[link], until or 0.0)
        return False
