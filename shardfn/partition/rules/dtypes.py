"""What rules ask of a dtype. torch only stores and casts some: float8, unsigned integers of more
than 8 bits, and those of less than 8.
"""

from __future__ import annotations

import torch

COMPUTED = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.complex128, torch.complex64, torch.complex32),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}

# the integers as which elements of so many bytes are moved
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def keeps_values(before: torch.dtype, after: torch.dtype) -> bool:
    """Return whether a cast is linear, so that casting the terms of a Partial sum equals
    casting the sum.
    """
    if before == after:
        return True
    return {before, after} <= COMPUTED and torch.promote_types(before, after) == after


def reduces(dtype: torch.dtype) -> bool:
    """Return whether backends can take the maximum or minimum of a dtype over ranks."""
    return dtype in COMPUTED and dtype != torch.bool
