"""Local tensors of a world in one process: one value per rank, or no values at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import _compat, _tree
from ..errors import DivergenceError, FakeValueError, PlacementError, ShardError, problem
from ..extensions import Eager, absent, service

aten = torch.ops.aten
READS = (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default)


class SimulatedTensor(torch.Tensor):
    """The local tensors of all ranks, with the shape of one rank's.

    Args:
        shards: one tensor for each rank, in the mesh's row-major order.
        shown: the index of the one that gives the shape.
        followed: whether autograd follows it.
        ranks: the ranks of the world, in the order of `shards`. None: those of the mesh that takes
            the tensor.
        parts: of a DTensor on a submesh, the places in `shards` of each submesh's ranks, its own
            first: the others hold copies of the DTensor's memory.
    """

    @staticmethod
    def __new__(
        cls,
        shards: Sequence[torch.Tensor],
        shown: int = 0,
        followed: bool = False,
        ranks: Sequence[int] | None = None,
        parts: Sequence[Sequence[int]] = (),
    ) -> SimulatedTensor:
        x = shards[shown]
        shape: Any = x.shape
        strides: Any = x.stride()
        if _has_sizes_of_all(shards, followed):
            shape = _sizes_of_ranks([y.shape for y in shards])
            strides = _sizes_of_ranks([y.stride() for y in shards])
        return torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=x.dtype, device=x.device
        )

    def __init__(
        self,
        shards: Sequence[torch.Tensor],
        shown: int = 0,
        followed: bool = False,
        ranks: Sequence[int] | None = None,
        parts: Sequence[Sequence[int]] = (),
    ) -> None:
        self._shards = list(shards)
        self.parts = tuple(parts)
        self.ranks = None if ranks is None else tuple(ranks)
        self.shown = shown
        self.followed = _has_sizes_of_all(shards, followed)

    @property
    def shards(self) -> list[torch.Tensor]:
        """The local tensor of each rank; copies are as the memory that they copy is now."""
        for copy, own in self._copies():
            copy.detach().copy_(own.detach())
        return self._shards

    def _copies(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each tensor that is a copy, and that of which it is one."""
        for part in self.parts[1:]:
            for place, own in zip(part, self.parts[0], strict=True):
                yield self._shards[place], self._shards[own]

    # where sizes differ and autograd follows, its formulas have those of each rank;
    # code reads those of one rank

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self._shards[self.shown].shape

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def stride(self, dim: int | None = None) -> Any:  # type: ignore[override]
        strides = self._shards[self.shown].stride()
        return strides if dim is None else strides[dim]

    def numel(self) -> int:
        return self._shards[self.shown].numel()

    def is_of_one_rank(self) -> bool:
        """Whether autograd would take one rank's sizes for those of all."""
        shapes = {x.shape for x in self._shards}
        return len(shapes) > 1 and not self.followed

    def of_rank(self, rank: int) -> torch.Tensor:
        """Return the local tensor of a rank of the world."""
        return self.shards[rank if self.ranks is None else self.ranks.index(rank)]

    def wait(self) -> SimulatedTensor:
        """Return the tensor, as a functional collective's result is awaited."""
        return self

    def __repr__(self, **_: Any) -> str:
        return (
            f"SimulatedTensor({len(self.shards)} ranks, rank {self.shown}: "
            f"{self.shards[self.shown]!r})"
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, treedef = _tree.flatten((args, kwargs or {}), _tree.is_tensor)
        mine = [x for x in leaves if isinstance(x, SimulatedTensor)]
        if "c10d" in func.namespace:
            return _collective(func, args, kwargs or {})
        if func is aten.view.default and tuple(args[1]) == tuple(args[0].shape):
            # `to_local` inspects itself
            x = args[0]
            return SimulatedTensor(x.shards, x.shown, ranks=x.ranks, parts=x.parts)
        written = _written(func, args, kwargs or {})
        _writes_only_ranks_own(func, written)
        ranks = _same_ranks(func, mine)
        parts = _parts(func, mine)
        results = [func(*a, **k) for a, k in _of_ranks(leaves, treedef, len(mine[0].shards))]
        _writes_to_every_part(func, written)
        columns = [_tree.flatten(r, _tree.is_tensor) for r in results]
        followed = _is_followed(leaves)
        stacked = [
            _gathered(func, values, mine[0].shown, followed, ranks, parts)
            for values in zip(*(c[0] for c in columns), strict=True)
        ]
        return _tree.unflatten(columns[0][1], stacked)


def _collective(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a collective that a script calls outside of functions.

    Raises:
        ImportError: this package lacks the room that runs them.
    """
    eager = service(Eager)
    if eager is None:
        raise absent(f"{func}, outside of a function in a fake world", "eager")
    return eager.collective(func, args, kwargs)


def _writes_only_ranks_own(func: Any, written: Iterable[Any]) -> None:
    """Refuse to write per-rank values into a tensor that all ranks share.

    Raises:
        ShardError: an argument that `func` writes to is a plain tensor with values.
    """
    if any(_has_values(x) and not isinstance(x, SimulatedTensor) for x in written):
        got = "ranks write different values to a plain tensor, which all ranks share"
        fix = (
            "make the tensor a DTensor, DTensor.from_local(x, mesh), before you create the "
            "optimizer"
        )
        raise ShardError.of(f"{func}", got, fix=fix)


def _parts(func: Any, tensors: Sequence[SimulatedTensor]) -> tuple[Sequence[int], ...]:
    """Return the parts of a result that shares memory with its argument."""
    is_view = any(value.alias_info for value in _compat.schema(func).returns)
    return next((x.parts for x in tensors if x.parts), ()) if is_view else ()


def _writes_to_every_part(func: Any, written: Iterable[Any]) -> None:
    """Refuse a write after which the parts of a mesh hold other values of one DTensor.

    Raises:
        PlacementError: they do; the DTensor keeps those of its own part.
    """
    for x in written:
        if not isinstance(x, SimulatedTensor):
            continue
        if not all(_is_same(*pair) for pair in x._copies()):
            own = [x.ranks[k] if x.ranks else k for k in x.parts[0]]
            got = f"the code writes to local tensors of a DTensor on a submesh, ranks {own}; "
            got += "after the write, ranks outside of this submesh would hold different values"
            fix = "write to to_local().clone(), or use a DTensor on the whole mesh"
            raise PlacementError.of(str(func), got, fix=fix)


def _is_followed(leaves: Sequence[Any]) -> bool:
    """Return whether autograd records an op with these arguments.

    Raises:
        ShardError: one of them was made without autograd, and its sizes differ between ranks:
            the formulas of derivatives would take those of one rank.
    """
    if not torch.is_grad_enabled():
        return False
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    followed = [x for x in tensors if x.requires_grad]
    for x in followed:
        if isinstance(x, SimulatedTensor) and x.is_of_one_rank():
            shapes = [tuple(shard.shape) for shard in x.shards[:8]]
            raise ShardError.of(
                "a local tensor of simulated ranks that requires grad",
                f"the tensor's shapes differ between ranks: {shapes}",
                fix="call requires_grad_() of the DTensor before to_local()",
            )
    return bool(followed)


def _has_sizes_of_all(shards: Sequence[torch.Tensor], followed: bool) -> bool:
    """Return whether a tensor's sizes are those of all ranks. On other stages of a pipeline than
    its own a tensor may have another number of dims.
    """
    has_same_dims = len({x.dim() for x in shards}) == 1
    return has_same_dims and (followed or _compat.in_backward())


def _sizes_of_ranks(rows: Sequence[Sequence[int]]) -> list[Any]:
    """Join the sizes or strides of all ranks into one tuple."""
    return [_compat.size_of_ranks(column) for column in zip(*rows, strict=True)]


def _of_ranks(leaves: list[Any], treedef: Any, n: int) -> Iterator[tuple[Any, Any]]:
    """Select each rank's arguments."""
    columns = [x.shards if isinstance(x, SimulatedTensor) else None for x in leaves]
    pairs = [*zip(leaves, columns, strict=True)]
    for rank in range(n):
        own = [_compat.of_rank(x, rank) if shards is None else shards[rank] for x, shards in pairs]
        yield _tree.unflatten(treedef, own)


def _same_ranks(func: Any, tensors: Sequence[SimulatedTensor]) -> tuple[int, ...] | None:
    """Return the ranks whose local tensors an op combines.

    Raises:
        PlacementError: some are of other ranks, and would be combined by their places in two
            meshes.
    """
    known = [x.ranks or range(len(x.shards)) for x in tensors]
    first = tensors[0]
    for x, ranks in zip(tensors, known, strict=True):
        is_unnamed = x.ranks is None or first.ranks is None
        if len(x.shards) != len(first.shards) or not (is_unnamed or x.ranks == first.ranks):
            got = (
                f"the op combines local tensors of ranks {[*known[0]]} with local tensors of ranks "
                f"{[*ranks]}"
            )
            fix = (
                "combine local tensors of DTensors on the same mesh or submesh; or x.full_tensor()"
            )
            needed = "local tensors of the same ranks, in the same order"
            raise PlacementError.of(str(func), got, needed=needed, fix=fix)
    return next((x.ranks for x in tensors if x.ranks is not None), None)


def _gathered(
    func: Any,
    values: tuple[Any, ...],
    shown: int,
    followed: bool,
    ranks: tuple[int, ...] | None,
    parts: tuple[Sequence[int], ...],
) -> Any:
    """Join the results of all ranks into a SimulatedTensor; non-tensors must be equal
    on all ranks.
    """
    if isinstance(values[0], torch.Tensor):
        return SimulatedTensor(values, shown, followed, ranks, parts)
    if len({str(v) for v in values}) > 1:  # as text, in which nan equals nan
        text = problem(
            str(func),
            f"ranks hold different values: {[*values[:8]]}",
            fix="read the global value with sf.full(x)",
        )
        raise DivergenceError(text, fix="sf.full(x)")
    return values[0]


def shown(mesh: DeviceMesh, rank: int | None = None) -> int:
    """Return the row-major place, in a mesh, of the rank that is displayed; 0 if it
    is not there.
    """
    ranks = mesh.mesh.flatten().tolist()
    rank = dist.get_rank() if rank is None else rank
    return ranks.index(rank) if rank in ranks else 0


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """List the ranks of a mesh, in row-major order."""
    return tuple(mesh.mesh.flatten().tolist())


def of_one_part(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Select the local tensors of one submesh's ranks.

    Raises:
        PlacementError: the tensor is of other ranks, or the other parts hold other values, which
            a simulated world would forget.
    """
    if not isinstance(x, SimulatedTensor):
        return x
    ranks = ranks_of(mesh)
    is_of_mesh = x.ranks is None and len(x.shards) == len(ranks)
    if is_of_mesh or x.ranks == ranks:
        return x
    what = "a DTensor in a simulated world"
    known = range(len(x.shards)) if x.ranks is None else x.ranks
    if not {*ranks} <= {*known}:
        got = f"the local tensors belong to ranks {[*known]}, but the mesh has ranks {[*ranks]}"
        fix = "sf.distribute(sf.full(dtensor), mesh, placements)"
        raise PlacementError.of(what, got, fix=fix, mesh=mesh)
    own = [x.of_rank(rank) for rank in ranks]
    for part in parts_of(mesh):
        if not {*part} <= {*known}:
            continue
        theirs = [x.of_rank(rank) for rank in part]
        pairs = zip(own, theirs, strict=True)
        if not all(_is_same(a, b) for a, b in pairs):
            got = (
                f"the DTensor is on a submesh with the ranks {[*ranks]}, but the ranks {part} of "
                "another submesh hold different values"
            )
            fix = "DTensor.from_local(x, mesh, placements) with the whole mesh"
            raise PlacementError.of(what, got, fix=fix, mesh=mesh)
    return SimulatedTensor(own, shown(mesh), ranks=ranks)


def of_every_part(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Extend the local tensors of one submesh's ranks to those of all ranks of the root mesh, of
    which all parts hold the same.

    Args:
        x: the local tensors of the ranks of `mesh`.
        mesh: the submesh.

    Returns:
        the tensor of each rank: of the ranks of `mesh` those of x, of others copies that stay
        equal to them.
    """
    if not isinstance(x, SimulatedTensor) or x.ranks not in (None, ranks_of(mesh)):
        return x
    rows = parts_of(mesh)
    places = {rank: k for part in rows for k, rank in enumerate(part)}
    own = {*ranks_of(mesh)}
    root = _compat.root_mesh(mesh) if places else mesh
    ranks = ranks_of(root)
    if not places:
        return SimulatedTensor(x.shards, x.shown, x.followed, ranks)
    shards = [x.shards[places[r]] if r in own else x.shards[places[r]].clone() for r in ranks]
    rows.sort(key=own.isdisjoint)  # its own first
    parts = [[ranks.index(rank) for rank in part] for part in rows]
    return SimulatedTensor(shards, shown(root), x.followed, ranks, parts)


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal, nan equal to nan."""
    if a.shape != b.shape:
        return False
    are_nan = a.isnan() & b.isnan()
    are_same = (a == b) | are_nan
    return bool(are_same.all())


def parts_of(mesh: DeviceMesh) -> list[list[int]]:
    """List the ranks of a submesh, and of each other submesh of its root mesh; none of a mesh that
    is no such part.
    """
    root = _compat.root_mesh(mesh)
    names = mesh.mesh_dim_names or ()
    every = root.mesh_dim_names or ()
    if not {*names} < {*every}:
        return []
    dims = [every.index(name) for name in names]
    others = [dim for dim in range(root.ndim) if dim not in dims]
    order = root.mesh.permute(*others, *dims)
    rows = order.reshape(-1, mesh.size())
    return rows.tolist()


class UnreadTensor(torch.Tensor):
    """A local tensor without values: shapes and dtypes only, in `fake_world(n, numerics=False)`."""

    @staticmethod
    def __new__(cls, like: torch.Tensor, device: torch.device | None = None) -> UnreadTensor:
        device = device or like.device
        return torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )

    def __init__(self, like: torch.Tensor, device: torch.device | None = None) -> None:
        self.like = like.to("meta")

    def __repr__(self, **_: Any) -> str:
        return f"UnreadTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def tolist(self) -> Any:
        raise _unread("tolist")

    def numpy(self, **_: Any) -> Any:
        raise _unread("numpy")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            raise _unread(func)
        kwargs = dict(kwargs or {})
        if any(map(_has_values, _written(func, args, kwargs))):
            raise _unread(func)  # it would be written to a tensor that has values
        asked = kwargs.pop("device", None)
        leaves = _tree.leaves((args, kwargs))
        device = asked or next(x.device for x in leaves if isinstance(x, UnreadTensor))
        args, kwargs = _tree.tree_map(_to_meta, (args, kwargs))
        try:
            out = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if "meta tensor" in str(error):
                raise _unread(func) from error
            raise
        return _tree.tree_map(
            lambda x: UnreadTensor(x, device) if isinstance(x, torch.Tensor) else x, out
        )


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """List the arguments that an op writes to."""
    if func.namespace == "c10d":  # whose schemas do not say it
        return _tree.leaves((args, kwargs))
    found: list[Any] = []
    for k, argument in enumerate(_compat.schema(func).arguments):
        alias = argument.alias_info
        if alias is None or not alias.is_write:
            continue
        is_positional = k < len(args)
        given = args[k] if is_positional else kwargs.get(argument.name)
        found += _tree.leaves((given,))
    return found


def _has_values(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not isinstance(x, UnreadTensor)


def _to_meta(x: Any) -> Any:
    if isinstance(x, UnreadTensor):
        return x.like
    return x.to("meta") if isinstance(x, torch.Tensor) else x


def _unread(what: Any) -> FakeValueError:
    fix = "fake_world(n, numerics=True) computes true values"
    return FakeValueError.of(
        str(what), "the code reads a value, but the world has no values (numerics=False)", fix=fix
    )


class DonatedTensor(torch.Tensor):
    """The remains of a donated argument. Every use raises an error that names the call that
    took it.
    """

    call: str

    @staticmethod
    def __new__(cls, like: torch.Tensor, call: str) -> DonatedTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )

    def __init__(self, like: torch.Tensor, call: str) -> None:
        self.call = call

    def __repr__(self, **_: Any) -> str:
        return f"DonatedTensor(to {self.call})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise used_after_donation(
            next(x for x in _tree.leaves((args, kwargs or {})) if isinstance(x, DonatedTensor)).call
        )


def remains_of(call: str) -> type[DonatedTensor]:
    """Make the tensor class for the arguments that a call took by donation."""

    class Remains(DonatedTensor):
        """As `DonatedTensor`."""

    Remains.call = call
    return Remains


def used_after_donation(call: str) -> ShardError:
    """Build the error for a donated argument that is used afterwards."""
    fix = "use the call's results, or leave the argument out of donate_argnums"
    return ShardError.of(
        call, "the tensor was donated to this call, so its memory is gone", fix=fix
    )
