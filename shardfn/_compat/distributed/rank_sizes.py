"""SymInts that hold a different size for each simulated rank."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["global_sizes", "in_backward", "of_rank", "size_of_ranks"]


class _Number:
    """The symbolic node of a number that differs between ranks. torch looks its methods up by
    name.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = tuple(values)

    def __str__(self) -> str:
        return str([*self.values])

    __repr__ = __str__

    def str(self) -> str:
        return str(self)

    _graph_repr = str

    def clone(self) -> _Number:
        return self

    def is_int(self) -> bool:
        return not self.is_bool()

    def is_bool(self) -> bool:
        return isinstance(self.values[0], bool)

    def is_false(self, *_: Any) -> bool:
        return False

    is_float = is_nested_int = is_symbolic = is_constant = is_false

    def is_none(self, *_: Any) -> None:
        return None

    maybe_as_int = maybe_as_bool = constant_int = constant_bool = is_none
    nested_int = singleton_int = is_none

    def wrap_int(self, number: int) -> _Number:
        return _Number([number] * len(self.values))

    wrap_bool = wrap_int

    def has_hint(self) -> bool:
        return True

    def one(self, *_: Any) -> Any:
        """Return the number if all ranks agree; else raise."""
        first, *others = self.values
        if any(x != first for x in others):
            raise RuntimeError(
                f"a size that differs between ranks, {[*self.values]}, is used as one number"
            )
        return first

    guard_bool = guard_int = bool_ = int_ = expect_true = expect_size = one
    guard_size_oblivious = guard_or_false = guard_or_true = one


def _pairwise(fn: Callable[..., Any]) -> Callable[..., _Number]:
    """Make a method that applies a binary operator rank by rank."""

    def method(self: _Number, other: Any) -> _Number:
        others = other.values if isinstance(other, _Number) else [_plain(other)] * len(self.values)
        pairs = zip(self.values, others, strict=True)
        return _Number([fn(a, b) for a, b in pairs])

    return method


def _plain(x: Any) -> Any:
    """Convert an int or a constant symbolic node to a Python number."""
    if isinstance(x, int):
        return x
    value = x.maybe_as_int()
    return x.guard_bool("", 0) if value is None else value


def _equal(fn: Callable[..., Any], decide: Callable[..., bool]) -> Any:
    """Make a comparison method with one answer for all ranks."""
    compare = _pairwise(fn)

    def method(self: _Number, other: Any) -> _Number:
        answers = compare(self, other).values
        return _Number([decide(answers)] * len(answers))

    return method


for _name, _fn in {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "mod": operator.mod,
    "floordiv": operator.floordiv,
    "int_floordiv": operator.floordiv,
    "sym_min": min,
    "sym_max": max,
    "sym_and": operator.and_,
    "sym_or": operator.or_,
    "and_": operator.and_,
    "or_": operator.or_,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}.items():
    setattr(_Number, _name, _pairwise(_fn))
_Number.eq = _equal(operator.eq, all)  # type: ignore[attr-defined]
_Number.ne = _equal(operator.ne, any)  # type: ignore[attr-defined]
_Number.neg = lambda self: _Number([-x for x in self.values])  # type: ignore[attr-defined]
_Number.sym_not = lambda self: _Number([not x for x in self.values])  # type: ignore[attr-defined]


def size_of_ranks(values: Sequence[int]) -> int | torch.SymInt:
    """Make one size from those of all ranks: an int if they agree, else a SymInt."""
    first, *others = values
    if all(x == first for x in others):
        return first
    return torch.SymInt(_Number(values))


def of_rank(x: Any, rank: int) -> Any:
    """Return one rank's value of a SymInt from `size_of_ranks`; any other value as it is."""
    if not isinstance(x, torch.SymInt):
        return x
    node: Any = x.node
    return node.values[rank] if isinstance(node, _Number) else int(x)


def in_backward() -> bool:
    """Check whether autograd's backward is running in this thread."""
    return torch._C._current_graph_task_id() != -1


def global_sizes(
    compute: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[list[int], list[int]]:
    """Patch the global shape and strides of a DTensor: take those of the first rank where shards
    are uneven.
    """
    shape, strides = compute(*args, **kwargs)
    return [_of_first(n) for n in shape], [_of_first(n) for n in strides]


def _of_first(x: Any) -> int:
    """Return the first rank's value of torch's per-rank SymInt."""
    own = getattr(getattr(x, "node", None), "_local_ints", None)
    return int(x) if own is None else next(iter(own.values()))
