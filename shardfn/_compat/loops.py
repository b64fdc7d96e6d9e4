"""torch's map, scan and while_loop, flex attention under transforms, and substitutes for
functions that Dynamo cannot trace.
"""

import contextlib
import contextvars
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._functorch import eager_transforms as _functorch_transforms
from torch._functorch import vmap as _functorch_vmap
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan as torch_scan
from torch._higher_order_ops.while_loop import while_loop as torch_while_loop

from .dynamo.reading import is_reading
from .tracing import is_transformed, is_wrapped, read_by_dynamo, unwrapped

__all__ = [
    "differentiable_flex",
    "differentiable_index",
    "fake_inputs",
    "in_body",
    "substitutes",
    "torch_map",
    "torch_scan",
    "torch_while_loop",
]


_IN_BODY: contextvars.ContextVar[bool] = contextvars.ContextVar("shardfn_in_body", default=False)


@contextlib.contextmanager
def in_body() -> Iterator[None]:
    """Enter a context that marks the tracing of a loop's body, in which no subgraph may stand."""
    token = _IN_BODY.set(True)
    try:
        yield
    finally:
        _IN_BODY.reset(token)


def differentiable_flex(call: Callable[..., Any], op: Any, *args: Any, **kw: Any) -> Any:
    """Patch the flex attention op: compute it by its formula, score by score, under torch.func
    and in loop bodies, which do not take the op; and in a module that Dynamo does not trace, if a
    function of the scores closes over tensors, of which the op would make constants.
    """
    is_apart = is_reading() and not all(map(_is_alone, (args[3], args[4][-1])))
    if not (is_transformed() or _IN_BODY.get() or is_apart):
        return _in_working_precision(*call(op, *args, **kw))
    from torch._higher_order_ops.flex_attention import math_attention

    return math_attention(*args, **kw)


def _is_alone(x: Any) -> bool:
    """Check that a function closes over numbers and such functions only."""
    if isinstance(x, (list, tuple)):
        return all(map(_is_alone, x))
    if not isinstance(x, types.FunctionType):
        return x is None or isinstance(x, (int, float, str))
    names = (x.__globals__.get(name) for name in x.__code__.co_names)
    cells = [cell.cell_contents for cell in x.__closure__ or ()]
    return all(map(_is_alone, cells)) and not any(isinstance(y, torch.Tensor) for y in names)


def _in_working_precision(out: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the results of flex attention. For float64, its fake kernel says that the sums are
    float32, where they are float64 (torch 2.13 to 2.15).
    """
    is_wide = out.dtype == torch.float64
    return out, *(x.to(torch.float64) if is_wide else x for x in others)


def differentiable_index(call: Callable[..., Any], x: Any, indices: Any) -> Any:
    """Patch the element read of a flex score function: use aten.index, which has all
    derivatives, under transforms and in loop bodies.
    """
    by_formula = is_transformed() or _IN_BODY.get()
    return torch.ops.aten.index(x, indices) if by_formula else call(x, indices)


def fake_inputs(collect: Callable[..., list[Any]], inputs: Sequence[Any]) -> list[Any]:
    """Patch the collection of fake tensors from nodes: look inside of torch.func's wrappers too."""
    found = []
    for x in inputs:
        value: Any = getattr(x, "meta", {}).get("example_value")
        found += [unwrapped(value)] if is_wrapped(value) else collect([x])
    return found


def substitutes() -> dict[Any, Callable[..., Any]]:
    """Return the table of torch's functions that Dynamo traces by a function of ours.

    Two are of flex attention, once that is imported: a check, since its kernel has no derivative
    on CPU, which the formula has, and a warning of old options. One names what vmap maps: torch
    2.11 asks it at every call, and Dynamo cannot read the repr of an object. One is the shape that
    torch.distributions broadcasts to, whose torch.Size Dynamo calls with a tuple. One makes the
    basis of a Jacobian: torch 2.12 reads the places of its ones from a tensor.
    """
    module = sys.modules.get("torch.nn.attention.flex_attention")
    rows = ("_validate_device", _any_device), ("_warn_once", _no_warning)
    found: list[tuple[Any, Callable[..., Any]]] = [
        (getattr(module, name, None), ours) for name, ours in rows
    ]
    found.append((_functorch_vmap._get_name, _name_of))
    found.append((getattr(torch._C, "_infer_size", None), _broadcast))
    if torch.__version__ < "2.13":
        torchs = _functorch_transforms._chunked_standard_basis_for_
        found.append((torchs, _standard_basis))
    return {known: ours for known, ours in found if known is not None}


@read_by_dynamo
def _name_of(func: Any) -> str:
    """Return a function's __name__, for vmap's messages."""
    return getattr(func, "__name__", "a function")


@read_by_dynamo
def _broadcast(a: Sequence[int], b: Sequence[int]) -> torch.Size:
    """Return the shape that two shapes broadcast to."""
    return torch.broadcast_shapes(a, b)


@read_by_dynamo
def _standard_basis(
    tensors: Sequence[torch.Tensor], sizes: Sequence[int], chunk_size: int | None = None
) -> list[tuple[torch.Tensor, ...]]:
    """Build the rows of an identity matrix, split over these tensors' shapes, in chunks."""
    total = sum(sizes)
    basis, start = [], 0
    for x, n in zip(tensors, sizes, strict=True):
        rows = x.new_zeros(total, n)
        rows.diagonal(-start).fill_(1)
        basis.append(rows.view(total, *x.shape))
        start += n
    step = min(chunk_size or total, total) or 1
    return [tuple(rows[i : i + step] for rows in basis) for i in range(0, total, step)]


@read_by_dynamo
def _any_device(query: Any, key: Any, value: Any) -> None:
    """Check nothing about query, key and value: pass them on every device."""


@read_by_dynamo
def _no_warning(*args: Any, **kw: Any) -> None:
    """Skip a warning that torch gives once and records in a global, which a capture may not
    write.
    """
