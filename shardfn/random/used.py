"""The check for keys that are used twice outside of captured functions, under SHARDFN_CHECK=1."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .. import _compat
from ..errors import ShardError, call_site

# of a tensor of keys: the lines that used them, by place and count of in-place writes
_lines: Any = WeakIdKeyDictionary()


def check_key_unused(where: str, key: torch.Tensor) -> None:
    """Record the line that uses a key, and refuse a second use, under SHARDFN_CHECK=1.

    Args:
        where: the function that uses it.
        key: int64 (2,).

    Raises:
        ShardError: it was used before; names both lines.
    """
    if os.environ.get("SHARDFN_CHECK") != "1" or _is_traced(key):
        return
    base, line = _compat.base_of(key), call_site()
    lines = _lines.setdefault(key if base is None else base, {})
    slice_ = key.storage_offset(), key.stride(), _compat.version_of(key)
    if slice_ in lines:
        raise ShardError.of(
            where,
            f"a key is used twice: at {lines[slice_]} and at {line}",
            needed="one draw, or one split, for each key",
            fix="first, second = sf.random.split(key)",
            source=line,
            arg_path="key",
        )
    lines[slice_] = line


def _is_traced(key: torch.Tensor) -> bool:
    """Return whether a key is fake, or inside a transform."""
    return _compat.is_fake(key) or _compat.inside_transform()
