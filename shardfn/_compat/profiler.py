"""torch's profiler: whether it records, and ranges around ops that generated code calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import profiler
from torch.utils._python_dispatch import TorchDispatchMode


def unless_profiled(run: Callable[[Any], Any], profiled: Callable[[Any], Any]) -> Any:
    """Return a function that calls one function, or another while torch's profiler records."""

    def chosen(inputs: Any) -> Any:
        if profiler._is_profiler_enabled:
            return profiled(inputs)
        return run(inputs)

    chosen.__wrapped__ = run  # pyright: ignore[reportFunctionMemberAccess]
    return chosen


def enter_range() -> Any:
    """Return the op that begins a range of the profiler."""
    return torch.ops.profiler._record_function_enter_new.default


def exit_range() -> Any:
    """Return the op that ends a range of the profiler."""
    return torch.ops.profiler._record_function_exit._RecordFunction


class RangedOps(TorchDispatchMode):
    """A dispatch mode in which some ops run in a range of the profiler.

    Args:
        name: of the range of an op, given "namespace.name" and its arguments; None for no range.
        note: called with the name of a range and the result of its op.
    """

    def __init__(
        self, name: Callable[[str, Any], str | None], note: Callable[[str, Any], None]
    ) -> None:
        super().__init__()
        self.name, self.note = name, note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = self.name(str(func._schema.name).replace("::", "."), args)
        if name is None:
            return func(*args, **(kwargs or {}))
        with profiler.record_function(name):
            result = func(*args, **(kwargs or {}))
        self.note(name, result)
        return result
