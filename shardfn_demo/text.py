"""Real text that every machine has: the source of Python's standard library, as bytes."""

from __future__ import annotations

import pathlib
import sysconfig
from collections.abc import Iterator

import torch
from torch import Tensor

LIMIT = 4_000_000  # bytes


def files() -> list[pathlib.Path]:
    """The library's public top-level modules, sorted by name."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    return sorted(path for path in folder.glob("*.py") if not path.name.startswith("_"))


def corpus(limit: int = LIMIT) -> Tensor:
    """The text as tokens, one for each byte.

    Args:
        limit: bytes at most.

    Returns:
        int64 (N,), each from 0 to 255.

    Raises:
        FileNotFoundError: this Python carries no source of its library.

    Example:
        >>> corpus(1000).shape
        torch.Size([1000])
    """
    pieces, size = [], 0
    for path in files():
        if size >= limit:
            break
        pieces.append(path.read_bytes())
        size += len(pieces[-1])
    if not pieces:
        folder = sysconfig.get_paths()["stdlib"]
        raise FileNotFoundError(f"no .py files in {folder}: this Python carries no library source")
    return torch.frombuffer(bytearray(b"".join(pieces)[:limit]), dtype=torch.uint8).long()


def batches(
    data: Tensor, *, batch: int, context: int, seed: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows of the text without end, the same for a seed on every rank.

    Args:
        data: tokens (N,), N above `context`.
        batch: windows at a time, B.
        context: tokens of a window, T.
        seed: of the choice of windows.

    Returns:
        An iterator of (x, y), both (B, T): y is x one token later.

    Example:
        >>> x, y = next(batches(torch.arange(100), batch=2, context=5))
        >>> bool((y == x + 1).all()), tuple(x.shape)
        (True, (2, 5))
    """
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(context + 1)
    while True:
        start = torch.randint(len(data) - context, (batch, 1), generator=generator)
        tokens = data[start + window]  # (B, T + 1)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
