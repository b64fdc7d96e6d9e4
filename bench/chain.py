"""A compiled step that is fed its own results: what `bench.calls` times, and the proof that it
timed the right thing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import attrs

Tree = dict[str, Any]


@attrs.define
class Chain:
    """A step from a tree of zeros to that tree plus one, and where it has got to.

    Args:
        step: the compiled function.
        tree: what the next call takes.
        compilations: how many graphs have been compiled for the step so far.
        arrays: a tree's leaves as arrays.
        wait: returns when a tree's values are there.
    """

    step: Callable[[Tree], Tree]
    tree: Tree
    compilations: Callable[[], int]
    arrays: Callable[[Tree], Iterable[Any]]
    wait: Callable[[Tree], Any] = lambda tree: None
    calls: int = 0
    compiled: int = 0  # as many as that when the timing starts

    def run(self, calls: int) -> float:
        """Call the step on its own results.

        Args:
            calls: how often.

        Returns:
            Microseconds a call.
        """
        tree, self.tree, step = self.tree, {}, self.step
        start = time.perf_counter()
        for _ in range(calls):
            tree = step(tree)
        self.wait(tree)
        end = time.perf_counter()
        self.tree, self.calls = tree, self.calls + calls
        return (end - start) / calls * 1e6

    def fault(self) -> str | None:
        """What was wrong with the runs so far, if anything."""
        if not self.compiled:
            return "nothing was compiled"
        if self.compilations() != self.compiled:
            return f"{self.compilations() - self.compiled} compilations while it was timed"
        if not all((x == self.calls).all() for x in self.arrays(self.tree)):
            return f"after {self.calls} calls the leaves are not {self.calls}"
        return None


def serve(pipe: Any, build: Callable[[int], dict[str, Chain]]) -> None:
    """Do as the conductor says: first the sizes, then a size, a name and a number of calls at a
    time, None at the end.

    Args:
        pipe: the connection to the conductor.
        build: makes the chains of one size, by name.
    """
    chains = {
        (leaves, name): chain for leaves in pipe.recv() for name, chain in build(leaves).items()
    }
    for chain in chains.values():
        chain.run(2)  # on fresh arguments, then on results: neither may compile later
    for chain in chains.values():
        chain.compiled = chain.compilations()
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        leaves, name, calls = asked
        pipe.send(chains[leaves, name].run(calls))
    pipe.send(
        [
            f"{name}, {leaves} leaves: {fault}"
            for (leaves, name), chain in chains.items()
            if (fault := chain.fault())
        ]
    )
