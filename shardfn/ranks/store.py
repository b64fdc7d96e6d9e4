"""The key-value store through which ranks find each other."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from .. import _compat
from .turns import Turns


class SharedStore(_compat.Store):
    """A store of all ranks. A rank that waits for a key lets the others run.

    Args:
        turns: of the ranks.
    """

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self.turns = turns
        self.values: dict[str, Any] = {}
        self.seconds = timedelta(seconds=300)

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value if isinstance(value, bytes) else str(value).encode()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        total = int(self.values.get(key, b"0")) + amount
        self.values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        expected = expected if isinstance(expected, bytes) else str(expected).encode()
        if self.values.get(key, b"") == expected:
            self.set(key, desired)
        return self.values.get(key, expected)

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self.values for key in keys)

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        self.turns.wait(lambda: self.check(keys), lambda: f"waits for {', '.join(keys)} of a store")

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self.values)

    def set_timeout(self, timeout: timedelta) -> None:
        self.seconds = timeout

    @property
    def timeout(self) -> timedelta:
        return self.seconds
