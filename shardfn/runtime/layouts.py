"""Local tensors: arguments read as those of each rank, in the memory layout that the program was
lowered for, and results as DTensors.

An argument is copied if its layout differs from the program's.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from .. import _compat, _tree
from ..capture import Captured
from ..capture.rewrites.as_strided import refuse_view
from ..capture.rewrites.sparse_borders import results
from ..capture.rewrites.sparse_matrices import SparseMatrix
from ..errors import PlacementError, call_site
from ..mesh import all_coordinates, axes_of
from ..own_dtensors import has_own
from ..partition import Plan, layout
from ..partition.rules.dtypes import COMPUTED, INTEGERS
from ..partition.strided_shards import elements, strided_dims
from ..placement import Zigzag, marks_of, torch_placements
from ..random import ambient
from ..simulated import SimulatedDTensor, SimulatedTensor, dtensors, on_mesh, own_of_part
from ..types import MEAN, TENSOR, LocalProgram, MeshAxes, MeshPlacements, stage_of
from .arguments import Placed, said
from .store import Layouts

Reader = Callable[[Any], Any]  # an argument -> its local tensor, or a list of all ranks'


def readers(
    name: str,
    placed: Placed,
    captured: Captured,
    programs: Sequence[LocalProgram],
    *,
    are_alike: bool = True,
) -> list[tuple[int, Reader]]:
    """Build a reader of local tensors for each tensor among the leaves, with its position.

    Args:
        name: the name of the transformed function.
        placed: the arguments.
        captured: the capture from which the programs were made.
        programs: one for each rank that is run here.
        are_alike: whether all take tensors of one shape, where shards are even.
    """
    wanted = _strides(programs)
    traced = _values(captured.program.graph.graph)
    simulated = placed.is_simulated
    out = []
    rows = zip(placed.tensors, placed.dtensors, placed.marks, placed.avals, strict=True)
    for k, (i, is_dtensor, marks, aval) in enumerate(rows):
        read = reader(is_dtensor, marks, placed)
        is_dense = are_alike and aval.stride == traced[k].stride()
        if not is_dense or _is_odd(aval.shape, aval.stride, aval.dtype):
            if simulated:
                read = _all_laid_out(read, wanted[k])
            elif read is itself and aval.shape == () and not aval.dtype.is_complex:
                read = resolved  # it has no strides
            else:
                read = _laid_out(read, wanted[k][0])
        if k in captured.strided:
            read = _from_the_start(
                read, captured.strided[k] and not is_dtensor, name, placed.paths[i]
            )
        out.append((i, read))
    return out


def gathering(
    rows: Sequence[tuple[int, Reader]], count: int
) -> Callable[[list[Any]], list[torch.Tensor]]:
    """Build the function from all `count` leaves to the local tensors that a program takes."""
    places = [i for i, _ in rows]
    pick = list if places == list(range(count)) else picking(places)
    reads = [read for _, read in rows]
    scalars = [k for k, read in enumerate(reads) if read is resolved]
    quick = itself, resolved, local_of
    others = [(k, read) for k, read in enumerate(reads) if read not in quick]
    pick_scalars = picking(scalars)
    dtensors = [k for k, read in enumerate(reads) if read is local_of]
    pick_dtensors = picking(dtensors)

    def gather(leaves: list[Any]) -> list[torch.Tensor]:
        given = pick(leaves)
        if any(map(torch.Tensor.is_neg, pick_scalars(given))):
            for k in scalars:
                given[k] = resolved(given[k])
        locals_ = _compat.calls.locals_of(pick_dtensors(given))
        for k, local in zip(dtensors, locals_, strict=True):
            given[k] = local
        for k, read in others:
            given[k] = read(given[k])
        return given

    return gather


def picking(places: list[int]) -> Callable[[list[Any]], list[Any]]:
    """Build the function that picks the elements of a list at fixed positions."""
    if len(places) < 2:
        return lambda leaves: [leaves[i] for i in places]
    pick = operator.itemgetter(*places)
    return lambda leaves: list(pick(leaves))


def closed_over(
    captured: Captured,
    programs: Sequence[LocalProgram],
    ranks: Sequence[int] | None = None,
    take: Callable[[int], torch.Tensor] | None = None,
) -> Callable[[], list[list[torch.Tensor]]]:
    """Build the readers of closed-over tensors, a list for each program.

    Args:
        captured: the capture from which the programs were made.
        programs: one for each rank that is run here.
        ranks: their numbers in a simulated world; by default those of all, in order.
        take: draws the state of random calls; by default from `sf.random.state`.
    """
    closed = list(captured.closed_over)
    draws = captured.outside.draws
    read = _with_state(captured, closed, take) if draws else lambda: closed
    numbers = range(len(programs)) if ranks is None else ranks
    are_placed = any(isinstance(x, DTensor) for x in closed)
    if not are_placed and not any(_is_odd(x.shape, x.stride(), x.dtype) for x in closed):
        return lambda: [read()] * len(programs)
    columns = _strides(programs)[-len(closed) :]
    rows = list(zip(*columns, strict=True))
    kinds = _of_parts(closed, rows[0], programs[0].axes.names)

    def laid() -> list[list[torch.Tensor]]:
        now = [kinds[i](x) if i in kinds else x for i, x in enumerate(read())]
        return [
            [laid_out(local_of_rank(x, rank), stride) for x, stride in zip(now, row, strict=True)]
            for rank, row in zip(numbers, rows, strict=True)
        ]

    return laid


def _of_parts(
    closed: Sequence[torch.Tensor], strides: Sequence[Sequence[int]], names: tuple[str, ...]
) -> dict[int, Callable[[Any], torch.Tensor]]:
    """Find closed-over DTensors on submeshes, and how a program takes them; in per-rank code they
    have one more dim.
    """
    own = {}
    for i, (x, stride) in enumerate(zip(closed, strides, strict=True)):
        if len(stride) > x.dim():
            own[i] = row_of_part
        elif isinstance(x, DTensor) and axes_of(x.device_mesh).names != names:
            own[i] = on_root
    return own


def on_root(x: DTensor) -> DTensor:
    """Turn a DTensor on a submesh into one on its root mesh."""
    return on_mesh(x, _compat.root_mesh(x.device_mesh))


def row_of_part(x: Any) -> torch.Tensor:
    """Turn the local tensor of a DTensor on a submesh into a row of a global tensor
    of all ranks.
    """
    return own_of_part(x).unsqueeze(0)


def local_of_rank(x: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the local tensor of a closed-over tensor, of this rank or of a simulated one."""
    local = _compat.local_tensor(x) if isinstance(x, DTensor) else x
    return local.shards[rank] if isinstance(local, SimulatedTensor) else local


def closed_over_of_kinds(
    captures: Sequence[Captured], programs: Sequence[LocalProgram]
) -> Callable[[], list[list[torch.Tensor]]]:
    """Build the readers of closed-over tensors where ranks have captures of their own."""
    states: list[torch.Tensor] = []

    def take(draws: int) -> torch.Tensor:
        states[:] = states or [ambient.state.take(draws)]
        return states[0]

    kinds = {id(captured): captured for captured in captures}
    ranks = {
        key: [r for r, captured in enumerate(captures) if id(captured) == key] for key in kinds
    }
    reads = {
        key: closed_over(kinds[key], [programs[r] for r in ranks[key]], ranks[key], take)
        for key in kinds
    }

    def read() -> list[list[torch.Tensor]]:
        states.clear()
        found = {}
        for key, own in reads.items():
            found.update(zip(ranks[key], own(), strict=True))
        return [found[r] for r in range(len(captures))]

    return read


def _with_state(
    captured: Captured, closed: list[torch.Tensor], take: Callable[[int], torch.Tensor] | None
) -> Callable[[], list[torch.Tensor]]:
    """Build the readers of closed-over tensors of a program with random calls, which takes a random
    state too.
    """
    (at,) = (i for i, x in enumerate(closed) if x is ambient.PLACEHOLDER_STATE)
    first = len(_values(captured.program.graph.graph)) - len(closed)
    device = _values(captured.program.graph.graph)[first + at].device
    draws = captured.outside.draws
    before = closed[:at]
    after = closed[at + 1 :]
    drawn = lambda: (take or ambient.state.take)(draws)
    return lambda: [*before, drawn().to(device), *after]


def laid_out(x: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Give a tensor these strides, copying only if it has others, and resolve its neg and conj
    bits.
    """
    if x.stride() == stride and not x.is_neg() and not x.is_conj():
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


def resolved(x: torch.Tensor) -> torch.Tensor:
    """Copy a real 0-dim tensor if its neg bit is set."""
    return x.resolve_neg()


def _is_odd(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> bool:
    """Return whether a tensor's layout may differ from the program's: gaps, overlaps, or a neg bit.

    torch sets the neg bit on the imaginary part of a conjugate, whose strides have gaps if it
    has two elements.
    """
    dense = layout.dense_strides(shape, layout.stride_order(shape, stride))
    return tuple(stride) != dense or dtype.is_complex or all(n == 1 for n in shape)


def _values(graph: torch.fx.Graph) -> list[torch.Tensor]:
    return [node.meta["val"] for node in graph.find_nodes(op="placeholder")]


def _strides(programs: Sequence[LocalProgram]) -> list[tuple[tuple[int, ...], ...]]:
    """Collect the strides of each input in each program, without the coordinates that
    come first.
    """
    skip = len(programs[0].axes.names)
    rows = [[x.stride() for x in _values(program.graph)[skip:]] for program in programs]
    return list(zip(*rows, strict=True))


def _laid_out(read: Reader, stride: Sequence[int]) -> Reader:
    return lambda x: laid_out(read(x), stride)


def _all_laid_out(read: Reader, strides: Sequence[Sequence[int]]) -> Reader:
    return lambda x: [
        laid_out(local, stride) for local, stride in zip(read(x), strides, strict=True)
    ]


def _from_the_start(read: Reader, is_refused: bool, name: str, path: str) -> Reader:
    """Build a reader of local tensors that start at offset 0 of their memory, for as_strided. A
    view is copied or refused.
    """

    def start(x: torch.Tensor) -> torch.Tensor:
        return x.clone() if x.storage_offset() else x

    def own(x: Any) -> Any:
        if is_refused:
            refuse_view(name, x, path)
        local = read(x)
        return [start(shard) for shard in local] if isinstance(local, list) else start(local)

    return own


def reader(is_dtensor: bool, marks: MeshPlacements, placed: Placed) -> Callable[[Any], Any]:
    """Build the reader of one argument's local tensor: this rank's, or in a simulated world a list
    of all ranks'.
    """
    simulated = placed.is_simulated
    if is_dtensor:
        return _all_shards(len(all_coordinates(placed.axes))) if simulated else local_of
    if simulated:
        everyone = all_coordinates(placed.axes)
        if all(m == "R" for m in marks):
            return lambda x: [x] * len(everyone)
        return lambda x: [cut(x, marks, placed.axes, c) for c in everyone]
    if all(m == "R" for m in marks):
        return itself
    coordinate = placed.coordinate
    return lambda x: cut(x, marks, placed.axes, coordinate)


def local_of(x: Any) -> torch.Tensor:
    """Return the local tensor of a DTensor."""
    return _compat.local_tensor(x)


def itself(x: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor, which is its own local tensor."""
    return x


def _all_shards(n: int) -> Callable[[Any], list[torch.Tensor]]:
    def read(x: Any) -> list[torch.Tensor]:
        local = _compat.local_tensor(x)
        return local.shards if isinstance(local, SimulatedTensor) else [local] * n

    return read


def cut(
    x: torch.Tensor, marks: MeshPlacements, axes: MeshAxes, coordinate: Sequence[int]
) -> torch.Tensor:
    """Copy one rank's shard out of a global tensor, keeping the global tensor's order of dims in
    memory. A rank that is not on the stage of the tensor gets an empty one.
    """
    if not layout.is_here(marks, coordinate):
        return x.new_empty(layout.ELSEWHERE)
    out = whole = carried(x)
    strided = strided_dims(marks)
    for dim in strided:
        size = x.shape[dim]
        mine = elements(size, dim, marks, axes.sizes, coordinate)
        out = out.index_select(dim, mine.to(x.device))
    for mark, n, c in zip(marks, axes.sizes, coordinate, strict=True):
        found = layout.split(mark)
        if found and n > 1 and found[0] not in strided:
            start, size = layout.chunk(out.shape[found[0]], found[1], n, c)
            out = out.narrow(found[0], start, size)
    if out is whole:
        return x
    order = layout.stride_order(x.shape, x.stride())
    fresh = torch.empty_strided(
        out.shape, layout.dense_strides(out.shape, order), dtype=out.dtype, device=x.device
    )
    return fresh.copy_(out).view(x.dtype)


def carried(x: torch.Tensor) -> torch.Tensor:
    """View a tensor in a dtype that has kernels for moving elements: integers for dtypes that torch
    only stores.
    """
    return x if x.dtype in COMPUTED else x.view(INTEGERS[x.itemsize])


def join(
    shards: Sequence[torch.Tensor], shape: Sequence[int], marks: MeshPlacements, axes: MeshAxes
) -> torch.Tensor:
    """Assemble the global tensor from the local tensors of all ranks."""
    rows = zip(all_coordinates(axes), map(carried, shards), strict=True)
    values = {c: shard for c, shard in rows if layout.is_here(marks, c)}
    dtype = shards[0].dtype
    for k in reversed(range(len(marks))):
        groups: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for c, value in sorted(values.items()):
            groups.setdefault(c[:k], []).append(value)
        values = {c: _joined(group, marks[k]) for c, group in groups.items()}
    (whole,) = values.values()
    for dim in strided_dims(marks):
        whole = in_order(whole, dim, marks, axes)
    return whole if whole.dtype == dtype else whole.view(dtype)


def in_order(x: torch.Tensor, dim: int, marks: MeshPlacements, axes: MeshAxes) -> torch.Tensor:
    """Put the elements along a dim, which follow each other as the ranks hold them, in order."""
    order = _stored(x.shape[dim], dim, marks, axes).argsort()
    return carried(x).index_select(dim, order.to(x.device)).view(x.dtype)


def as_chunks(x: DTensor) -> DTensor:
    """Describe a DTensor with zigzags as one with plain chunks, whose elements are in the order in
    which the ranks hold them.
    """
    turning = {p.dim for p in x.placements if isinstance(p, Zigzag)}
    dims = [getattr(p, "dim", None) for p in x.placements]
    rows = zip(x.placements, dims, strict=True)
    plain = tuple(Shard(dim) if dim in turning else p for p, dim in rows)
    spec = _compat.dtensor_spec(x.device_mesh, plain, x.shape, x.stride(), x.dtype)
    return dtensors([_compat.local_tensor(x)], [spec])[0]


def on_all_stages(x: DTensor) -> DTensor:
    """Replicate a DTensor of which a stage has the values over the axes of stages, on real ranks: a
    broadcast over each.
    """
    mesh: Any = x.device_mesh
    axes, coordinates = axes_of(mesh), mesh.get_coordinate()
    marks = marks_of(list(x.placements), x.shape, axes)
    now = list(marks)
    local = _compat.local_tensor(x)
    for k, mark in enumerate(marks):
        stage = stage_of(mark)
        if stage is None:
            continue
        now[k] = "R"
        if not layout.is_here(now, coordinates):
            continue  # nor are the others of this group
        payload = local.new_empty(layout.local_shape(x.shape, now, axes.sizes, coordinates))
        if coordinates[k] == stage.coordinate:
            carried(payload).copy_(carried(local))
        sent = carried(payload).view(-1).view(torch.uint8)
        dist.broadcast(sent, group=mesh.get_group(k), group_src=stage.coordinate)
        local = payload
    spec = _compat.dtensor_spec(mesh, torch_placements(tuple(now)), x.shape, x.stride(), x.dtype)
    return dtensors([local], [spec])[0]


def _stored(size: int, dim: int, marks: MeshPlacements, axes: MeshAxes) -> torch.Tensor:
    """List the indices of a dim in the order of the ranks that hold them."""
    shards = [layout.split(m) is not None and layout.dim_and_unit(m)[0] == dim for m in marks]
    held = [
        elements(size, dim, marks, axes.sizes, c)
        for c in all_coordinates(axes)
        if all(is_shard or not k for k, is_shard in zip(c, shards, strict=True))
    ]
    return torch.cat(held)


def _joined(group: list[torch.Tensor], mark: Any) -> torch.Tensor:
    found = layout.split(mark)
    if found:
        return torch.cat(group, found[0])
    if mark == "R" or stage_of(mark) is not None:
        return group[0]
    reduce = {"sum": torch.sum, MEAN: torch.mean, "max": torch.amax, "min": torch.amin}[mark]
    return reduce(torch.stack(group), 0).to(group[0].dtype)  # torch sums integers in 64 bits


def spec_of(mesh: Any, marks: MeshPlacements, value: torch.Tensor) -> Any:
    """Build the DTensorSpec of a result."""
    stride = value.stride()
    if not layout.is_dense(value.shape, stride):
        stride = layout.dense_strides(value.shape, range(value.dim()))
    return _compat.dtensor_spec(mesh, torch_placements(marks), value.shape, stride, value.dtype)


@attrs.frozen(eq=False)
class LocalLayouts:
    """The memory layouts of local tensors that a program was compiled for.

    Args:
        name: of the function, for errors.
        placed: its arguments.
        places: of the DTensors, among the tensors.
        wanted: a fake tensor like each of their local tensors.
        known: those of the last call.
    """

    name: str
    placed: Placed
    places: tuple[int, ...]
    wanted: tuple[torch.Tensor, ...]
    known: Layouts = attrs.field(factory=Layouts, init=False)

    def fitted(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Give the local tensors of a call the layouts of the program, copying those with other
        strides.

        Raises:
            PlacementError: one has another shape or dtype than the program.
        """
        is_every = len(inputs) == len(self.places)
        mine = inputs if is_every else [inputs[k] for k in self.places]
        if self.known.are_same(mine):
            return inputs
        fitted = list(inputs)
        for k, x, like in zip(self.places, mine, self.wanted, strict=True):
            fitted[k] = self._fitted(k, x, like)
        if all(map(_is_same, fitted, inputs)):
            self.known.put(mine)
        return fitted

    def _fitted(self, k: int, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Give one local tensor the program's strides."""
        if (x.shape, x.dtype) != (like.shape, like.dtype):
            raise self._refused(k, x, like)
        if _has_strides(x, like):
            return x
        copy = torch.empty_strided(like.shape, like.stride(), dtype=x.dtype, device=x.device)
        return copy.copy_(x)

    def _refused(self, k: int, x: torch.Tensor, like: torch.Tensor) -> PlacementError:
        path = self.placed.paths[self.placed.tensors[k]]
        return PlacementError.of(
            f"{self.name}, argument {path}",
            f"the local tensor of the DTensor is {said(x)}",
            needed=f"{said(like)}, this rank's shard of the global tensor",
            fix="sf.from_local(x, mesh, placements), which checks the local shape",
            source=call_site(),
            arg_path=path,
        )


def local_layouts(name: str, placed: Placed, inputs: Sequence[torch.Tensor]) -> LocalLayouts | None:
    """Build the LocalLayouts of the DTensor arguments; None without one.

    Args:
        name: of the function, for errors.
        placed: its arguments.
        inputs: fake tensors like those that the program reads of its arguments.
    """
    places = tuple(k for k, flag in enumerate(placed.dtensors) if flag)
    if not places:
        return None
    return LocalLayouts(name, placed, places, tuple(inputs[k] for k in places))


def _is_same(x: Any, y: Any) -> bool:
    return x is y


def _has_strides(x: torch.Tensor, like: torch.Tensor) -> bool:
    """Return whether a tensor's elements lie as in another tensor of its shape."""
    if x.stride() == like.stride() or not x.numel():
        return True
    rows = zip(x.shape, x.stride(), like.stride(), strict=True)
    return all(n == 1 or mine == wanted for n, mine, wanted in rows)


# of local results, and of spare DTensors that they may be put into
Maker = Callable[..., list[Any]]


def maker(placed: Placed, captured: Captured, partition: Plan) -> Maker | None:
    """Build the function from local results to a call's results; None if they are the same."""
    if placed.mesh is None:
        return None
    count = captured.program.out_leaves.count(TENSOR)
    (output,) = captured.program.graph.graph.find_nodes(op="output")
    values = [n.meta["val"] for n in output.args[0][:count]]
    slots = partition.outs[:count]
    unreduced = {slot.number for slot, _ in partition.unreduced}
    pairs = zip(slots, values, strict=True)
    specs = [spec_of(placed.mesh, slot.placements, value) for slot, value in pairs]
    specs = [
        _compat.unreduced_spec(spec) if slot.number in unreduced else spec
        for spec, slot in zip(specs, slots, strict=True)
    ]
    are_own = any(has_own(spec.placements) for spec in specs)
    kind = SimulatedDTensor if placed.is_simulated else DTensor
    make = dtensors if are_own else functools.partial(_compat.dtensors, kind=kind)
    places = _places(placed, specs)

    def made(outs: Any, spares: list[DTensor] | None = None) -> list[Any]:
        if spares is None:
            return make(outs, specs)
        return _compat.calls.placed_again(outs, specs, spares, places, make)

    return made


def _places(placed: Placed, specs: list[Any]) -> tuple[int, ...]:
    """Match each result with a donated DTensor of its shape, strides and dtype; -1 without one, as
    for a result at a placement of our own, whose class is another.
    """
    avals = dict(zip(placed.tensors, placed.avals, strict=True))
    rows = [avals[i] for i in placed.donated]
    free: dict[Any, list[int]] = {}
    for k, x in reversed([*enumerate(rows)]):
        key = tuple(x.shape), tuple(x.stride), x.dtype
        free.setdefault(key, []).append(k)
    metas = [None if has_own(spec.placements) else spec.tensor_meta for spec in specs]
    keys = [x and (tuple(x.shape), tuple(x.stride), x.dtype) for x in metas]
    return tuple(free[key].pop() if free.get(key) else -1 for key in keys)


def in_tree(captured: Captured) -> Callable[[list[Any]], Any]:
    """Build the function from flat results to the tree that the user's function returns."""
    tree = captured.program.out_tree
    constants = captured.program.out_leaves
    unflatten = _tree.unflatten
    if SparseMatrix in _tree.container_classes(tree):
        return lambda outs: results(unflatten(tree, _filled(constants, outs)))
    if all(c is TENSOR for c in constants):
        return lambda outs: unflatten(tree, outs)
    return lambda outs: unflatten(tree, _filled(constants, outs))


def _filled(constants: tuple[Any, ...], outs: list[Any]) -> list[Any]:
    feed = iter(outs)
    return [next(feed) if c is TENSOR else c for c in constants]
