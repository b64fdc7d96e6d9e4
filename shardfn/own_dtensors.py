"""Eager ops on DTensors with the placements `Stage` and `Zigzag`, which torch's DTensor ignores. An
op runs on the local tensors if the result is correct, and otherwise raises an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor, Placement

from . import _compat, _tree
from .errors import PlacementError
from .placement import OWN, REDISTRIBUTE, Stage, Zigzag

aten = torch.ops.aten
NOT_OF_ELEMENTS = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output}
# besides the elementwise ops, which torch marks as such
ON_SHARDS = {
    aten.alias.default,
    aten.detach.default,
    aten.clone.default,
    aten.copy_.default,
    aten._to_copy.default,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
}


def is_own(x: Any) -> bool:
    """Return whether a value is a DTensor at a placement of our own."""
    return isinstance(x, DTensor) and has_own(x.placements)


def has_own(placements: Sequence[Placement]) -> bool:
    """Return whether one of a DTensor's placements is our own."""
    return any(isinstance(p, OWN) for p in placements)


def is_here(placements: Sequence[Placement], coordinates: Sequence[int]) -> bool:
    """Return whether a rank is on the stages that a DTensor is placed on."""
    rows = zip(placements, coordinates, strict=True)
    return all(not isinstance(p, Stage) or p.coordinate == c for p, c in rows)


@attrs.frozen
class Block:
    """A block of a global tensor that a rank holds.

    Args:
        offsets: in the global tensor.
        sizes: of the block.
        start: its offsets in the local tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: tuple[int, ...]

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """Return the block of a local tensor, as a view if it is not the whole of it."""
        if local.shape == self.sizes:
            return local
        rows = zip(self.start, self.sizes, strict=True)
        return local[tuple(slice(start, start + size) for start, size in rows)]


def blocks(x: DTensor, coordinates: Sequence[int]) -> list[Block] | None:
    """List the blocks of its global tensor that a rank holds: one, and two along each zigzag. None
    if a strided shard has gaps.
    """
    if not is_here(x.placements, coordinates):
        return []
    rows = [*zip(x.placements, x.device_mesh.shape, coordinates, strict=True)]
    by_dim = []
    for dim, size in enumerate(x.shape):
        mine = [row for row in rows if getattr(row[0], "dim", None) == dim]
        runs = _runs(size, mine)
        if runs is None:
            return None
        by_dim.append(runs)
    found = itertools.product(*by_dim)
    return [Block(*zip(*runs, strict=True)) if runs else Block((), (), ()) for runs in found]


def _runs(size: int, rows: Sequence[Any]) -> list[tuple[int, int, int]] | None:
    """List the runs of a dim that a rank holds: offset, size and start in the local tensor. None
    if a strided shard has gaps.

    Args:
        size: of the dim.
        rows: the placements of its axes, their sizes, and the coordinates of the rank.
    """
    for placement, n, c in rows:
        if isinstance(placement, Zigzag):
            chunk, start = size // (2 * n), 0
            chunks = [c * chunk, (2 * n - 1 - c) * chunk]
            for other, parts, part in rows:  # of each chunk, equal ones
                if other is not placement:
                    chunk //= parts
                    start += part * chunk
            return [(first + start, chunk, i * chunk) for i, first in enumerate(chunks)]
    axes = [(n, _compat.split_factor(placement) or 1) for placement, n, _ in rows]
    span = _compat.span(size, axes, [c for *_, c in rows])
    return None if span is None else [(span[0], span[1] - span[0], 0)]


class OwnDTensor(DTensor):
    """A DTensor at a placement of our own, in a world of real processes."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_on_shards(func, args, kwargs or {})

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """Refuse DTensor.redistribute."""
        raise refused("redistribute", self, REDISTRIBUTE)

    def full_tensor(self, **_: Any) -> torch.Tensor:  # type: ignore[override]
        """Refuse DTensor.full_tensor."""
        raise refused("full_tensor", self, "sf.full(x)")

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the local tensor. Its gradient is placed alike."""
        check_gradient(self, grad_placements)
        if self.requires_grad and torch.is_grad_enabled():
            return _ToLocal.apply(self)
        local = _compat.local_tensor(self)
        return local.view_as(local)

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        """List what this rank writes to a checkpoint: nothing on other stages."""
        return [_compat.write_item(fqn, self, chunk) for chunk in self.__create_chunk_list__()]

    def __create_chunk_list__(self) -> list[Any]:
        """List what this rank reads of a checkpoint: nothing on other stages."""
        return [_compat.chunk(block.offsets, block.sizes) for block in self._blocks()]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """Return the block of the local tensor that an item of a checkpoint refers to."""
        local = _compat.local_tensor(self)
        return next(b.of(local) for b in self._blocks() if b.offsets == tuple(index.offset))

    def _blocks(self) -> list[Block]:
        """List the blocks of the global tensor that this rank holds.

        Raises:
            PlacementError: each rank holds a term of them.
        """
        found = blocks(self, self.device_mesh.get_coordinate() or ())
        if found is None or any(p.is_partial() for p in self.placements):
            raise refused("a checkpoint", self, "x after a redistribution to Shard and Replicate")
        return found


class _ToLocal(torch.autograd.Function):
    """The local tensor of a DTensor, and the DTensor of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> torch.Tensor:
        ctx.spec = _compat.spec_of(x)
        local = _compat.local_tensor(x)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> DTensor:
        return _FromLocal.apply(cotangent, ctx.spec)


class _FromLocal(torch.autograd.Function):
    """The DTensor of a local tensor."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: Any) -> DTensor:
        return _compat.dtensors([local.detach()], [spec], OwnDTensor)[0]

    @staticmethod
    def backward(ctx: Any, cotangent: DTensor) -> Any:
        return _ToLocal.apply(cotangent), None


def check_gradient(x: DTensor, grad_placements: Sequence[Placement] | None) -> None:
    """Refuse a gradient of `to_local` that is placed otherwise than its DTensor.

    Raises:
        PlacementError: names both.
    """
    if grad_placements is not None and tuple(grad_placements) != tuple(x.placements):
        got = f"grad_placements are {list(grad_placements)}, and x is placed {list(x.placements)}"
        raise PlacementError.of("to_local", got, fix="x.to_local()", arg_path="grad_placements")


def refused(what: str, x: DTensor, fix: str) -> PlacementError:
    """Build the error for an op or a method that would need to know the placement of a DTensor."""
    own = next(type(p).__name__ for p in x.placements if isinstance(p, OWN))
    got = (
        f"the DTensor is placed {list(x.placements)}, but torch's DTensor ops do not support "
        f"sf.{own}"
    )
    return PlacementError.of(f"{what} of a DTensor", got, fix=fix, placements=list(x.placements))


def run_on_shards(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op on the shards of DTensors that all have the same placements.

    Raises:
        PlacementError: the op does more than change each element, or takes tensors of other
            placements.
    """
    tensors = [x for x in _tree.leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    first = next(x for x in tensors if isinstance(x, DTensor) and is_own(x))
    if not (_is_on_shards(func) and all(_is_like(x, first) for x in tensors)):
        fix = "run the op inside a sharded function: sf.shard(f, mesh)(x)"
        raise refused(str(func), first, fix)
    of_locals = _tree.tree_map(_local, (args, kwargs))
    results = func(*of_locals[0], **of_locals[1])
    if _compat.schema(func).is_mutable:
        return args[0]
    meta_args, meta_kwargs = _tree.tree_map(_meta, (args, kwargs))
    if "device" in meta_kwargs:
        meta_kwargs["device"] = "meta"
    placed = zip(
        _tree.leaves((results,)), _tree.leaves((func(*meta_args, **meta_kwargs),)), strict=True
    )
    outs = [_placed(local, meta, first) for local, meta in placed]
    return outs[0] if isinstance(results, torch.Tensor) else type(results)(outs)


def _is_on_shards(func: Any) -> bool:
    """Return whether an op changes each element by itself, and alike on every rank."""
    tags = func.tags
    is_elementwise = torch.Tag.pointwise in tags and not NOT_OF_ELEMENTS & {*tags}
    return is_elementwise or func in ON_SHARDS


def _is_like(x: torch.Tensor, first: DTensor) -> bool:
    """Return whether a tensor lies on the ranks as another one does, and is Partial nowhere."""
    if not isinstance(x, DTensor) or any(p.is_partial() for p in x.placements):
        return False
    is_placed_alike = x.device_mesh == first.device_mesh and x.placements == first.placements
    return is_placed_alike and x.shape == first.shape


def _local(x: Any) -> Any:
    return _compat.local_tensor(x) if isinstance(x, DTensor) else x


def _meta(x: Any) -> Any:
    if not isinstance(x, DTensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _placed(local: torch.Tensor, like: torch.Tensor, first: DTensor) -> DTensor:
    """The DTensor of a result, of the class of the op's first DTensor."""
    spec = _compat.dtensor_spec(
        first.device_mesh, tuple(first.placements), like.shape, like.stride(), like.dtype
    )
    return _compat.dtensors([local], [spec], type(first))[0]
