"""A compiled program that is recorded as a CUDA graph, and replayed.

A graph reads and writes fixed memory. An input whose address is the same in each call is read
where it lies, and so is a donated one, into which a result is written. Any other input is copied
into memory of the graph. A result in memory of the graph is copied out, so that the next call
leaves it as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import Any

import attrs
import torch

from ..._compat import cuda
from ...compile import Runner
from ...errors import ShardError

ADDRESS = torch.Tensor.data_ptr
FIX = "cuda_graphs=False, or a function that runs only on the GPU"


@attrs.frozen(eq=False)
class Recording:
    """A CUDA graph with the places of its inputs and results.

    Args:
        graph: replays it.
        places: the inputs that it reads where they lie.
        addresses: of those.
        copies: its own memory for the other inputs.
        sources: of each result, the input in whose memory it lies, or None.
        fresh: the results in memory of the graph, by number.
        back: the results in its copy of an input, by number.
    """

    graph: Any
    places: list[int]
    addresses: list[int]
    copies: dict[int, torch.Tensor]
    sources: list[int | None]
    fresh: dict[int, torch.Tensor]
    back: dict[int, torch.Tensor]

    def moved(self, inputs: Sequence[torch.Tensor]) -> list[int]:
        """List the inputs that lie elsewhere than when they were recorded."""
        now = [*map(ADDRESS, map(inputs.__getitem__, self.places))]
        if now == self.addresses:
            return []
        rows = zip(self.places, now, self.addresses, strict=True)
        return [i for i, new, old in rows if new != old]

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results of a replay."""
        self.graph.begin()
        given = [inputs[i] for i in self.copies]
        cuda.copy_all(given, [*self.copies.values()])
        self.graph.replay()
        out = self._taken(inputs)
        self.graph.end()
        return out

    def _taken(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy the results out of the graph's memory."""
        out: list[Any] = [None if i is None else inputs[i] for i in self.sources]
        for k, x in self.fresh.items():
            out[k] = _empty_like(x)
        made = {**self.fresh, **self.back}
        targets = [out[k] for k in made]
        cuda.copy_all([*made.values()], targets)
        return out


class Recorded:
    """Run a compiled program in its first call, record it as a CUDA graph in the second, replay it
    from then on.

    Args:
        name: of the function, which errors name.
        run: the compiled program.
    """

    def __init__(self, name: str, run: Runner) -> None:
        self.name, self.compiled = name, run
        self.recording: Recording | None = None
        self.first: list[int] | None = None  # addresses of the first call
        self.lock = threading.Lock()

    @property
    def source_code(self) -> str:
        """The generated code."""
        return getattr(self.compiled, "source_code", "")

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        with self.lock:
            if self.first is None:
                self.first = [x.data_ptr() for x in inputs]
                return self.compiled(inputs)
            recording = self._recording(inputs)
            out = recording.run(inputs)
            inputs.clear()
            return out

    def _recording(self, inputs: Sequence[torch.Tensor]) -> Recording:
        """Return the recording, made again if an input that it reads in place has moved."""
        known = self.recording
        if known is None:
            assert self.first is not None
            pairs = enumerate(zip(inputs, self.first, strict=True))
            moved = [i for i, (x, at) in pairs if x.data_ptr() != at]
        else:
            moved = known.moved(inputs)
            if not moved:
                return known
            moved += known.copies
            self.recording = known = None  # its memory is free for the next one
        self.recording = recorded(self.name, self.compiled, inputs, moved)
        return self.recording


def recorded(
    name: str, run: Runner, inputs: Sequence[torch.Tensor], moved: Collection[int]
) -> Recording:
    """Record a compiled program's kernels as a CUDA graph.

    Args:
        name: of the function, which errors name.
        run: the compiled program.
        inputs: those of a call.
        moved: the inputs that it has copies of.

    Raises:
        ShardError: it does something that a graph cannot hold.
    """
    copies: dict[int, torch.Tensor] = {}
    for i in sorted(moved):
        copies[i] = _empty_like(inputs[i]).copy_(inputs[i])
    given = [copies.get(i, x) for i, x in enumerate(inputs)]
    try:
        graph = cuda.CudaGraph(run, given)
    except RuntimeError as error:
        got = f"cuda_graphs=True, but the program cannot be recorded in a CUDA graph: {error}"
        raise ShardError.of(name, got.splitlines()[0], fix=FIX) from error
    return _described(graph, given, copies)


def _described(
    graph: Any, given: Sequence[torch.Tensor], copies: dict[int, torch.Tensor]
) -> Recording:
    """Describe a CUDA graph by where its inputs and results lie.

    Args:
        graph: recorded, with its results.
        given: its inputs.
        copies: those of its inputs that are its own.
    """
    known = {_place(x): i for i, x in enumerate(given) if x.numel()}
    results = list(graph.results)
    graph.results = []  # the caller's own tensors are among them
    sources = [known.get(_place(x)) for x in results]
    fresh: dict[int, torch.Tensor] = {}
    back: dict[int, torch.Tensor] = {}
    for k, i in enumerate(sources):
        if i is None:
            fresh[k] = results[k]
        elif i in copies:
            back[k] = copies[i]
    places = [i for i in range(len(given)) if i not in copies]
    addresses = [given[i].data_ptr() for i in places]
    return Recording(graph, places, addresses, copies, sources, fresh, back)


def _place(x: torch.Tensor) -> tuple[Any, ...]:
    """Describe where a tensor lies, and its layout."""
    return x.data_ptr(), x.dtype, x.shape, x.stride()


def _empty_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
