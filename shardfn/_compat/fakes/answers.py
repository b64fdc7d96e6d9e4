"""A cache of the results of ops on fake tensors, with a smaller key than torch's own.

torch remembers them too. Its key has eighteen fields for each tensor, of which a plain strided
tensor needs seven, so most of the time of a capture's fake tensors went into keys. Results that
torch would remember are remembered here, those of ops that shardfn changes, and of collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from . import constants, known_sizes

MOST = 4096  # results; all are dropped when there are more
COLLECTIVES = "_c10d_functional"  # torch takes these ops for a user's, and remembers none
NUMBERS = frozenset(
    {
        bool,
        complex,
        float,
        int,
        str,
        NoneType,
        torch.device,
        torch.dtype,
        torch.layout,
        torch.memory_format,
    }
)  # types whose values say all of an argument


class Made(NamedTuple):
    """The metadata of one fake tensor in a cached result."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


class Answer(NamedTuple):
    """A cached result of an op: the metadata of its tensors, and the argument that it views."""

    tensors: tuple[Made, ...]
    is_tuple: bool
    viewed: int | None  # the argument of which the result is a view


_ANSWERS: dict[tuple[Any, ...], Answer] = {}


def remembered(
    compute: Callable[..., Any],
    mode: FakeTensorMode,
    func: Any,
    types: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Patch the dispatch of an op on fake tensors: look its result up in the cache, else compute
    and store it.

    Args:
        compute: torch's own way to it.
        mode: that of the fake tensors.
        func: the op.
        types: the classes of the tensors.
        args: its arguments.
        kwargs: those by name.
    """
    if func in known_sizes.CHANGED:
        compute = FakeTensorMode._dispatch_impl
    key = _key(mode, func, args, kwargs)
    if key is None and constants.are_ignored(func, args, kwargs):
        key = _key(mode, func, args, kwargs, of_known=True)
    if key is None:
        with constants.forgotten(func, args, kwargs):
            result = compute(mode, func, types, args, kwargs)
        return constants.of_outside(func, args, result)
    answer = _ANSWERS.get(key)
    if answer is not None:
        result = _made(mode, answer, args)
    else:
        before = _not_kept()
        with constants.forgotten(func, args, kwargs):
            result = compute(mode, func, types, args, kwargs)
        if _not_kept() == before or func.namespace == COLLECTIVES:
            _remember(key, func, args, result)
    if func in constants.FACTORIES:
        return constants.made(mode, func, args, kwargs, result)
    return result


def result_of(mode: FakeTensorMode, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of a functional op on fake tensors. A cached one is found without torch's
    dispatcher, whose layers take longer than the look-up.

    Args:
        mode: that of the fake tensors, which is active.
        op: the op.
        args: its arguments.
        kwargs: those by name.
    """
    key = _key(mode, op, args, kwargs)
    answer = None if key is None else _ANSWERS.get(key)
    return op(*args, **kwargs) if answer is None else _made(mode, answer, args)


def _not_kept() -> int:
    """Count the results that torch's own cache has refused so far."""
    return sum(FakeTensorMode.cache_bypasses.values())


def _key(
    mode: FakeTensorMode,
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    of_known: bool = False,
) -> tuple[Any, ...] | None:
    """Build the cache key of an op's call. None if an argument is neither a plain tensor nor a
    constant, or is a tensor of known values, unless the result does not depend on them.
    """
    if type(func) is not torch._ops.OpOverload:
        return None
    parts: list[Any] = [
        func,
        torch.get_default_dtype(),
        torch._C._get_default_device(),
        torch.is_inference_mode_enabled(),
    ]
    if not _described(mode, args, parts, of_known):
        return None
    if kwargs:
        parts.extend(kwargs)
        if not _described(mode, kwargs.values(), parts, of_known):
            return None
    return tuple(parts)


def _described(mode: FakeTensorMode, args: Iterable[Any], parts: list[Any], of_known: bool) -> bool:
    """Append the key parts of arguments to a list. Returns False at an argument that cannot be a
    key.
    """
    for x in args:
        kind = type(x)
        if kind is FakeTensor:
            if x.fake_mode is not mode or not _is_plain(x, of_known):
                return False
            parts.append(x.shape)
            parts.append(x.stride())
            parts.append(x.storage_offset())
            parts.append(x.dtype)
            parts.append(x.fake_device)
            parts.append(x.requires_grad)
            parts.append(x.is_inference())
        elif kind in NUMBERS:
            parts.append(kind)  # 1 is equal to 1.0, and to True
            parts.append(x)
        elif kind is list or kind is tuple or kind is torch.Size:
            parts.append(kind)
            parts.append(len(x))
            if not _described(mode, x, parts, of_known):
                return False
        else:
            return False
    return True


def _is_plain(x: FakeTensor, of_known: bool = False) -> bool:
    """Check that a fake tensor is strided, of static sizes, without known values or a conj or neg
    bit.
    """
    return not (
        x._has_symbolic_sizes_strides
        or (x.constant is not None and not of_known)
        or x.layout is not torch.strided
        or x.is_conj()
        or x.is_neg()
    )


def _remember(key: tuple[Any, ...], func: Any, args: Sequence[Any], result: Any) -> None:
    """Store a result that torch too would have cached: one or several new plain tensors."""
    is_tuple = type(result) is tuple
    tensors = result if is_tuple else (result,)
    if any(type(x) is not FakeTensor or not _is_plain(x) for x in tensors):
        return
    if any(x is arg for x in tensors for arg in args):
        return
    viewed = None
    if func.is_view:
        (viewed,) = (k for k, x in enumerate(args) if isinstance(x, torch.Tensor))
    if len(_ANSWERS) >= MOST:
        _ANSWERS.clear()
    made = tuple(
        Made(
            tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, x.fake_device, x.requires_grad
        )
        for x in tensors
    )
    _ANSWERS[key] = Answer(made, is_tuple, viewed)


def _made(mode: FakeTensorMode, answer: Answer, args: Sequence[Any]) -> Any:
    """Rebuild a cached result as new fake tensors."""
    viewed = None if answer.viewed is None else args[answer.viewed]
    tensors = [_tensor(mode, made, viewed) for made in answer.tensors]
    return tuple(tensors) if answer.is_tuple else tensors[0]


def _tensor(mode: FakeTensorMode, made: Made, viewed: torch.Tensor | None) -> FakeTensor:
    """Build one fake tensor from cached metadata, as a view of an argument or with memory of its
    own.
    """
    with torch._C._DisableTorchDispatch():
        empty = torch.empty_strided(
            made.shape,
            made.stride,
            dtype=made.dtype,
            device="meta",
            requires_grad=made.requires_grad,
        )
        if viewed is not None:
            memory = viewed.untyped_storage()
            empty.set_(memory, made.offset, made.shape, made.stride)
    return FakeTensor(mode, empty, made.device)


def fresh(like: Any, mode: FakeTensorMode | None = None) -> FakeTensor:
    """Make a fake tensor of the layout of another, with memory of its own, past all modes.

    Args:
        like: a fake tensor, strided, of sizes that are numbers.
        mode: of the new tensor. By default that of the other.
    """
    made = Made(tuple(like.shape), like.stride(), 0, like.dtype, like.fake_device, False)
    with torch._C.DisableTorchFunction():
        return _tensor(mode or like.fake_mode, made, None)
