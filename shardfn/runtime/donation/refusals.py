"""Refusals of arguments that cannot be donated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _compat
from ...errors import ShardError, call_site
from ...partition.split_backward import INPUT
from ...simulated import DonatedTensor, SimulatedTensor, UnreadTensor, used_after_donation

Named = Sequence[tuple[str, torch.Tensor]]  # tensors with their paths


def check_own(name: str, own: Named, others: Named) -> None:
    """Refuse donated tensors of per-rank code that cannot be donated, before anything has run.

    Raises:
        ShardError: something else refers to one, or shares its memory.
    """
    gone = next((x for _, x in own if isinstance(x, DonatedTensor)), None)
    if gone is not None:
        raise used_after_donation(gone.call)
    seen: dict[int, str] = {}
    for path, x in (*others, *own):
        is_own = any(x is y for _, y in own)
        for memory in {_compat.storage_of(y) for y in memory_tensors(x)}:
            if is_own and memory in seen:
                raise refused_shared(name, path, f"argument {seen[memory]}")
            seen[memory] = path
        if is_own and not _compat.can_be_taken(x):
            raise refused_held(name, path)


def refused_shared(name: str, path: str, of: str) -> ShardError:
    got = f"the donated argument shares memory with {of}"
    fix = f"{path}.clone() in one of the two places, or leave the argument out of donate_argnums"
    return _refused(name, path, got, "a donated tensor whose memory no other argument uses", fix)


def take_own(name: str, own: Named) -> None:
    """Invalidate the donated tensors of a per-rank call after it."""
    for _, x in own:
        torch.utils.swap_tensors(x, DonatedTensor(x, name))


def refused_held(name: str, path: str) -> ShardError:
    got = "another object refers to the donated argument: a weak reference or an autograd graph"
    needed = "a tensor that only the caller holds"
    return _refused(name, path, got, needed, f"{path}.detach(), donated instead")


def refused_expanded(name: str, path: str) -> ShardError:
    got = "elements of the donated argument share memory, as those of an expanded tensor do"
    needed = "a donated tensor that results may be written to"
    return _refused(name, path, got, needed, f"{path}.contiguous(), donated instead")


def _refused(name: str, path: str, got: str, needed: str, fix: str) -> ShardError:
    source = call_site()
    where = f"{name}, argument {path}"
    return ShardError.of(where, got, needed=needed, fix=fix, source=source, arg_path=path)


def memory_tensors(x: Any) -> Sequence[torch.Tensor]:
    """The local tensors that hold an argument's values in this process. Empty for an argument
    without values or elements.
    """
    local = _compat.local_tensor(x) if isinstance(x, DTensor) else x
    if isinstance(local, SimulatedTensor):
        return [shard for shard in local.shards if shard.numel()]
    return () if isinstance(local, UnreadTensor) or not local.numel() else (local,)


def refuse_saved(compiled: Any) -> None:
    """Refuse to donate an argument that autograd keeps for the backward of the call.

    Raises:
        ShardError: names the first such.
    """
    backward = compiled.backward
    placed = compiled.placed
    if backward is None:
        return
    for kind, number in backward.halves.residuals:
        is_argument = kind == INPUT and number < len(placed.tensors)
        if is_argument and placed.tensors[number] in placed.donated:
            path = placed.paths[placed.tensors[number]]
            got = "the backward of the call needs the value of the donated argument"
            fix = "leave the argument out of donate_argnums; or call under torch.no_grad()"
            needed = "a donated argument whose value nothing needs after the call"
            raise _refused(compiled.request.name, path, got, needed, fix)
