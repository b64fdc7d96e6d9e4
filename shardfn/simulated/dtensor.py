"""DTensors of a world in one process, which hold the local tensors of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement

from .. import _compat, _tree
from ..errors import ShardError, listed
from ..extensions import Eager, absent, page_of, service
from ..own_dtensors import OwnDTensor, check_gradient, has_own, is_own, refused, run_on_shards
from ..placement import REDISTRIBUTE
from .local_tensor import DonatedTensor, SimulatedTensor, of_every_part

SHOWN = 16  # different local tensors in the text of a DTensor
COMPARED = 4096  # elements of a local tensor that its text compares with those of other ranks


class SimulatedDTensor(DTensor):
    """A DTensor that holds the local tensors of all ranks. The room of eager DTensors runs its ops
    and methods outside of functions.
    """

    def __str__(self) -> str:
        """Print the DTensor as a script prints it on the rank that is shown."""
        local: Any = _compat.local_tensor(self)
        shown = local if isinstance(local, DonatedTensor) else local.shards[local.shown]
        return (
            f"DTensor(local_tensor={shown}, "
            f"device_mesh={self.device_mesh}, placements={self.placements})"
        )

    def __repr__(self, **_: Any) -> str:
        """Show the global shape, the placements, and the local tensors of all ranks."""
        local: Any = _compat.local_tensor(self)
        head = (
            f"shape={tuple(self.shape)}, dtype={self.dtype}, device_mesh={self.device_mesh}, "
            f"placements={self.placements}"
        )
        if isinstance(local, DonatedTensor):
            return f"DTensor(local_tensor={local}, {head})"
        return "\n".join([f"DTensor({head}", *_lines_of_ranks(local.shards, self.device_mesh)])

    def _repr_html_(self) -> str | None:
        """Draw a picture in a notebook."""
        return None if isinstance(_compat.local_tensor(self), DonatedTensor) else page_of(self)

    def __format__(self, form: str) -> str:
        if self.dim():
            return super().__format__(form)
        if any(p.is_partial() for p in self.placements):
            got = (
                f"f'{{x:{form}}}' formats a Partial DTensor x, of which each rank holds only a term"
            )
            fix = f"f'{{x.full_tensor().item():{form}}}'"
            raise ShardError.of("a DTensor", got, fix=fix)
        return format(self.item(), form)

    def numpy(self, *_: Any, **__: Any) -> Any:
        """Refuse what torch's DTensor has not either, with what to write instead."""
        raise _without_array(self, "numpy")

    def tolist(self) -> Any:
        """Refuse what torch's DTensor has not either, with what to write instead."""
        raise _without_array(self, "tolist")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise _without_array(self, "__array__")

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        raise _without_array(self, "__dlpack__")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_own, _tree.leaves((args, kwargs or {})))):
            return run_on_shards(func, args, kwargs or {})
        return _eager(str(func)).op(func, args, kwargs or {})

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """Run DTensor.redistribute for all ranks."""
        if is_own(self):
            raise refused("redistribute", self, REDISTRIBUTE)
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
            ShardError: the mesh has no such rank, or autograd follows the local tensors of a
                stage, which have other numbers of dims on other ranks.
        """
        if is_own(self) and rank is None:
            return self._shards_of_stage(grad_placements)
        return self._method("to_local", grad_placements=grad_placements, rank=rank)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Run DTensor.full_tensor, and return a plain tensor."""
        if is_own(self):
            raise refused("full_tensor", self, "sf.full(x)")
        return self._method("full_tensor", grad_placements=grad_placements)

    def _shards_of_stage(self, grad_placements: Sequence[Placement] | None) -> torch.Tensor:
        """The local tensors of all ranks where one stage has the values."""
        check_gradient(self, grad_placements)
        if self.requires_grad and torch.is_grad_enabled():
            raise refused("to_local", self, "x.detach().to_local(), or sf.full(x)")
        local: Any = _compat.local_tensor(self)
        return of_every_part(SimulatedTensor(local.shards, local.shown), self.device_mesh)

    def __create_write_items__(self, fqn: str, _: Any) -> Any:
        return self._method("__create_write_items__", fqn, _)

    def __create_chunk_list__(self) -> Any:
        return self._method("__create_chunk_list__")

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self._method("__get_tensor_shard__", index)

    def _method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return _eager(f"{name} of a DTensor").method(name, self, args, kwargs)


def _without_array(x: SimulatedDTensor, method: str) -> ShardError:
    """The error for a DTensor that is read as an array. torch's DTensor cannot be read so, and has
    no memory for dlpack: a script would fail on real ranks.
    """
    read = "tolist" if method == "tolist" else "numpy"
    fix = f"sf.full(x).detach().{read}()"
    if x.numel() == 1:
        fix = f"x.item(), or {fix}"
    got = f"{method}() is called on a DTensor, but torch supports it only for plain tensors"
    return ShardError.of("a DTensor", got, fix=fix)


def _lines_of_ranks(shards: Sequence[torch.Tensor], mesh: Any) -> list[str]:
    """Print the local tensors of ranks, those of ranks with equal ones once."""
    names = mesh.mesh.flatten().tolist()
    groups: list[tuple[torch.Tensor, list[int]]] = []
    for name, shard in zip(names, shards, strict=True):
        same = next((ranks for x, ranks in groups if _looks_equal(x, shard)), None)
        if same is not None:
            same.append(name)
        elif len(groups) < SHOWN:
            groups.append((shard, [name]))
    lines = []
    for shard, ranks in groups:
        head = f"  {listed(ranks)}: "
        lines += f"{head}{shard.detach()}".replace("\n", f"\n{' ' * len(head)}").split("\n")
    left = len(names) - sum(len(ranks) for _, ranks in groups)
    if left:
        lines.append(f"  and {left} more ranks")
    lines[-1] += ")"
    return lines


def _looks_equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two local tensors are one, or small and equal."""
    if x is y:
        return True
    if x.shape != y.shape or x.numel() > COMPARED:
        return False
    return bool(((x == y) | (x.isnan() & y.isnan())).all())


def dtensors(locals_: Sequence[torch.Tensor], specs: Sequence[Any]) -> list[DTensor]:
    """Build DTensors of local tensors without torch's checks; SimulatedDTensors of simulated
    tensors.
    """
    is_simulated = any(isinstance(x, SimulatedTensor) for x in locals_)
    if is_simulated:
        return _compat.dtensors(locals_, specs, SimulatedDTensor)
    kinds = [OwnDTensor if has_own(spec.placements) else DTensor for spec in specs]
    return _compat.dtensors(locals_, specs, kinds)


def _eager(where: str) -> Eager:
    """Return the service of the eager room, which runs ops outside of functions.

    Raises:
        ImportError: this package lacks it.
    """
    eager = service(Eager)
    if eager is None:
        raise absent(f"{where}, outside of a function in a fake world", "eager")
    return eager
