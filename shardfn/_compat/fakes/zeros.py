"""Zero tensors, torch's stand-ins for zero tangents, mended under fake tensors (torch 2.11 to
2.13).
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..threads import is_capturing

ATEN = torch.ops.aten
VIEWS = (
    "view",
    "_reshape_alias",
    "as_strided",
)  # ops whose kernel for zero tensors makes a real tensor of a fake one
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.complex64)
NUMBERS = (torch.float64,)  # the dtype of zero tangents of Python floats
KEY = "ZeroTensor"  # of the dispatcher


def _result(a: Any, b: Any) -> tuple[torch.Size, torch.dtype, torch.device]:
    """Return the broadcast shape, dtype and device of a binary op's result. An operand may be a
    number.
    """
    shape = torch.broadcast_shapes(*(getattr(x, "shape", ()) for x in (a, b)))
    tensors = [x for x in (a, b) if isinstance(x, torch.Tensor)]
    device = next((x.device for x in tensors if x.dim()), tensors[0].device)
    return shape, _dtype(a, b), device


def _dtype(a: Any, b: Any) -> torch.dtype:
    """Promote the dtypes of two operands, ignoring the float64 of a Python number's zero
    tangent.
    """
    for x, other in ((a, b), (b, a)):
        if (
            is_zero_tensor(x)
            and not x.dim()
            and x.dtype in NUMBERS
            and isinstance(other, torch.Tensor)
            and other.dtype in FLOATS
        ):
            return other.dtype
    return torch.result_type(a, b)


def is_zero_tensor(x: Any) -> bool:
    """Check whether a value is a zero tensor."""
    return isinstance(x, torch.Tensor) and x._is_zerotensor()


def _zero(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make a zero tensor."""
    return torch._VF._efficientzerotensor(shape, dtype=dtype, device=device)


def _mul(a: Any, b: Any) -> torch.Tensor:
    """Multiply where one factor is a zero tensor: a zero tensor."""
    return _zero(*_result(a, b))


def _cross(a: torch.Tensor, b: torch.Tensor, *, dim: int = -1) -> torch.Tensor:
    """Compute the cross product where one vector is a zero tensor: a zero tensor."""
    return _zero(*_result(a, b))


def _div(a: Any, b: Any) -> torch.Tensor:
    """Divide where an operand is a zero tensor: zeros, nan or inf."""
    shape, dtype, device = _result(a, b)
    dtype = dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()
    if not is_zero_tensor(b):
        return _zero(shape, dtype, device)
    return a * torch.full(
        shape, math.nan if is_zero_tensor(a) else math.inf, dtype=dtype, device=device
    )


def _add(a: Any, b: Any, *, alpha: Any = 1) -> torch.Tensor:
    """Add where a term is a zero tensor: the other term, expanded and scaled."""
    shape, dtype, device = _result(a, b)
    if is_zero_tensor(a) and is_zero_tensor(b):
        return _zero(shape, dtype, device)
    if not is_zero_tensor(a):
        factor = 1
        term = a
    else:
        factor = alpha
        term = b
    term = torch.as_tensor(term, dtype=dtype, device=device).expand(shape)
    return term.clone() if factor == 1 else term * factor


def _sub(a: Any, b: Any, *, alpha: Any = 1) -> torch.Tensor:
    """Subtract where a term is a zero tensor."""
    return _add(a, b, alpha=-alpha)


# torch asks a meta tensor for the shape of such a result, and the copies to "meta" stay in the
# graph (torch 2.11 to 2.13)
ARITHMETIC = {
    "add.Tensor": _add,
    "sub.Tensor": _sub,
    "mul.Tensor": _mul,
    "div.Tensor": _div,
    "linalg_cross": _cross,
}


def zeros_dispatched(
    dispatch: Callable[..., Any],
    mode: FakeTensorMode,
    func: Any,
    types: Any,
    args: Any = (),
    kwargs: Any = None,
) -> Any:
    """Patch FakeTensorMode.dispatch for zero tensors: expand a number, pass the check of their
    storage, and give zeros like one memory of their own.
    """
    if func is ATEN.expand.default and not isinstance(
        args[0], torch.Tensor
    ):  # a number that was added to a zero tensor
        args = (torch.scalar_tensor(args[0]), *args[1:])
    if func is ATEN._has_same_storage_numel.default and args[0].stride() != args[1].stride():
        # a zero tensor arrives here as one expanded number; if strides differ, torch checks them
        # next
        return True
    if func is ATEN._new_zeros_with_same_feature_meta.default and not any(args[1].stride()):
        # the zeros are written to, which one expanded number forbids
        args = (args[0], args[1].new_empty(args[1].shape))
    return dispatch(mode, func, types, args, kwargs)


def _beneath(op: Any) -> Callable[..., Any]:
    """Return a function that redispatches an op below the ZeroTensor key."""
    beneath = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.ZeroTensor)
    return lambda keys, *args, **kw: op.redispatch(keys & beneath, *args, **kw)


def _tensors(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert the number among two operands to a tensor."""
    like = next(x for x in args if isinstance(x, torch.Tensor))
    return tuple(
        x
        if isinstance(x, torch.Tensor)
        else torch.scalar_tensor(x, dtype=torch.result_type(like, x))
        for x in args
    )


def _kernel(name: str) -> Callable[..., Any]:
    """Make an op's ZeroTensor kernel: ours in a capturing thread, torch's in others."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(ATEN, packet), overload or "default")
    torchs = torch.library.get_kernel(op, KEY)
    arithmetic = ARITHMETIC.get(name)
    beneath = _beneath(op)

    def chosen(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_capturing():
            if arithmetic is not None:
                args = _tensors(args)
            return torchs.call_boxed(keys, *args, **kwargs)
        if arithmetic is not None:
            return arithmetic(*args, **kwargs)
        return beneath(keys, *args, **kwargs)

    return chosen


def _override(library: torch.library.Library, name: str) -> None:
    """Register our ZeroTensor kernel of an op."""
    kernel = _kernel(name)
    library.impl(name, kernel, KEY, with_keyset=True, allow_override=True)


@functools.cache
def _warn_of_overrides() -> None:
    """Trigger and silence torch's warning that a kernel is overridden, which it gives once per
    process.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore"):
        _override(library, VIEWS[0])
    library._destroy()


@contextlib.contextmanager
def zeros_kept_fake() -> Iterator[None]:
    """Enter a context in which views and arithmetic of a capture's zero tensors stay fake."""
    _warn_of_overrides()
    library = torch.library.Library("aten", "IMPL")
    try:
        for name in (*VIEWS, *ARITHMETIC):
            _override(library, name)
        yield
    finally:
        library._destroy()


def write_out_zeros(graph: torch.fx.GraphModule) -> None:
    """Replace zero tensors in a traced graph by ordinary zeros, which later runs can handle.

    Must be called under the fake mode of the trace.
    """
    for node in graph.graph.nodes:
        if node.target is ATEN._efficientzerotensor.default:
            node.target = ATEN.zeros.default
        value = node.meta.get("val")
        if is_zero_tensor(value):
            node.meta["val"] = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
