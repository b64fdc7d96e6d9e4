"""Checksums of batches, for the check that ranks, or two runs, read the same batches."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ... import _tree
from ...errors import CheckpointError

SAMPLE = 4096  # bytes of each tensor that count


def of_indices(indices: Iterable[Any], before: int) -> int:
    """Hash a batch of dataset indices into the running checksum of the pass."""
    return zlib.crc32(repr(list(indices)).encode(), before)


def of_tree(tree: Any, before: int) -> int:
    """Hash a batch into the running checksum: paths, shapes, dtypes, and the first bytes of each
    tensor.
    """
    number = before
    for path, x in zip(_tree.paths(tree), _tree.leaves(tree), strict=True):
        number = zlib.crc32(f"{path} {described(x)}".encode(), number)
        if isinstance(x, torch.Tensor):
            number = zlib.crc32(_first_bytes(x), number)
    return number


def _first_bytes(x: torch.Tensor) -> bytes:
    count = max(SAMPLE // x.element_size(), 1)
    some = x.detach().flatten()[:count].cpu().contiguous()
    return bytes(some.view(torch.uint8).tolist())


def described(x: Any, sharded: Sequence[int] = ()) -> str:
    """Describe a leaf by shape and dtype, leaving the sizes of sharded dims open."""
    if not isinstance(x, torch.Tensor):
        return repr(x)
    sizes = ["*" if dim in sharded else str(n) for dim, n in enumerate(x.shape)]
    return f"{str(x.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"


def check_resumed(number: int, skip: int, sample: int, expected: int) -> None:
    """Check that the batches before those that are left are those of the saved run.

    Args:
        number: of batches that there were, at most `skip`.
        skip: of batches that the saved run has read.
        sample: of these batches.
        expected: of the batches of the saved run.

    Raises:
        CheckpointError: they are not.
    """
    if number == skip and sample == expected:
        return
    got = f"the first {skip} batches differ from those that the saved run read"
    if number < skip:
        got = f"the data have {number} batches, but the saved run has read {skip}"
    raise CheckpointError.of(
        "loader, after load_state_dict",
        got,
        needed="the same data, batch size and order",
        fix="use a sampler that draws from torch's generators, and a state_dict() of the same data",
    )
