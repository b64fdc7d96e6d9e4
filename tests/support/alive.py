"""The memory of a run, counted: the bytes of all storages that are alive, at every op."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Counts the bytes that are alive at every op.

    Args:
        given: tensors that are alive from the beginning.
    """

    def __init__(self, given: list[torch.Tensor]) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0
        self.note(given)

    def note(self, tensors: Any) -> None:
        for x in tree_leaves(tensors):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                key = storage._cdata
                if key not in self.alive:
                    self.alive[key] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, key, None)
                self.peak = max(self.peak, sum(self.alive.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self.run(func, args, kwargs or {})
        self.note(out)
        return out

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)
