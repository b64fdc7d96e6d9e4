"""The texts of a page, each stored once: rows refer to them by number."""

from __future__ import annotations

import linecache
import re

LINE = re.compile(r"(.+):(\d+)")  # a file and a number
LONGEST = 160  # characters of a line that are shown
OF_CPUS = "_for_cpu"  # of a kernel that the hardware of a report has under a shorter name


class Strings:
    """A list of different texts. A row of the page holds the number of a text, not the text."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {"": 0}

    def number(self, text: str | None) -> int:
        """Return the number of a text; 0 for none."""
        shown = (text or "").replace(OF_CPUS, "")
        return self._numbers.setdefault(shown, len(self._numbers))

    def texts(self) -> list[str]:
        """Return all texts, in the order of their numbers."""
        return [*self._numbers]

    def lines(self) -> dict[int, str]:
        """Return what stands in the lines of files that the texts name, by the number of the text.
        A file that cannot be read has none.
        """
        found = {}
        for text, number in self._numbers.items():
            if named := LINE.fullmatch(text):
                line = linecache.getline(named[1], int(named[2])).strip()
                if line:
                    found[number] = line[:LONGEST]
        return found
