"""The op `shardfn::random_bits`: numbers that depend on a key and on the element's index in the
global tensor.

Each element is one block of Philox-4x32-10: the counter is the element's number in row-major
order, so a rank that knows where its shard starts makes exactly its part.

Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .. import _compat

WORD = 0xFFFFFFFF  # the bits of one word
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # what is added to the two words of a key in each round
ROUNDS = 10
CHUNK = 1 << 14  # elements that are made at a time, so that temporaries stay small

# The last word of a counter says its use: two uses of one key share no block.
DRAW = 0
SPLIT = 1
FOLD_IN = 2
AMBIENT = 3
AMBIENT_KEY = 4
STATE = 5

SIGNIFICANT = {  # of a number in [0, 1): how many random bits, so that it is exact
    torch.float64: 53,
    torch.float32: 24,
    torch.float16: 11,
    torch.bfloat16: 8,
}
WIDTH = {  # of an integer, in bits
    torch.int64: 64,
    torch.int32: 32,
    torch.int16: 16,
    torch.int8: 8,
    torch.uint8: 8,
    torch.bool: 1,
}
DTYPES = (*SIGNIFICANT, *WIDTH)


def philox(counter: Sequence[Any], key: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """Compute one block of Philox-4x32-10, of any type with the operators of 64-bit integers.

    Args:
        counter: four words, each below 2**32.
        key: two words.

    Returns:
        Four words, each below 2**32. Products wrap around in 64 bits; their low bits are right.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0 = MULTIPLIERS[0] * c0
        p1 = MULTIPLIERS[1] * c2
        high0 = (p0 >> 32) & WORD
        high1 = (p1 >> 32) & WORD
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, p1 & WORD, high0 ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def bits_of(words: Sequence[Any], dtype: torch.dtype) -> Any:
    """Return the random integer that becomes an element of a dtype: 53, 24, 11 or 8 bits for a
    floating dtype, else as many as the dtype has, in two's complement.
    """
    low = words[0]
    high = words[1]
    if dtype == torch.float64:
        return ((low >> 5) << 26) | (high >> 6)
    if dtype in SIGNIFICANT:
        return low >> (32 - SIGNIFICANT[dtype])
    if dtype == torch.int64:
        return (high << 32) | low
    width = WIDTH[dtype]
    bits = low >> (32 - width)
    if not dtype.is_signed:
        return bits
    sign = 1 << (width - 1)
    return (bits ^ sign) - sign


def scale_of(dtype: torch.dtype) -> float:
    """Return the factor that maps the bits of a floating dtype to [0, 1)."""
    return 2.0 ** -SIGNIFICANT[dtype]


@torch.library.custom_op("shardfn::random_bits", mutates_args=())
def random_bits(
    key: torch.Tensor,
    start: torch.Tensor | None,
    size: list[int],
    stride: list[int],
    use: int,
    call: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Draw random numbers, one for each element: the custom op.

    Args:
        key: int64 (*batch, 2): two words below 2**32; one stream for each of a batch. Of a state,
            (*batch, 3), the third one is the number of the first call.
        start: int64 (*batch) or (): the number of the first element; 0 by default.
        size: of what is made for each key.
        stride: by how much the number of an element grows along each dim.
        use: DRAW, SPLIT, FOLD_IN, AMBIENT, AMBIENT_KEY or STATE.
        call: the number of the call, from the first one.
        dtype: uniform in [0, 1) for a floating dtype, else all bits.

    Returns:
        (*batch, *size).
    """
    batch = key.shape[:-1]
    out = torch.empty((*batch, *size), dtype=dtype, device=key.device)
    rows = out.view(-1, math.prod(size)) if out.numel() else out.view(0, 0)
    keys = key.reshape(-1, key.shape[-1])
    starts = None if start is None else start.expand(batch).reshape(-1)
    for i, row in enumerate(rows):
        first = None if starts is None else starts[i]
        for begin in range(0, row.numel(), CHUNK):
            part = row[begin : begin + CHUNK]
            flat = torch.arange(begin, begin + part.numel(), dtype=torch.int64, device=key.device)
            part.copy_(_draw_chunk(keys[i], first, flat, size, stride, use, call, dtype))
    return out


def _draw_chunk(
    key: torch.Tensor,
    start: torch.Tensor | None,
    flat: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    use: int,
    call: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Draw the elements at some indices of a flattened result."""
    number = torch.zeros_like(flat) if start is None else start.expand(flat.shape)
    for d in reversed(range(len(size))):
        number = number + (flat % size[d]) * stride[d]
        flat = flat // size[d]
    first_call = torch.zeros_like(key[0]) if len(key) == 2 else key[2]
    calls = ((first_call + call) & WORD).expand(number.shape)
    words = philox((number & WORD, (number >> 32) & WORD, calls, use), (key[0], key[1]))
    bits = bits_of(words, dtype)
    return bits.to(dtype) * scale_of(dtype) if dtype in SIGNIFICANT else bits


@random_bits.register_fake
def _(
    key: torch.Tensor,
    start: torch.Tensor | None,
    size: list[int],
    stride: list[int],
    use: int,
    call: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    return key.new_empty((*key.shape[:-1], *size), dtype=dtype)


@random_bits.register_vmap
def _(
    info: Any,
    in_dims: Any,
    key: torch.Tensor,
    start: torch.Tensor | None,
    size: list[int],
    stride: list[int],
    use: int,
    call: int,
    dtype: torch.dtype,
) -> Any:
    n, (key_dim, start_dim, *_) = info.batch_size, in_dims
    batch = key.dim() - 1 - (key_dim is not None)  # of each sample
    key = _batched(key, key_dim, n)
    if start is not None and (start_dim is not None or start.dim()):
        start = _batched(start, start_dim, n)
        if start.dim() == 1:
            start = start.view(n, *[1] * batch)
    return random_bits(key, start, size, stride, use, call, dtype), 0


def _batched(x: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    """Return the tensor with the mapped dim first."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


RANDOM_BITS = torch.ops.shardfn.random_bits.default


def _inductor_element(
    ops: Any,
    full_index: Sequence[Any],
    key: Any,
    start: Any,
    size: Sequence[int],
    stride: Sequence[int],
    use: int,
    call: int,
    dtype: torch.dtype,
) -> Any:
    """Compute one element in Inductor's operations, inside a generated kernel."""
    batch = full_index[: len(key.sizes) - 1]
    index = full_index[len(key.sizes) - 1 :]
    number = _element_number(ops, index, stride)
    if start is not None:
        first = start.at(batch[len(batch) - len(start.sizes) :])
        number = number + _compat.Integer(first)
    parts = [_compat.Integer(key.at([*batch, i])) for i in range(key.sizes[-1])]
    calls = _integer_constant(ops, call)
    last = _integer_constant(ops, use)
    for first_call in parts[2:]:
        calls = (calls + first_call) & WORD
    words = philox((number & WORD, (number >> 32) & WORD, calls, last), parts[:2])
    value = ops.to_dtype(bits_of(words, dtype).value, dtype)
    if dtype not in SIGNIFICANT:
        return value
    return value * ops.constant(scale_of(dtype), dtype)


def _element_number(ops: Any, place: Sequence[Any], stride: Sequence[int]) -> Any:
    """Compute the number of an element from its index and the strides of the numbering."""
    steps = (i * step for i, step in zip(place, stride, strict=True))
    return _compat.Integer(ops.index_expr(sum(steps), torch.int64))


def _integer_constant(ops: Any, value: int) -> Any:
    return _compat.Integer(ops.constant(value, torch.int64))


_compat.lower_by_formula(RANDOM_BITS, _inductor_element)


def strides_of(size: Sequence[int]) -> list[int]:
    """Return by how much the number of an element grows along each dim, in row-major order."""
    return [math.prod(size[d + 1 :]) for d in range(len(size))]
