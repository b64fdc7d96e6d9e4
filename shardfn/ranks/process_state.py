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

# Packages that keep the place of a process in variables of their modules.
OF_A_PROCESS = {"accelerate", "deepspeed", "lightning", "lightning_fabric", "megatron"}
OF_A_PROCESS |= {"pytorch_lightning", "torchtitan"}


class ProcessState:
    """The state of one rank, which is the process's while the rank runs.

    Args:
        environment: variables of the rank.
        states: the states of random generators at its start.
        folder: of a script. Modules in it are imported once for each rank, as those of packages
            are that keep the place of a process.
    """

    def __init__(
        self, environment: Mapping[str, str], states: Mapping[str, Any], folder: str | None = None
    ) -> None:
        self.environment, self.states, self.folder = dict(environment), dict(states), folder
        self.modules: dict[str, Any] = {x: None for x in sys.modules if is_of_a_process(x)}
        self.others: set[str] = set()  # the names of modules of the process
        self.world = _compat.RankWorld()

    def enter(self) -> None:
        """Make it the state of the process."""
        self._exchange()
        self.others = set(sys.modules)
        self.modules = _exchanged(sys.modules, self.modules)

    def leave(self) -> None:
        """Give the process its own state back."""
        new = [x for x in sys.modules.keys() - self.others if self._is_own(x)]
        own = {x: sys.modules.get(x) for x in (*new, *self.modules)}
        _exchanged(sys.modules, {x: self.modules.get(x) for x in own})
        self.modules = own
        self._exchange()

    def _exchange(self) -> None:
        self.environment = _exchanged(os.environ, self.environment)
        before = generators()
        restore(self.states)
        self.states = before
        self.world = _compat.enter_world(self.world)

    def _is_own(self, name: str) -> bool:
        """Return whether each rank has a module for itself."""
        file = getattr(sys.modules[name], "__file__", None) or ""
        is_in_folder = self.folder is not None and file.startswith(self.folder)
        return is_in_folder or is_of_a_process(name)


def is_of_a_process(name: str) -> bool:
    """Return whether a module is of a package that keeps the place of a process."""
    return name.partition(".")[0] in OF_A_PROCESS


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


def new_generators() -> dict[str, Any]:
    """Return the states of the random generators of a new process, which has seeded none."""
    states: dict[str, Any] = {"torch": torch.Generator().get_state()}
    states["random"] = random.Random(0).getstate()
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.RandomState(0).get_state()
    return states
