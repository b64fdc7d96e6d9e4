"""Ops and methods of DTensors of a fake world outside of functions: torch runs them eagerly, as
every rank would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement

from .. import _compat, _tree
from ..errors import DivergenceError, ShardError
from ..simulated import (
    DonatedTensor,
    SimulatedDTensor,
    SimulatedTensor,
    dtensors,
    of_every_part,
    of_one_part,
    used_after_donation,
)
from . import checkpoint

aten = torch.ops.aten
NO_GROUP = "process group"  # in torch's error
Call = Callable[[DTensor], torch.Tensor]


def op(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an ATen op on simulated DTensors, for all ranks."""
    _refuse_views_in_place(func)
    if func is aten._local_scalar_dense.default:  # torch reads one rank's
        return _number(args[0])
    inputs = args, kwargs
    with _compat.one_thread():
        ranks = AllRanks.of(_first(inputs))
        args, kwargs = ranks.entering(inputs)
        with ranks.running():
            out = func(*args, **kwargs)
        return ranks.leaving(out)


def method(name: str, x: SimulatedDTensor, args: Any, kwargs: Any) -> Any:
    """Run a method of a simulated DTensor, for all ranks."""
    return METHODS[name](x, *args, **kwargs)


def _redistribute(x: SimulatedDTensor, *args: Any, **kwargs: Any) -> DTensor:
    return _called(x, lambda y: y.redistribute(*args, **kwargs))


def _to_local(
    x: SimulatedDTensor,
    *,
    grad_placements: Sequence[Placement] | None = None,
    rank: int | None = None,
) -> torch.Tensor:
    if rank is None:
        return _called(x, lambda y: y.to_local(grad_placements=grad_placements))
    ranks = AllRanks.of(x).ranks
    if rank not in ranks:
        got = f"rank is {rank!r}"
        needed = f"one of {ranks}"
        raise ShardError.of("to_local", got, needed=needed, arg_path="rank")
    local: Any = _compat.local_tensor(x)
    return local.shards[ranks.index(rank)].detach()


def _full_tensor(x: SimulatedDTensor, **kwargs: Any) -> torch.Tensor:
    everywhere: Any = _called(x, lambda y: y.full_tensor(**kwargs))
    return _OfOneRank.apply(everywhere)


METHODS: dict[str, Callable[..., Any]] = {
    "redistribute": _redistribute,
    "to_local": _to_local,
    "full_tensor": _full_tensor,
    "__create_write_items__": lambda x, fqn, _: checkpoint.write_items(fqn, x),
    "__create_chunk_list__": checkpoint.chunks,
    "__get_tensor_shard__": checkpoint.shard,
}


class AllRanks:
    """Run one torch call for all ranks of a mesh over torch's LocalTensors.

    Args:
        mesh: the mesh of its DTensors.
        shown: the place in the mesh of the rank that is shown.

    Raises:
        ShardError: the mesh has more ranks than the world that is here.
    """

    def __init__(self, mesh: Any, shown: int) -> None:
        _refuse_larger(mesh)
        self.mesh = mesh
        self.ranks = mesh.mesh.flatten().tolist()
        self.shown = shown
        self.followed = False  # whether autograd follows what leaves
        # the id of a DTensor that has entered: itself, and the given one
        self.given: dict[int, tuple[DTensor, DTensor]] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run torch's code for all ranks inside this context.

        Raises:
            ShardError: it communicates, and the world has ended.
        """
        try:
            with _compat.all_ranks(self.ranks):
                yield
        except RuntimeError as error:
            if dist.is_initialized() or NO_GROUP not in str(error):
                raise
            got = "the op communicates, but the world of the DTensor has ended"
            fix = "sf.full(x) reads the DTensor; in another world use "
            fix += "sf.distribute(sf.full(x), mesh, placements)"
            raise ShardError.of("a DTensor", got, fix=fix) from error

    @classmethod
    def of(cls, x: DTensor) -> AllRanks:
        """Build an AllRanks call for a tensor's mesh."""
        local: Any = _compat.local_tensor(x)
        if isinstance(local, DonatedTensor):
            raise used_after_donation(local.call)
        return cls(x.device_mesh, local.shown)

    def entering(self, tree: Any) -> Any:
        """Convert our simulated tensors in a tree to torch's LocalTensors."""
        return _tree.tree_map(self._entering, tree)

    def copied(self, x: Any) -> Any:
        """Convert a plain tensor to one of which every rank has a copy."""
        if type(x) not in (torch.Tensor, torch.nn.Parameter):
            return x
        return _compat.per_rank({rank: x.detach().clone() for rank in self.ranks})

    def leaving(self, tree: Any) -> Any:
        """Convert torch's LocalTensors in a tree back to our simulated tensors. Of a mesh's part
        they become those of all ranks, as another part may meet them.
        """

        def whole(x: Any) -> Any:
            made = self._leaving(x)
            return made if isinstance(made, DTensor) else of_every_part(made, self.mesh)

        return _tree.tree_map(whole, tree)

    def _entering(self, x: Any) -> Any:
        if isinstance(x, SimulatedTensor):
            own: Any = of_one_part(x, self.mesh)
            return _compat.per_rank(dict(zip(self.ranks, own.shards, strict=True)))
        if not isinstance(x, SimulatedDTensor):
            return x
        local = self._entering(_compat.local_tensor(x))
        (entered,) = _compat.dtensors([local], [_compat.spec_of(x)])
        self.given[id(entered)] = entered, x
        return entered

    def _leaving(self, x: Any) -> Any:
        if isinstance(x, DTensor):
            if id(x) in self.given:
                return self.given[id(x)][1]
            local = self._leaving(_compat.local_tensor(x))
            return dtensors([local], [_compat.spec_of(x)])[0]
        if not isinstance(x, torch.Tensor):
            return x
        if _compat.is_arriving(x):
            x = x.wait()  # type: ignore[attr-defined]
        values = _compat.values_per_rank(x)
        if values is None:
            return x
        own = [values[r] for r in self.ranks]
        return SimulatedTensor(own, self.shown, self.followed, self.ranks)


class _Called(torch.autograd.Function):
    """Run a DTensor method for all ranks, with torch's derivative."""

    @staticmethod
    def forward(ctx: Any, x: SimulatedDTensor, call: Call) -> Any:
        with torch.enable_grad(), _running(x) as ctx.ranks:
            ctx.ranks.followed, ctx.call = True, call
            ctx.x = ctx.ranks.entering(x.detach()).detach().requires_grad_()
            ctx.out = call(ctx.x)
            return ctx.ranks.leaving(ctx.out.detach())

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        return _Pulled.apply(cotangent, ctx, ctx.call), None


class _Pulled(torch.autograd.Function):
    """Run the derivative of a DTensor method. All are linear, so its own derivative is the method
    again.
    """

    @staticmethod
    def forward(ctx: Any, cotangent: Any, of: Any, call: Call) -> Any:
        ctx.call = call
        with of.ranks.running():
            entered = of.ranks.entering(cotangent)
            (found,) = torch.autograd.grad(of.out, of.x, entered, retain_graph=True)
            return of.ranks.leaving(found)

    @staticmethod
    def backward(ctx: Any, tangent: Any) -> Any:
        return _called(tangent, ctx.call), None, None


class _OfOneRank(torch.autograd.Function):
    """Take one rank's tensor where all ranks have the same."""

    @staticmethod
    def forward(ctx: Any, x: SimulatedTensor) -> torch.Tensor:
        ctx.of = len(x.shards), x.shown, x.ranks
        return x.shards[x.shown].view_as(x.shards[x.shown])

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
        return _OfEach.apply(cotangent, *ctx.of)


class _OfEach(torch.autograd.Function):
    """Give every rank a copy of one tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: int, shown: int, ranks: Any) -> torch.Tensor:
        if isinstance(x, SimulatedTensor):
            return x
        return SimulatedTensor([x.detach()] * count, shown, ranks=ranks)

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        return _OfOneRank.apply(cotangent), None, None, None


def _called(x: SimulatedDTensor, call: Call) -> Any:
    if x.requires_grad and torch.is_grad_enabled():
        return _Called.apply(x, call)
    with _running(x) as ranks:
        return ranks.leaving(call(ranks.entering(x)))


@contextlib.contextmanager
def _running(x: DTensor) -> Iterator[AllRanks]:
    with _compat.one_thread():
        ranks = AllRanks.of(x)
        with ranks.running():
            yield ranks


def _number(x: DTensor) -> Any:
    """Read the number that all ranks hold, for float(x).

    Raises:
        DivergenceError: ranks hold others.
    """
    local: Any = _compat.local_tensor(x)
    if not isinstance(local, SimulatedTensor):
        return local.item()
    numbers = [shard.item() for shard in local.shards]
    if len({str(number) for number in numbers}) == 1:  # as text, in which nan equals nan
        return numbers[0]
    got = f"ranks hold different values {numbers[:8]} of a DTensor placed {list(x.placements)}"
    raise DivergenceError.of(
        "float(x), x.item() or bool(x) of a DTensor",
        got,
        needed="the same number on all ranks, since each real rank would return its own number",
        fix="x.full_tensor().item(), which is the same on all ranks",
    )


def _first(tree: Any) -> SimulatedDTensor:
    return next(x for x in _tree.leaves(tree) if isinstance(x, SimulatedDTensor))


def _refuse_views_in_place(func: Any) -> None:
    if torch.Tag.inplace_view in func.tags:
        fix = "use the op without the underscore, which returns a new DTensor"
        raise ShardError.of(str(func), "the op changes the shape of a DTensor in place", fix=fix)


def _refuse_larger(mesh: Any) -> None:
    """Refuse a mesh of another world, where that can be seen: torch's caches mix equal meshes."""
    here = dist.get_world_size() if dist.is_initialized() else mesh.size()
    if mesh.size() > here:
        got = f"the DTensor's mesh has {mesh.size()} ranks, but the world has {here}"
        fix = "make the mesh inside the world that uses the mesh"
        raise ShardError.of("a DTensor", got, fix=fix)
