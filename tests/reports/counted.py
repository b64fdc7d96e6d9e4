"""A rank's program, run op by op on its own: the collectives that it starts, with their bytes, and
the most memory that it holds.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from alive import Alive
from torch.utils._pytree import tree_leaves

c10d = torch.ops._c10d_functional


def _nbytes(x: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(x))


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


class Counting(Alive):
    """Counts collectives too, each by a stand-in."""

    def __init__(self, given: list[torch.Tensor]) -> None:
        super().__init__(given)
        self.sent: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func not in COLLECTIVES:
            return func(*args, **kwargs)
        kind, stand_in, payload = COLLECTIVES[func]
        out = func(*args, **kwargs) if stand_in is None else stand_in(*args)
        if kind is not None:
            self.sent[kind] += 1
            self.nbytes[kind] += payload(args, out)
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
