"""The records that one compilation stage passes to the next, and the types of their fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import attrs
import torch
from torch.distributed.tensor import Placement

from .accepted import accept
from .source_text import Origin

# A placement on ONE mesh axis, as rules and plans write it:
#   "R"                         replicated
#   d                           sharded on dim d, in chunks as torch.chunk makes them
#   (d, unit)                   the same, but no chunk boundary inside a run of `unit` elements
#   (d, unit, outer)            a strided shard: dim d is viewed as so many blocks of equal size, of
#                               each of which a rank holds such a chunk
#   (d, unit, -outer)           a zigzag: the same, where the ranks of every second block are in
#                               reverse order, so that rank r of n holds chunks r and 2n - 1 - r
#   (d, unit, before, after)    the same with a halo: so many elements of the neighbours on
#                               either side, zeros at the ends
#   "sum" "max" "min"           Partial: each rank holds a term; the value is the reduction over
#                               the axis
#   "avg"                       Partial mean, of arguments and results only; inside a program it
#                               is a sum of shares
#   "@2" "@2.1"                 on stage 2 of a pipeline: coordinate 2 alone has the value (of its
#                               first, its second stage), and the others have none of it
AxisPlacement = str | int | tuple[int, int] | tuple[int, int, int] | tuple[int, int, int, int]
MeshPlacements = tuple[AxisPlacement, ...]  # one for each mesh axis
PARTIAL_KINDS = ("sum", "max", "min")
MEAN = "avg"
REDUCTIONS = (*PARTIAL_KINDS, MEAN)


class AtStage(NamedTuple):
    """A pipeline stage: its rank on the pipeline axis, and its index among the rank's stages."""

    coordinate: int
    chunk: int = 0

    @property
    def mark(self) -> str:
        """The placement on the axis of the pipeline."""
        return f"@{self.coordinate}" + (f".{self.chunk}" if self.chunk else "")


def stage_of(placement: AxisPlacement) -> AtStage | None:
    """Return the stage that a placement on one mesh axis names; None for any other."""
    if not isinstance(placement, str) or placement[0] != "@":
        return None
    coordinate, _, chunk = placement[1:].partition(".")
    return AtStage(int(coordinate), int(chunk or 0))


class IfPartial(tuple[AxisPlacement, ...]):
    """The placement of a result that may stay Partial. Sharding propagation chooses the placement
    of a result that is not Partial.
    """

    __slots__ = ()


def _shape(shape: Any) -> tuple[int, ...]:
    accept("ShapeDtype", shape=shape)
    return tuple(shape)


@attrs.frozen
class ShapeDtype:
    """The shape and dtype of a tensor, for use in place of a tensor with values.

    Args:
        shape: the global shape.
        dtype: a torch dtype.

    Raises:
        ShardError: shape is not a tuple of sizes, or dtype is not a torch dtype.

    Source: jax.ShapeDtypeStruct.

    Example:
        >>> ShapeDtype((2, 3), torch.float32).shape
        (2, 3)
    """

    shape: tuple[int, ...] = attrs.field(converter=_shape)
    dtype: torch.dtype = attrs.field(default=torch.float32)

    @dtype.validator
    def _check_dtype(self, _: Any, dtype: Any) -> None:
        accept("ShapeDtype", dtype=dtype)


@attrs.frozen
class Aval:
    """The metadata of one tensor (shape, strides, dtype, device type), as a hashable record."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @property
    def nbytes(self) -> int:
        size = self.dtype.itemsize
        for n in self.shape:
            size *= n
        return size


@attrs.frozen
class Cost:
    """The cost of sending over a mesh axis, in bytes over the fastest axis (the alpha-beta
    model).
    """

    # of a collective: between two ways that move the same bytes, the one with fewer collectives
    start: float = 1.0
    byte: float = 1.0
    # what a start takes where all ops are planned at once; None: the same
    wait: float | None = None


ROWS = "rows"  # the option of the rows that a rank of an axis can take
ATTENTION = "attention"  # the option of the way in which attention is sharded over an axis


@attrs.frozen
class AxisOption:
    """An option that the user set for a mesh axis.

    Args:
        name: the name of the option.
        axis: the mesh axis.
        value: the value that the user wrote.
    """

    name: str
    axis: str
    value: Any


@attrs.frozen
class MeshAxes:
    """A mesh without ranks and process groups: the names, sizes and link costs of its axes."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    costs: tuple[Cost, ...] = attrs.field(default=(), repr=False)  # of each axis; none: all equal
    # those on which propagation shards nothing: a pipeline's, whose stages are chosen afterwards
    closed: tuple[str, ...] = attrs.field(default=(), repr=False)
    options: tuple[AxisOption, ...] = attrs.field(default=(), repr=False)

    def option(self, name: str, axis: int) -> Any:
        """The value of an option of an axis, or None if the option is not set."""
        values = (x.value for x in self.options if (x.name, x.axis) == (name, self.names[axis]))
        return next(values, None)

    def cost(self, axis: int) -> Cost:
        """The cost of sending over a mesh axis."""
        return self.costs[axis] if self.costs else Cost()

    def __str__(self) -> str:
        return (
            "(" + ", ".join(f"{a}={n}" for a, n in zip(self.names, self.sizes, strict=True)) + ")"
        )


@attrs.frozen(eq=False)
class Program:
    """The result of capture: one functional ATen graph with global shapes. A Program does not
    depend on a mesh.
    """

    name: str
    graph: torch.fx.GraphModule
    in_paths: tuple[str, ...]  # of the tensor arguments, one for each placeholder
    out_paths: tuple[str, ...]  # of the tensor results
    out_leaves: tuple[Any, ...]  # constants of the result tree; TENSOR where a tensor stands
    out_tree: Any
    show: Callable[..., str] = attrs.field(repr=False)

    def __str__(self) -> str:
        return self.show(self)


# Types that may stand beside tensors in arguments and results.
CONSTANTS = (
    int,
    float,
    bool,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    Placement,
)
TENSOR = type("Tensor", (), {"__repr__": lambda self: "<tensor>"})()


@attrs.frozen
class Collective:
    """One collective of the program of one rank.

    `nbytes` counts the bytes of the reduced or gathered value of one rank.
    """

    kind: str
    axis: str
    nbytes: int
    op: str | None
    name: str
    source: str | None
    implicit: bool
    bucket: int | None = None  # its number in the bucket plan
    module: str | None = None  # the path of the submodule of `source`

    @property
    def origin(self) -> Origin:
        """The source line and the module path of the collective."""
        return {"source": self.source, "module": self.module}


@attrs.frozen(eq=False)
class LocalProgram:
    """The result of partition and schedule: the graph of one rank, with explicit collectives that
    name their mesh axis.
    """

    name: str
    axes: MeshAxes
    graph: torch.fx.Graph  # placeholders: one coordinate for each axis, then the local tensors
    unordered: torch.fx.Graph  # the same nodes before the last pass put them in order
    in_paths: tuple[str, ...]
    in_placements: tuple[MeshPlacements, ...]
    out_placements: tuple[MeshPlacements, ...]
    out_paths: tuple[str, ...]
    elided: tuple[str, ...]  # collectives over axes of size 1 that were taken out, by node name
    show: Callable[..., str] = attrs.field(repr=False)
    records: Callable[[torch.fx.Graph], Iterable[Collective]] = attrs.field(repr=False)

    def __str__(self) -> str:
        return self.show(self)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective, and every message of a pipeline, in the order in which they start. The
        collectives of a scan are repeated for each step, and those of a stage for each microbatch.
        """
        return tuple(self.records(self.graph))
