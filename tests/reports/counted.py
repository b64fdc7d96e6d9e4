"""A rank's program, run op by op on its own: the collectives that it starts, with their bytes, and
the most memory that it holds.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardfn._tree import leaves

c10d = torch.ops._c10d_functional


def _nbytes(x: Any) -> int:
    return sum(t.numel() * t.element_size() for t in leaves(x))


def _gathered(x: torch.Tensor, n: int) -> torch.Tensor:
    return torch.cat([x] * n)


def _scattered(x: torch.Tensor, n: int) -> torch.Tensor:
    return x.narrow(0, 0, x.shape[0] // n).clone()


# each collective: its kind, what stands for its result on a rank that is alone, and its payload
COLLECTIVES: dict[Any, Any] = {
    c10d.all_reduce.default: (
        "all_reduce",
        lambda x, op, group: x.clone(),
        lambda args, out: _nbytes(args[0]),
    ),
    c10d.all_gather_into_tensor.default: (
        "all_gather",
        lambda x, n, group: _gathered(x, n),
        lambda args, out: _nbytes(out),
    ),
    c10d.reduce_scatter_tensor.default: (
        "reduce_scatter",
        lambda x, op, n, group: _scattered(x, n),
        lambda args, out: _nbytes(args[0]),
    ),
    c10d.all_to_all_single.default: (
        "all_to_all",
        lambda x, outs, ins, group: x.clone(),
        lambda args, out: _nbytes(args[0]),
    ),
    c10d.wait_tensor.default: (None, lambda x: x, None),
}


class Counting(TorchDispatchMode):
    """Counts collectives, and the bytes of all storages that are alive, at every op."""

    def __init__(self, given: list[torch.Tensor]) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.alive: dict[int, int] = {}
        self.peak = 0
        for x in given:
            self.note(x)

    def note(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = storage.nbytes()
            weakref.finalize(storage, self.alive.pop, key, None)
        self.peak = max(self.peak, sum(self.alive.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, stand_in, payload = COLLECTIVES.get(func, (None, None, None))
        out = func(*args, **(kwargs or {})) if stand_in is None else stand_in(*args)
        if kind is not None:
            self.sent[kind] += 1
            self.nbytes[kind] += payload(args, out)
        for x in leaves(out):
            if isinstance(x, torch.Tensor):
                self.note(x)
        return out


def run_alone(program: Any) -> Counting:
    """Run one rank's program on zeros of its local shapes, each collective by a stand-in.

    Args:
        program: a LocalProgram.
    """
    graph = program.graph
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    given = []
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        given.append(torch.zeros(value.shape, dtype=value.dtype))
    with Counting(given) as counting:
        torch.fx.Interpreter(module).run(*given)
    return counting
