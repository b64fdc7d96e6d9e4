"""What a process has for itself, and threads of one process share: the environment, the states of
random generators, and torch's record of process groups. Each rank has its own.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from .. import _compat


class ProcessState:
    """The state of one rank, which is the process's while the rank runs.

    Args:
        environment: variables of the rank.
        generators: the states of random generators at its start.
    """

    def __init__(self, environment: Mapping[str, str], generators: Mapping[str, Any]) -> None:
        self.environment, self.generators = dict(environment), dict(generators)
        self.modules: dict[str, Any] = {}  # of the rank's own, by name
        self.world = _compat.RankWorld()
        self.outside: ProcessState | None = None

    def enter(self) -> None:
        """Make it the state of the process."""
        self.environment = _exchanged(os.environ, self.environment)
        self.modules = _exchanged(sys.modules, self.modules)
        before = generators()
        restore(self.generators)
        self.generators = before
        self.world = _compat.enter_world(self.world)

    leave = enter


def _exchanged(table: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Set values of a table, None to remove. Returns those before."""
    before = {name: table.get(name) for name in values}
    for name, value in values.items():
        if value is None:
            table.pop(name, None)
        else:
            table[name] = value
    return before


def generators() -> dict[str, Any]:
    """Return the states of the random generators of Python, numpy and torch."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "random": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return states


def restore(states: Mapping[str, Any]) -> None:
    """Set the states of the random generators."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["random"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
