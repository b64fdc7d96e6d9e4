"""Ops that torch reads values for under torch.func, written so that it need not.

Dynamo reads this.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from ... import _compat
from ...errors import CaptureError
from . import masked_writes

aten = torch.ops.aten


@_compat.read_by_dynamo
def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """F.one_hot of a number of classes. A number without a class is an error: each is looked up
    among the classes.
    """
    if num_classes < 1 or tensor.dtype != torch.int64:
        return aten.one_hot(tensor, num_classes)
    classes = torch.arange(num_classes, device=tensor.device)
    found = aten.embedding(classes.unsqueeze(-1), tensor)  # (*tensor.shape, 1)
    return (found == classes).to(torch.int64)


@_compat.read_by_dynamo
def bincount(input: torch.Tensor, weights: Any = None, minlength: int = 0) -> torch.Tensor:
    """torch.bincount with `minlength` bins. A number without a bin is an error."""
    if minlength < 1 or input.dim() != 1 or input.is_floating_point():
        return aten.bincount(input, weights, minlength)
    if weights is None:
        weights = torch.ones_like(input, dtype=torch.int64)
    elif weights.dtype != torch.float32:
        weights = weights.to(torch.float64)
    bins = input.to(torch.int64)
    return weights.new_zeros(minlength).scatter_add(0, bins, weights)


@_compat.read_by_dynamo
def index_fill(x: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> torch.Tensor:
    """torch.index_fill with a tensor for a value."""
    if not isinstance(value, torch.Tensor) or value.dim():
        return aten.index_fill(x, dim, index, value)
    if x.dim() == 0:
        return index_fill(x.reshape(1), dim, index, value).reshape(())
    hit = torch.zeros(x.shape[dim], dtype=torch.bool, device=x.device)
    hit = hit.index_fill(0, index, True)
    shape = [1] * x.dim()
    shape[dim] = -1
    return torch.where(hit.reshape(shape), value.to(x.dtype), x)


@_compat.read_by_dynamo
def index_put(
    x: torch.Tensor, indices: Any, values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    """torch.index_put by one mask of bools."""
    lead = 0
    while lead < len(indices) and indices[lead] is None:
        lead += 1
    if lead != len(indices) - 1 or indices[lead].dtype != torch.bool:
        return aten.index_put(x, indices, values, accumulate)
    return put_by_mask(x, lead, indices[lead], values, accumulate)


@_compat.read_by_dynamo
def put_by_mask(
    x: torch.Tensor, lead: int, mask: torch.Tensor, values: Any, accumulate: bool = False
) -> torch.Tensor:
    """A tensor with values where a mask of the dims from `lead` on is true. As many values as
    true elements are taken in turn. Another number of them, where torch stops, gives NaN.
    """
    shape = x.shape
    rest = len(shape) - lead - mask.dim()
    is_tensor = isinstance(values, torch.Tensor)
    is_turn = is_tensor and values.dim() > rest and values.shape[values.dim() - rest - 1] != 1
    is_exact = is_turn and not values.is_floating_point() and not values.is_complex()
    number: Any = values
    values = values if is_tensor else x.new_full((), number)
    if is_exact or mask.shape != shape[lead : lead + mask.dim()]:
        return aten.index_put(x, [*[None] * lead, mask], values, accumulate)
    wide = mask.reshape(*mask.shape, *[1] * rest)
    if is_tensor and values.dim() > rest:
        values = _in_turn(values, mask, rest)
    values = values.to(x.dtype)
    out = torch.where(wide, x + values if accumulate else values, x)
    if out.shape != shape:
        refuse_values(tuple(shape), tuple(out.shape))
    return out


@_compat.constant_in_graph
def refuse_values(shape: tuple[int, ...], out: tuple[int, ...]) -> None:
    """Refuse values that do not fit into a masked assignment.

    Raises:
        CaptureError: always.
    """
    raise CaptureError.of(
        "x[mask] = values",
        f"the assigned values would change the shape from {shape} to {out}",
        fix="pass values with the shape of x[mask]",
    )


@_compat.read_by_dynamo
def _in_turn(values: torch.Tensor, mask: torch.Tensor, rest: int) -> torch.Tensor:
    """For each element of a mask, the value that it takes if it is true."""
    at = values.dim() - rest - 1
    count = values.shape[at]
    tail = values.shape[at + 1 :]
    if count == 1:
        return values.reshape(*values.shape[:at], *[1] * mask.dim(), *tail)
    if count == 0:  # of a mask without true elements
        shape = *values.shape[:at], *mask.shape, *tail
        return values.new_full(shape, math.nan)
    places = (mask.flatten().cumsum(0) - 1).clamp(0, count - 1)
    values = values.index_select(at, places)
    values = torch.where(mask.sum() == count, values, math.nan)
    return values.reshape(*values.shape[:at], *mask.shape, *tail)


@_compat.read_by_dynamo
def scatter_reduce(
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    src: torch.Tensor,
    reduce: str,
    include_self: bool = True,
) -> torch.Tensor:
    """torch.scatter_reduce. Products are those of all sources, or of ones in place of those that
    go elsewhere.
    """
    if reduce != "prod":
        return aten.scatter_reduce(x, dim, index, src, reduce, include_self=include_self)
    if x.dim() == 0:
        flat = index.reshape(-1), src.reshape(-1), reduce, include_self
        return scatter_reduce(x.reshape(1), dim, *flat).reshape(())
    dim %= x.dim()
    for d in range(x.dim()):
        src = src.narrow(d, 0, index.shape[d])
        count = index.shape[d]
        if d != dim and count < x.shape[d]:  # the others stay
            part = scatter_reduce(x.narrow(d, 0, count), dim, index, src, reduce, include_self)
            return torch.cat([part, x.narrow(d, count, x.shape[d] - count)], d)
    shape = [1] * (x.dim() + 1)
    shape[dim] = -1
    places = torch.arange(x.shape[dim], device=x.device).reshape(shape)
    hit = index.unsqueeze(dim) == places  # (.., place, source, ..)
    product = torch.where(hit, src.unsqueeze(dim), 1).prod(dim + 1).to(x.dtype)
    return x * product if include_self else torch.where(hit.any(dim + 1), product, x)


@_compat.read_by_dynamo
def index_reduce(
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> torch.Tensor:
    """torch.index_reduce, by `scatter_reduce`."""
    if x.dim() == 0 or source.shape[dim] != index.numel():
        if x.dim() or source.dim() or reduce != "prod":
            return aten.index_reduce(x, dim, index, source, reduce, include_self=include_self)
        flat = index.reshape(-1), source.reshape(1), reduce
        out = index_reduce(x.reshape(1), dim, *flat, include_self=include_self)
        return out.reshape(())
    shape = [1] * x.dim()
    shape[dim] = -1
    rows = index.to(torch.int64).reshape(shape).expand(source.shape)
    return scatter_reduce(x, dim, rows, source, reduce, include_self)


@_compat.read_by_dynamo
def embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """torch.embedding_bag, by the op that has a derivative: torch takes another one for a weight
    that the function closes over, and autograd refuses its integer results.
    """
    options = scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset
    count, padding = weight.shape[0], -1
    if padding_idx is not None:
        if not -count <= padding_idx < count:  # torch's own error
            return aten.embedding_bag(weight, indices, offsets, *options, padding_idx)
        padding = padding_idx % count
    return aten._embedding_bag(weight, indices, offsets, *options, padding)


@_compat.read_by_dynamo
def scatter_reduce_(
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    src: torch.Tensor,
    reduce: str,
    include_self: bool = True,
) -> torch.Tensor:
    """Tensor.scatter_reduce_: torch's own, but for products."""
    if reduce != "prod":
        return aten.scatter_reduce_(x, dim, index, src, reduce, include_self=include_self)
    return in_place(scatter_reduce, x, dim, index, src, reduce, include_self)


@_compat.read_by_dynamo
def polygamma_(x: torch.Tensor, n: int) -> torch.Tensor:
    """Tensor.polygamma_, which torch does not functionalize (2.13)."""
    return x.copy_(torch.polygamma(n, x.clone()))


@_compat.read_by_dynamo
def in_place(fn: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Call one of these functions, and write its result to the first argument. A derivative of
    the function may read the old value, which is that of a copy.
    """
    x.copy_(fn(x.clone(), *args, **kwargs))
    return x


@_compat.read_by_dynamo
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """F.scaled_dot_product_attention as matrix products and a softmax, which have all derivatives.
    Torch's other ops of attention have the first alone, in reverse mode.
    """
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        bias = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = bias.masked_fill(attn_mask.logical_not(), -math.inf)
    given = query, key, value, attn_mask, dropout_p, is_causal
    return aten._scaled_dot_product_attention_math(*given, scale=scale, enable_gqa=enable_gqa)[0]


# F.embedding_bag, which Dynamo takes for one op, as Python that it reads
CHECKED_BAG = _compat.twin(F.embedding_bag)
ALWAYS = (F.one_hot, torch.bincount, "bincount", "polygamma_", F.embedding_bag, torch.embedding_bag)
FUNCTIONS = {
    F.one_hot: one_hot,
    torch.bincount: bincount,
    torch.index_fill: index_fill,
    torch.index_put: index_put,
    torch.scatter_reduce: scatter_reduce,
    torch.index_reduce: index_reduce,
    F.embedding_bag: CHECKED_BAG,
    torch.embedding_bag: embedding_bag,
    F.scaled_dot_product_attention: attention,
}
ATTENTION = F.scaled_dot_product_attention
NO_METHODS = F.one_hot, F.embedding_bag, torch.embedding_bag, ATTENTION
METHODS = {
    **{fn.__name__: ours for fn, ours in FUNCTIONS.items() if fn not in NO_METHODS},
    "polygamma_": polygamma_,
    "scatter_reduce_": scatter_reduce_,
}
GIVEN = _compat.UnderTransforms(
    {**FUNCTIONS, **METHODS},
    ALWAYS,
    in_place,
    put_by_mask,
    masked_writes.write_selected_,
    ATTENTION,
)
