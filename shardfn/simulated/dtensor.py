"""DTensors of a world in one process, which hold the local tensors of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement

from .. import _compat
from ..errors import ShardError
from ..extensions import Eager, absent, service
from .local_tensor import DonatedTensor, SimulatedTensor


class SimulatedDTensor(DTensor):
    """A DTensor that holds the local tensors of all ranks. The room of eager DTensors runs its ops
    and methods outside of functions.
    """

    def __repr__(self, **_: Any) -> str:
        local: Any = _compat.local_tensor(self)
        shown = local if isinstance(local, DonatedTensor) else local.shards[local.shown]
        return (
            f"DTensor(local_tensor={shown}, "
            f"device_mesh={self.device_mesh}, placements={self.placements})"
        )

    def __format__(self, form: str) -> str:
        if self.dim():
            return super().__format__(form)
        if any(p.is_partial() for p in self.placements):
            got = f"f'{{x:{form}}}' of a Partial DTensor: each rank holds a term of it"
            fix = f"f'{{x.full_tensor().item():{form}}}'"
            raise ShardError.of("a DTensor", got, fix=fix)
        return format(self.item(), form)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _eager(str(func)).op(func, args, kwargs or {})

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """Run DTensor.redistribute for all ranks."""
        return self._method("redistribute", *args, **kwargs)

    def to_local(
        self, *, grad_placements: Sequence[Placement] | None = None, rank: int | None = None
    ) -> torch.Tensor:
        """Run DTensor.to_local for all ranks.

        Args:
            grad_placements: placements of the gradient, as in DTensor.to_local.
            rank: of the world; its local tensor is returned, detached.

        Returns:
            The local tensors of all ranks as one `SimulatedTensor`, or one rank's.

        Raises:
            ShardError: the mesh has no such rank.
        """
        return self._method("to_local", grad_placements=grad_placements, rank=rank)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Run DTensor.full_tensor, and return a plain tensor."""
        return self._method("full_tensor", grad_placements=grad_placements)

    def __create_write_items__(self, fqn: str, _: Any) -> Any:
        return self._method("__create_write_items__", fqn, _)

    def __create_chunk_list__(self) -> Any:
        return self._method("__create_chunk_list__")

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self._method("__get_tensor_shard__", index)

    def _method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return _eager(f"{name} of a DTensor").method(name, self, args, kwargs)


def dtensors(locals_: Sequence[torch.Tensor], specs: Sequence[Any]) -> list[DTensor]:
    """Build DTensors of local tensors without torch's checks; SimulatedDTensors of simulated
    tensors.
    """
    kinds = {type(x) for x in locals_}
    kind = SimulatedDTensor if SimulatedTensor in kinds else DTensor
    return _compat.dtensors(locals_, specs, kind)


def _eager(where: str) -> Eager:
    """Return the service of the eager room, which runs ops outside of functions.

    Raises:
        ImportError: this package lacks it.
    """
    eager = service(Eager)
    if eager is None:
        raise absent(f"{where}, outside of a function in a fake world", "eager")
    return eager
