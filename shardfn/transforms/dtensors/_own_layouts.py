"""The sizes of each rank's own arguments, where they differ between ranks."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _compat
from ...mesh import group_names, ranks_of
from ...simulated import SimulatedTensor
from ...world import current_world, texts_of_ranks


def have_own_sizes(leaves: list[Any]) -> bool:
    """Whether an argument of a simulated world has another size on each rank."""
    return any(isinstance(x, SimulatedTensor) and _are_uneven(x) for x in leaves)


def _are_uneven(x: SimulatedTensor) -> bool:
    return any(shard.shape != x.shards[0].shape for shard in x.shards)


def own_layouts(mesh: Any, leaves: list[Any]) -> tuple[Any, ...]:
    """For each leaf of the arguments the shape and strides of each rank's own tensor, where they
    differ, else None. Nothing if all are equal. Real ranks exchange them.
    """
    own = [_layout(x) for x in leaves]
    kind = current_world().kind
    if not any(own) or kind == "fake":
        return ()
    if kind == "simulated":
        every = [_of_simulated(x) for x in leaves]
    else:
        rows = _exchanged(mesh, own)
        every = list(zip(*rows, strict=True))
    differ = [ranks is not None and len({*ranks}) > 1 for ranks in every]
    if not any(differ):
        return ()
    pairs = zip(every, differ, strict=True)
    return tuple(tuple(ranks) if is_own else None for ranks, is_own in pairs)


def _layout(x: Any) -> Any:
    """The shape and strides of a rank's own tensor. None for anything else."""
    is_own = isinstance(x, torch.Tensor) and not isinstance(x, DTensor)
    if not is_own or _compat.holds_tensors(x):
        return None
    return tuple(x.shape), tuple(x.stride())


def _of_simulated(x: Any) -> Any:
    if isinstance(x, SimulatedTensor):
        return [(tuple(y.shape), tuple(y.stride())) for y in x.shards]
    return None


def _exchanged(mesh: Any, own: list[Any]) -> list[list[Any]]:
    """The layouts of all ranks of a mesh, in its row-major order."""
    lane = " ".join(group_names(mesh)), ranks_of(mesh)
    texts = texts_of_ranks("sizes of arguments", json.dumps(own), lane)
    return [[_hashable(x) for x in json.loads(text)] for text in texts]


def _hashable(layout: Any) -> Any:
    return layout and tuple(map(tuple, layout))
