"""Lines on stderr about an audit that takes long."""

from __future__ import annotations

import sys
import time

DELAY = 2.0  # seconds without a line


class Progress:
    """The time of an audit.

    Args:
        name: of the audit.
        where: the ranks.
    """

    def __init__(self, name: str, where: str) -> None:
        self.name, self.where, self.start = name, where, time.monotonic()
        self.last = self.start

    def line(self, what: str) -> None:
        """Print what comes next, if the last line is a while ago."""
        now = time.monotonic()
        if now - self.last >= DELAY:
            self.last = now
            text = f"shardfn: {self.name}: {self.where}: {what}, {now - self.start:.0f} s"
            print(text, file=sys.stderr, flush=True)
