"""The texts of a page, each stored once: rows refer to them by number."""

from __future__ import annotations

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
