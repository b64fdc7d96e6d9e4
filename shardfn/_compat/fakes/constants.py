"""Small fake tensors of integers and bools whose values are known: those of torch.tensor and of a
few factories, and what ops compute from them. An index by such a mask has a size that is known.

A fake tensor keeps its values (`FakeTensor.constant`) until an op writes unknown values to it.
torch keeps those of a single element, and none of factories (2.13 to 2.15).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

aten = torch.ops.aten
MOST = 4096  # elements
OWN = ("aten", "prims")  # the namespaces of torch's ops
# of ops whose result sizes or numbers depend on values; an index may be a mask
TAGS = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})
WHOLE = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
LIFTS = frozenset({aten.lift_fresh.default, aten.lift_fresh_copy.default})
FACTORIES = frozenset(
    {
        aten.arange.default,
        aten.arange.start,
        aten.arange.start_step,
        aten.eye.default,
        aten.eye.m,
        aten.full.default,
        aten.ones.default,
        aten.zeros.default,
        aten.tril_indices.default,
        aten.triu_indices.default,
    }
)


def may_be_constant(original: Callable[..., bool], mode: FakeTensorMode, x: torch.Tensor) -> bool:
    """Patch whether a fake tensor keeps its values: integers and bools of MOST elements."""
    return original(mode, x) or (
        type(x) is torch.Tensor
        and x.dtype in WHOLE
        and x.numel() <= MOST
        and x.layout is torch.strided
        and x.device.type != "meta"
    )


def made(
    mode: FakeTensorMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> Any:
    """Return the result of a factory of integers or bools, with its values if they are few."""
    numbers = [*args, *kwargs.values()]
    is_small = type(result) is FakeTensor and result.dtype in WHOLE and result.device.type == "cpu"
    if not is_small or result.numel() > MOST or any(isinstance(n, torch.SymInt) for n in numbers):
        return result
    with no_dispatch():
        values = func(*args, **kwargs)
    return mode.fake_tensor_converter.from_real_tensor(mode, values, make_constant=True)


def of_outside(func: Any, args: Sequence[Any], result: Any) -> Any:
    """Return the fake tensor of a real one, without the values of a tensor over the memory of a
    NumPy array, which may change.
    """
    is_outside = func in LIFTS and not args[0].untyped_storage().resizable()
    if is_outside and type(result) is FakeTensor:
        result.constant = None
    return result


def are_ignored(func: Any, args: Any, kwargs: Any) -> bool:
    """Check that the result of an op does not depend on the known values among its arguments: it
    has other arguments too, or is not torch's own.
    """
    if _is_mutable(func) or not isinstance(func, torch._ops.OpOverload):
        return False
    tensors = _tensors((args, kwargs))
    if func is aten._unsafe_index.Tensor or TAGS.intersection(func.tags):
        return False
    if any(type(x) is not FakeTensor for x in tensors):
        return False
    count = sum(x.constant is not None for x in tensors)
    return count > 0 and (count < len(tensors) or func.namespace not in OWN)


@contextlib.contextmanager
def forgotten(func: Any, args: Any, kwargs: Any) -> Iterator[None]:
    """Hide the known values of an op's arguments from an op that is not torch's own: torch would
    run it on them, and a collective on one rank.
    """
    known = [] if func.namespace in OWN else _known_among((args, kwargs))
    values = [x.constant for x in known]
    for x in known:
        x.constant = None
    try:
        yield
    finally:
        if not _is_mutable(func):
            for x, value in zip(known, values, strict=True):
                x.constant = value


def _known_among(tree: Any) -> list[FakeTensor]:
    return [x for x in _tensors(tree) if type(x) is FakeTensor and x.constant is not None]


def _tensors(tree: Any) -> list[Any]:
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _is_mutable(func: Any) -> bool:
    return isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable


def known_result(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor] | None:
    """Return the results of an op of tensors in a trace; None if not all their values are known."""
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    if any(type(x) is not FakeTensor or x.constant is None for x in tensors):
        return None
    known = [x.constant if isinstance(x, FakeTensor) else x for x in args]
    with no_dispatch():
        out = op(*known, **kwargs)
    return [out] if isinstance(out, torch.Tensor) else list(out)
