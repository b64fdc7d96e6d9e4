"""Donated arguments. They are checked before the run, and made unusable after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor

from .. import _compat
from ..errors import ShardError, call_site
from ..simulated import (
    DonatedTensor,
    SimulatedTensor,
    UnreadTensor,
    used_after_donation,
)
from . import cache


@attrs.frozen(eq=False)
class Donation:
    """Which leaves of a call are donated.

    Args:
        name: of the transformed function.
        taken: the positions of the donated leaves.
        others: the positions of the other tensors among the leaves.
        paths: of all leaves.
        closed_over: the tensors that the function closes over.
    """

    name: str
    taken: tuple[int, ...]
    others: tuple[int, ...]
    paths: tuple[str, ...]
    closed_over: tuple[torch.Tensor, ...]

    def run(
        self, leaves: Sequence[Any], execute: Callable[[Any], list[Any]]
    ) -> list[Any]:
        """Check, run, and invalidate the donated arguments. No other thread may donate one
        meanwhile.

        Raises:
            ShardError: a donated tensor that cannot be donated, or that was donated before.
        """
        mine = [leaves[i] for i in self.taken]
        with cache.claimed(mine) as free:
            gone = next(filter(None, map(_donated_to, mine)), None)
            if gone is not None or not free:
                raise used_after_donation(gone or self.name)
            self.check(leaves)
            return self.take(leaves, execute(leaves))

    def check(self, leaves: Sequence[Any]) -> None:
        """Refuse arguments that cannot be donated, before anything has run.

        Raises:
            ShardError: a donated tensor that is passed twice, that the function closes over, or
                whose memory something else shares.
        """
        seen: dict[int, str] = {}
        for x in self.closed_over:
            for local in _locals(x):
                said = f"a tensor that {self.name} closes over"
                seen[_compat.storage_of(local)] = said
        for i in self.others:
            for local in _locals(leaves[i]):
                seen[_compat.storage_of(local)] = f"argument {self.paths[i]}"
        for i in self.taken:
            mine = {_compat.storage_of(local) for local in _locals(leaves[i])}
            twice = next(
                (seen[storage] for storage in mine if storage in seen), None
            )
            if twice is not None:
                fix = (
                    f"{self.paths[i]}.clone() in one of the two places, or leave it out of "
                    "donate_argnums"
                )
                raise self.refused(
                    i,
                    f"it is donated, and shares memory with {twice}",
                    "memory that the call gets once",
                    fix,
                )
            seen.update(dict.fromkeys(mine, f"argument {self.paths[i]}"))
            if not isinstance(leaves[i], DTensor) and not _compat.can_be_taken(
                leaves[i]
            ):
                got = (
                    "it is donated, and something else refers to it: a weak reference, or an "
                    "autograd graph"
                )
                raise self.refused(
                    i,
                    got,
                    "a tensor that only the caller holds",
                    f"{self.paths[i]}.detach(), donated instead",
                )

    def refused(self, leaf: int, got: str, needed: str, fix: str) -> ShardError:
        """The error for a leaf that cannot be donated."""
        path = self.paths[leaf]
        source = call_site()
        return ShardError.of(
            f"{self.name}, argument {path}",
            got,
            needed=needed,
            fix=fix,
            source=source,
            arg_path=path,
        )

    def take(self, leaves: Sequence[Any], outs: list[Any]) -> list[Any]:
        """Invalidate the donated arguments: every later use is an error that names this call.
        Returns the results.
        """
        mine = {id(leaves[i]) for i in self.taken}
        outs = [
            _free(x) if id(x) in mine or id(_compat.base_of(x)) in mine else x
            for x in outs
        ]
        for i in self.taken:
            x = leaves[i]
            if isinstance(x, DTensor):
                x._local_tensor = DonatedTensor(_compat.local_tensor(x), self.name)
                x._spec = _compat.gone_spec(_compat.spec_of(x))
            else:
                torch.utils.swap_tensors(x, DonatedTensor(x, self.name))
        return outs


def _donated_to(x: Any) -> str | None:
    """The call that a tensor was donated to."""
    return getattr(
        _compat.local_tensor(x) if isinstance(x, DTensor) else x, "call", None
    )


def _locals(x: Any) -> Sequence[torch.Tensor]:
    """The local tensors that hold an argument's values in this process. Empty for an argument
    without values or elements.
    """
    local = _compat.local_tensor(x) if isinstance(x, DTensor) else x
    if isinstance(local, SimulatedTensor):
        return [shard for shard in local.shards if shard.numel()]
    return () if isinstance(local, UnreadTensor) or not local.numel() else (local,)


def _free(x: torch.Tensor) -> torch.Tensor:
    """A result in a donated tensor's memory, without a reference to that tensor."""
    memory = x.untyped_storage()
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(
        memory, x.storage_offset(), x.shape, x.stride()
    )


def own(x: torch.Tensor) -> torch.Tensor:
    """A donated tensor's memory if nothing else shares it, else a copy. Results may be written
    into it.
    """
    return (
        x
        if _compat.is_sole_owner(x)
        else torch.empty_strided(
            x.shape, x.stride(), dtype=x.dtype, device=x.device
        ).copy_(x)
    )
