"""Results of eager torch, of `jit` and of a simulated world, compared rank by rank."""

from __future__ import annotations

from typing import Any

import torch
from equality import close
from torch.distributed.tensor import DTensor
from worlds import SimulatedTensor


def plain(out: Any) -> Any:
    """A result with this rank's tensors in place of DTensors, and their placements."""
    if isinstance(out, DTensor):
        return out.to_local(), [str(p) for p in out.placements]
    if isinstance(out, dict):
        return {key: plain(x) for key, x in out.items()}
    if isinstance(out, list | tuple):
        return [plain(x) for x in out]
    if isinstance(out, torch.Tensor):
        return out.clone()  # of one that is still arriving, which waits
    return out if isinstance(out, str | int | float) else str(out)


def of_rank(out: Any, rank: int) -> Any:
    """A result of a simulated world as one rank has it."""
    if isinstance(out, SimulatedTensor):
        return out.shards[rank]
    if isinstance(out, dict):
        return {key: of_rank(x, rank) for key, x in out.items()}
    return [of_rank(x, rank) for x in out] if isinstance(out, list | tuple) else out


def assert_same(got: Any, wanted: Any) -> None:
    """Check that two results are equal to 1e-12."""
    if isinstance(wanted, torch.Tensor):
        assert isinstance(got, torch.Tensor)
        close(got, wanted)
    elif isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        assert_same(list(got.values()), list(wanted.values()))
    elif isinstance(wanted, list | tuple):
        assert len(got) == len(wanted)
        for a, b in zip(got, wanted, strict=True):
            assert_same(a, b)
    else:
        assert got == wanted
