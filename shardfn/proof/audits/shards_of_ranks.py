"""Which elements of a single-device tensor each rank holds: as a DTensor says, or as the values of
both show.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor

from ... import _compat

REDUCED = {
    "sum": lambda terms: terms.sum(0),
    "avg": lambda terms: terms.mean(0),
    "product": lambda terms: terms.prod(0),
    "max": lambda terms: terms.amax(0),
    "min": lambda terms: terms.amin(0),
}


@attrs.frozen(eq=False)
class LocalValue:
    """A tensor of one process, as it was at one moment.

    Args:
        value: the local tensor.
        shape: the global shape; None for a plain tensor.
        placements: of a DTensor.
        mesh: of a DTensor: the size of each axis, and the coordinate of the rank.
        groups: of a DTensor: the ranks of this rank's group along each axis.
    """

    value: torch.Tensor
    shape: tuple[int, ...] | None = None
    placements: tuple[Any, ...] = ()
    mesh: tuple[tuple[int, int], ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()

    def elements(self) -> torch.Tensor | None:
        """Return the number of each local element in the flattened global tensor; None for a plain
        tensor.
        """
        if self.shape is None:
            return None
        count = torch.Size(self.shape).numel()
        elements = torch.arange(count).view(self.shape)
        for placement, (n, place) in zip(self.placements, self.mesh, strict=True):
            if hasattr(placement, "dim"):
                factor = _compat.split_factor(placement) or 1
                elements = _part(elements, placement.dim, n, place, factor)
        return elements


def _part(x: torch.Tensor, dim: int, n: int, place: int, factor: int) -> torch.Tensor:
    """Return one of n chunks of a tensor, or of each of `factor` chunks of it."""
    parts = []
    for block in x.chunk(factor, dim):
        chunks = block.chunk(n, dim)
        parts.append(chunks[place] if place < len(chunks) else block.narrow(dim, 0, 0))
    return torch.cat(parts, dim)


def local_value(x: torch.Tensor) -> LocalValue:
    """Copy a tensor of the calling process."""
    with torch.no_grad():
        if not isinstance(x, DTensor):
            return LocalValue(x.detach().clone())
        mesh = x.device_mesh
        place = mesh.get_coordinate() or [0] * mesh.ndim
        sizes = tuple(zip(mesh.shape, place, strict=True))
        rows = (mesh.mesh[(*place[:i], slice(None), *place[i + 1 :])] for i in range(mesh.ndim))
        groups = tuple(tuple(row.tolist()) for row in rows)
        local = x.to_local().detach().clone()
        return LocalValue(local, tuple(x.shape), tuple(x.placements), sizes, groups)


def reduced(values: Sequence[LocalValue | None]) -> list[LocalValue | None]:
    """Reduce what DTensors leave Partial, as every op that reads them does.

    Args:
        values: one tensor, of each rank; None where a rank has none.
    """
    for axis in range(max((len(x.placements) for x in values if x is not None), default=0)):
        values = [x if x is None else _reduced(x, axis, values) for x in values]
    return list(values)


def _reduced(x: LocalValue, axis: int, values: Sequence[LocalValue | None]) -> LocalValue:
    """Reduce a tensor over one mesh axis, if it is Partial there."""
    if axis >= len(x.placements) or not x.placements[axis].is_partial():
        return x
    terms = [values[rank] for rank in x.groups[axis]]
    known = [term.value for term in terms if term is not None]
    value = REDUCED[x.placements[axis].reduce_op](torch.stack(known))
    return attrs.evolve(x, value=value)


@attrs.frozen(eq=False)
class Held:
    """What a rank holds of a parameter of the single-device program.

    Args:
        name: of that parameter.
        elements: the number of each local element in the flattened parameter.
        is_equal: whether the values of both are equal.
    """

    name: str
    elements: torch.Tensor
    is_equal: bool


class Holdings:
    """Finds which parameter, and which part of it, a rank's parameter is.

    Args:
        single: the parameters of the single-device program at its start.
        close: whether two tensors are equal but for rounding.
    """

    def __init__(self, single: Mapping[str, torch.Tensor], close: Any) -> None:
        self.single, self.close = single, close

    def of_rank(self, local: Mapping[str, LocalValue]) -> dict[str, Held]:
        """Find what a rank holds, by the rank's own names.

        A parameter of other values than the one of its name is the part of another that has its
        values. Parameters that are constant, such as new biases, follow their module.
        """
        held: dict[str, Held] = {}
        places: dict[str, tuple[str, int, int]] = {}  # of a module: its other name, chunk, chunks
        for name, x in sorted(local.items(), key=lambda item: is_constant(item[1].value)):
            module = name.rpartition(".")[0]
            candidates = [*self.candidates(name, x)]
            equal = [h for h, _ in candidates if h.is_equal]
            known = places.get(module)
            best = None
            if known is not None:
                best = next((h for h, place in candidates if h.is_equal and place == known), None)
            best = best or (equal or [h for h, _ in candidates] or [None])[0]
            if best is None:
                continue
            held[name] = best
            place = next(place for h, place in candidates if h is best)
            if best.is_equal and not is_constant(x.value):
                places.setdefault(module, place)
        return held

    def candidates(self, name: str, x: LocalValue) -> Iterator[tuple[Held, tuple[str, int, int]]]:
        """Yield what a rank's parameter may be, the likeliest first."""
        elements = x.elements()
        if elements is not None:
            whole = self.single.get(name)
            if whole is not None and tuple(whole.shape) == x.shape:
                yield self.held(name, elements, x), (name.rpartition(".")[0], 0, 1)
            return
        own = [name] if name in self.single else []
        last = name.rpartition(".")[2]
        others = [n for n in self.single if n != name]
        others.sort(key=lambda n: n.rpartition(".")[2] != last)
        for other in [*own, *others]:
            for elements, chunk, chunks in parts_of(self.single[other].shape, x.value.shape):
                held = self.held(other, elements, x)
                if other == name or held.is_equal:
                    yield held, (other.rpartition(".")[0], chunk, chunks)

    def held(self, name: str, elements: torch.Tensor, x: LocalValue) -> Held:
        """Compare a rank's parameter with elements of a single-device one."""
        expected = self.single[name].reshape(-1)[elements]
        return Held(name, elements, self.close(x.value, expected))


def is_constant(x: torch.Tensor) -> bool:
    """Return whether all elements of a tensor are equal."""
    return x.numel() == 0 or bool((x == x.reshape(-1)[0]).all())


def parts_of(whole: Sequence[int], part: Sequence[int]) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Yield the parts of a tensor that have a shape: all of it, or a chunk along one dim.

    Args:
        whole: the shape of the tensor.
        part: the shape of a part, which may lack a dim of one element.

    Yields:
        The numbers of the elements, the number of the chunk, and the number of chunks.
    """
    whole, part = tuple(whole), tuple(part)
    elements = torch.arange(torch.Size(whole).numel()).view(whole)
    if whole == part:
        yield elements, 0, 1
        return
    if len(whole) == len(part) + 1 and whole[1:] == part:
        for i in range(whole[0]):
            yield elements[i], i, whole[0]
    if len(whole) != len(part):
        return
    dims = [d for d, (n, m) in enumerate(zip(whole, part, strict=True)) if n != m]
    if len(dims) != 1 or part[dims[0]] > whole[dims[0]] or not part[dims[0]]:
        return
    (dim,) = dims
    n, m = whole[dim], part[dim]
    starts = sorted({*range(0, n - m + 1, m), n - m})
    for i, start in enumerate(starts):
        yield elements.narrow(dim, start, m), i, len(starts)
    step = round(n / m)
    each = torch.arange(n)
    for i in range(step):
        if len(each[i::step]) == m:
            yield elements.index_select(dim, each[i::step]), i, step
