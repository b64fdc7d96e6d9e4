"""The memory layout of arguments: an argument is copied if its layout differs from the one that
the program was lowered for.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import _compat
from ..capture import Captured
from ..capture.rewrites.strides import refuse_view
from ..mesh import axes_of
from ..partition import layout
from ..random import ambient
from ..simulated import SimulatedTensor, on_mesh, own_of_part
from ..types import LocalProgram
from .arguments import Placed, itself, local_of, reader

Reader = Callable[[Any], Any]  # an argument -> its local tensor, or a list of all ranks'


def readers(
    name: str,
    placed: Placed,
    captured: Captured,
    programs: Sequence[LocalProgram],
    *,
    are_alike: bool = True,
) -> list[tuple[int, Reader]]:
    """For each tensor among the leaves: its position, and a reader of its local tensors.

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
    """A function from all leaves, of which there are so many, to local tensors: one call of Python
    for each that needs one.
    """
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
    """A function from a list to the list of some of its elements."""
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
    """The readers of closed-over tensors: a list for each program.

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
    """The positions of DTensors on a part of the mesh of these axes, and how a program takes them.
    In the code of one rank they have one more dim.
    """
    own = {}
    for i, (x, stride) in enumerate(zip(closed, strides, strict=True)):
        if len(stride) > x.dim():
            own[i] = row_of_part
        elif isinstance(x, DTensor) and axes_of(x.device_mesh).names != names:
            own[i] = on_root
    return own


def on_root(x: DTensor) -> DTensor:
    """A DTensor on a part of a mesh as one on the mesh that it is a part of."""
    return on_mesh(x, _compat.root_mesh(x.device_mesh))


def row_of_part(x: Any) -> torch.Tensor:
    """Each rank's own tensor of a DTensor on a part of a mesh, as a row of one of all ranks."""
    root = _compat.root_mesh(x.device_mesh)
    return own_of_part(x, root).unsqueeze(0)


def local_of_rank(x: torch.Tensor, rank: int) -> torch.Tensor:
    """The local tensor of a closed-over tensor, of this rank or of a simulated one."""
    local = _compat.local_tensor(x) if isinstance(x, DTensor) else x
    return local.shards[rank] if isinstance(local, SimulatedTensor) else local


def closed_over_of_kinds(
    captures: Sequence[Captured], programs: Sequence[LocalProgram]
) -> Callable[[], list[list[torch.Tensor]]]:
    """The readers of closed-over tensors, where ranks have captures of their own."""
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
    """The readers of closed-over tensors for a program with random calls, which takes a state."""
    (at,) = (i for i, x in enumerate(closed) if x is ambient.PLACE)
    first = len(_values(captured.program.graph.graph)) - len(closed)
    device = _values(captured.program.graph.graph)[first + at].device
    draws = captured.outside.draws
    before = closed[:at]
    after = closed[at + 1 :]
    drawn = lambda: (take or ambient.state.take)(draws)
    return lambda: [*before, drawn().to(device), *after]


def laid_out(x: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """The tensor with these strides, copied only if it has others. Its neg and conj bits are
    resolved.
    """
    if x.stride() == stride and not x.is_neg() and not x.is_conj():
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


def resolved(x: torch.Tensor) -> torch.Tensor:
    """A real tensor of no dims, copied if its neg bit is set."""
    return x.resolve_neg()


def _is_odd(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether the layout of a tensor may differ from the program's: it has gaps or overlaps, or
    may have a neg bit.

    torch sets the neg bit on the imaginary part of a conjugate, whose strides have gaps if it
    has two elements.
    """
    dense = layout.dense_strides(shape, layout.stride_order(shape, stride))
    return tuple(stride) != dense or dtype.is_complex or all(n == 1 for n in shape)


def _values(graph: torch.fx.Graph) -> list[torch.Tensor]:
    return [node.meta["val"] for node in graph.find_nodes(op="placeholder")]


def _strides(programs: Sequence[LocalProgram]) -> list[tuple[tuple[int, ...], ...]]:
    """For each input of the programs, its strides in each program. Leaves out the coordinates,
    which come first.
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
    """A reader of local tensors that start their memory, for as_strided. A view is copied, or
    refused.
    """

    def start(x: torch.Tensor) -> torch.Tensor:
        return x.clone() if x.storage_offset() else x

    def own(x: Any) -> Any:
        if is_refused:
            refuse_view(name, x, path)
        local = read(x)
        return [start(shard) for shard in local] if isinstance(local, list) else start(local)

    return own
