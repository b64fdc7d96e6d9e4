"""Torch's ops and functions replaced where they are called eagerly."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.nn.init
from torch.utils._python_dispatch import TorchDispatchMode

from .threads import is_capturing, replaced


class _Replacing(TorchDispatchMode):
    """Ops replaced by the rows of a table; a capture inside replaces its own."""

    def __init__(self, table: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.table = table

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        run: Any = func if is_capturing() else self.table.get(func, func)
        return run(*args, **(kwargs or {}))


@contextlib.contextmanager
def ops_replaced(table: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Torch's ops inside, in this thread, replaced by functions of the same arguments.

    Args:
        table: the functions by op.
    """
    with _Replacing(table):
        yield


@contextlib.contextmanager
def init_replaced(
    replacement: tuple[Callable[..., Any], Callable[[], bool]],
) -> Iterator[None]:
    """The one function of torch.nn.init that draws until all numbers fit, replaced.

    Args:
        replacement: a function of its arguments, and whether to use it for a call.
    """
    truncated_normal, is_mine = replacement

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def chosen(*args: Any, **kwargs: Any) -> Any:
            return (truncated_normal if is_mine() else original)(*args, **kwargs)

        return chosen

    with replaced(torch.nn.init, "_no_grad_trunc_normal_", make):
        yield
