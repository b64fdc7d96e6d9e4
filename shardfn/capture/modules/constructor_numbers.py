"""Values that the constructor of a module computes from numbers alone, and reads.

Rates that grow with depth are an example: `[x.item() for x in torch.linspace(0, 0.1, layers)]`.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ... import _compat, _tree

LARGEST = 4096  # elements of a tensor whose value is kept
# names of torch's functions
MAKE = re.compile("arange|eye|full|linspace|logspace|ones|tensor|zeros")
COMPUTE = re.compile(
    "__(r?(add|mul|sub|pow|truediv|div)|neg|getitem|iter|[gl][te]|eq|ne)__|[gl][te]|eq|ne"
    "|add|all|any|cumsum|div|double|exp|flip|float|floor|int|log|long|max|min|mul|neg|pow"
    "|reshape|round|rsub|sqrt|square|squeeze|sub|sum|to|true_divide|unbind|unsqueeze|view"
)
READ = re.compile("item|tolist|__(bool|float|index|int|len)__")


class Numbers(TorchFunctionMode):
    """A torch function mode that knows the values of tensors computed from numbers alone."""

    def __init__(self) -> None:
        super().__init__()
        # (value, count of in-place writes when it was known) of a tensor
        self.known: Any = WeakIdKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        tensors = list(filter(_tree.is_tensor, _tree.leaves((args, kwargs))))
        reads = READ.fullmatch(name)
        made = MAKE.fullmatch(name) and not tensors
        is_known = bool(tensors) and all(map(self._has, tensors))
        if not (made or (is_known and (reads or COMPUTE.fullmatch(name)))):
            return _compat.on_fakes(func)(*args, **kwargs)
        inputs = _tree.map_held(self._value, (args, kwargs))
        with _compat.values():
            value = func(*inputs[0], **inputs[1])
            value = list(value) if name == "__iter__" else value
        if reads:
            return value
        result = func(*args, **kwargs)
        if name == "__iter__":
            result = list(result)
        self._keep(result, value)
        return iter(result) if name == "__iter__" else result

    def _has(self, x: torch.Tensor) -> bool:
        return x in self.known and self.known[x][1] == _compat.version_of(x)

    def _value(self, x: Any) -> Any:
        return self.known[x][0] if isinstance(x, torch.Tensor) else x

    def _keep(self, result: Any, value: Any) -> None:
        """Remember the values of the tensors in a result."""
        pairs = zip(_tree.leaves(result), _tree.leaves(value), strict=True)
        for x, number in pairs:
            if isinstance(x, torch.Tensor) and x.numel() <= LARGEST:
                self.known[x] = number, _compat.version_of(x)
