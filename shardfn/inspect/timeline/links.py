"""`Links`: the collectives of one rank that are under way. Two over axes that use one physical link
share its bandwidth.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping

import attrs


@attrs.define(eq=False)
class Sending:
    """A collective that was started.

    Args:
        left: seconds that it still takes on a link that nothing else uses.
        done: called with its start and its end.
        start: when the link took it up.
        end: when it ended.
    """

    left: float
    done: Callable[[float, float], None]
    start: float | None = None
    end: float | None = None


class Links:
    """The collectives of one rank that are under way.

    Those over one axis follow each other. Those over axes that use one physical link share its
    bandwidth: of k at once, each takes k times as long. Their latency counts as if it were bytes.

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
            self._advance(link, self._next_end(link))
        return sending.end

    def is_idle(self, now: float) -> bool:
        """Return whether nothing is under way."""
        for link in self.now:
            self._advance(link, now)
        return not any(self.queues.values())

    def _busy(self, link: str) -> list[collections.deque[Sending]]:
        """Return the queues of a link in which something is under way."""
        return [q for axis, q in self.queues.items() if q and self.physical[axis] == link]

    def _next_end(self, link: str) -> float:
        """Return when the next collective on a link ends."""
        busy = self._busy(link)
        return self.now[link] + len(busy) * min(queue[0].left for queue in busy)

    def _advance(self, link: str, until: float) -> None:
        """Run what is under way on a link up to a time."""
        while busy := self._busy(link):
            now, first = self.now[link], min(queue[0].left for queue in busy)
            for queue in busy:
                if queue[0].start is None:
                    queue[0].start = now
            end = now + len(busy) * first
            if end > until:
                for queue in busy:
                    queue[0].left -= max(0.0, until - now) / len(busy)
                self.now[link] = max(now, until)
                return
            self.now[link] = end
            for queue in busy:
                queue[0].left -= first
                if queue[0].left <= 0.0:
                    ended = queue.popleft()
                    ended.end = end
                    assert ended.start is not None
                    ended.done(ended.start, end)
        self.now[link] = max(self.now[link], until)
