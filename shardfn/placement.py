"""The placements that users write (`P`, `Stage`, `Zigzag`), and their conversion to placements on a
mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from . import _compat
from .errors import PlacementError
from .types import MEAN, REDUCTIONS, AtStage, AxisPlacement, MeshAxes, MeshPlacements, stage_of

ZIGZAG = "zigzag"  # in place of a number of blocks
REDISTRIBUTE = "sf.shard(lambda x: x, mesh, None, placements)(x), which redistributes x"


class Stage(Placement):
    """A placement that puts a tensor on one pipeline stage, for the pipeline axis of a mesh. One
    rank along the axis holds the global value, and the other ranks hold an empty local tensor.

    Args:
        coordinate: the index, along the mesh axis, of the rank that holds the value, from 0.
        chunk: the index of the stage among the stages of its rank, if each rank has several stages
            (virtual stages).

    Raises:
        PlacementError: the mesh axis does not have the stage. The first use of the `Stage` raises
            the PlacementError.

    Source: pipeline stages, GPipe (arXiv 1811.06965); virtual stages, Megatron-LM (arXiv
        2104.04473).

    Example:
        >>> Stage(2), Stage(0, chunk=1)
        (Stage(2), Stage(0, chunk=1))
    """

    @_compat.read_by_dynamo
    def __init__(self, coordinate: int, chunk: int = 0) -> None:
        super().__init__()
        self.coordinate, self.chunk = coordinate, chunk

    def is_replicate(self) -> bool:
        """Raise an error, because torch's DTensor cannot redistribute a tensor to a stage.

        Raises:
            PlacementError: raised at every call of `is_replicate`.
        """
        # torch 2.13 calls this when a redistribution starts, and changes the placement alone
        raise PlacementError.of(
            "redistribute of a DTensor",
            f"cannot redistribute to {self!r}: torch's DTensor does not support sf.Stage",
            fix=REDISTRIBUTE,
        )

    def __reduce__(self) -> Any:
        return Stage, (self.coordinate, self.chunk)

    def __repr__(self) -> str:
        return f"Stage({self.coordinate!r}" + (f", chunk={self.chunk})" if self.chunk else ")")

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Stage) and self.coordinate == other.coordinate
        return same and self.chunk == other.chunk

    def __hash__(self) -> int:
        return hash((Stage, self.coordinate, self.chunk))


class Zigzag(Placement):
    """A placement on one mesh axis that gives all ranks the same amount of causal attention to
    compute. A zigzag splits the dim into 2n equal chunks, and rank r of the n ranks holds chunks r
    and 2n - 1 - r. A zigzag does not change the values that a program computes.

    Args:
        dim: the tensor dim that is sharded.

    Raises:
        PlacementError: the tensor does not have the dim. The first use of the `Zigzag` raises the
            PlacementError.

    Source: the balanced layout of causal ring attention, Striped Attention (arXiv 2311.09431);
        Llama 3 (arXiv 2407.21783), section 3.3.2.

    Example:
        >>> Zigzag(1)
        Zigzag(1)
    """

    @_compat.read_by_dynamo
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def is_replicate(self) -> bool:
        """Raise an error, because torch's DTensor cannot redistribute a tensor to a zigzag.

        Raises:
            PlacementError: raised at every call of `is_replicate`.
        """
        # torch 2.13 calls this when a redistribution starts, and changes the placement alone
        raise PlacementError.of(
            "redistribute of a DTensor",
            f"cannot redistribute to {self!r}: torch's DTensor does not support sf.Zigzag",
            fix=REDISTRIBUTE,
        )

    def __reduce__(self) -> Any:
        return Zigzag, (self.dim,)

    def __repr__(self) -> str:
        return f"Zigzag({self.dim!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Zigzag) and self.dim == other.dim

    def __hash__(self) -> int:
        return hash((Zigzag, self.dim))


OWN = (Stage, Zigzag)  # the placements that torch's DTensor does not know


class zigzag:
    """Shard a dim in zigzag order, which gives all ranks of the axis the same amount of causal
    attention to compute. `zigzag` returns an entry for a `P`. The dim is split into 2n equal
    chunks, and rank r of the n ranks holds chunks r and 2n - 1 - r.

    Args:
        axis: the mesh axis. The size of the dim must be a multiple of 2n for n ranks. Further axes
            of the dim, as in `P("dp", (zigzag("cp"), "tp"))`, shard each chunk again, in equal
            parts.

    Raises:
        PlacementError: the mesh does not have the axis, another axis shards the dim before the
            zigzag, or the size of the dim is not a multiple of 2n for n ranks. The first use of the
            `P` raises the PlacementError.

    Source: the balanced layout of causal ring attention, Striped Attention (arXiv 2311.09431);
        Llama 3 (arXiv 2407.21783), section 3.3.2.

    Example:
        >>> P("dp", zigzag("cp"))
        P('dp', zigzag('cp'))
    """

    @_compat.read_by_dynamo
    def __init__(self, axis: str) -> None:
        self.axis = axis

    def __repr__(self) -> str:
        return f"zigzag({self.axis!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, zigzag) and self.axis == other.axis

    def __hash__(self) -> int:
        return hash((zigzag, self.axis))


class P:
    """A placement that lists, for each tensor dim, the mesh axes over which the dim is sharded.

    Args:
        parts: for each tensor dim, an axis name, a tuple of names, or None. Dims without an entry
            are not sharded. The first axis of a tuple shards the dim, and the next axis shards each
            resulting shard again. The axes in a tuple may have another order than in the mesh if
            torch's DTensor supports the resulting shards. The entry `"tp*3"` divides the dim into 3
            equal blocks and shards each block over tp, as for a packed weight of queries, keys and
            values. `sf.zigzag("cp")` shards a causal sequence so that all ranks have the same
            amount of attention to compute.
        stages: for a pipeline axis of the mesh, the stage that holds the tensor: a number, as in
            `P(None, "tp", pp=2)`, or an `sf.Stage`.

    Raises:
        PlacementError: the mesh lacks an axis that the `P` names, or the tensor has fewer dims than
            the `P`. The first use of the `P` raises the PlacementError.

    Source: jax.sharding.PartitionSpec.

    Example:
        >>> P("dp", None)
        P('dp', None)
    """

    @_compat.read_by_dynamo
    def __init__(
        self, /, *parts: str | zigzag | tuple[str | zigzag, ...] | None, **stages: int | Stage
    ) -> None:
        self.parts, self.stages = tuple([_as_text(part) for part in parts]), stages

    def __repr__(self) -> str:
        rows = [f"{axis}={stage!r}" for axis, stage in self.stages.items()]
        return f"P({', '.join([*map(_written, self.parts), *rows])})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, P) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        stages = {axis: as_stage(stage) for axis, stage in self.stages.items()}
        return self.parts, frozenset(stages.items())


@_compat.read_by_dynamo
def _as_text(part: Any) -> Any:
    """A part of a `P`, with each zigzag as text."""
    if isinstance(part, zigzag) and isinstance(part.axis, str):
        return f"{part.axis}*{ZIGZAG}"
    return tuple([_as_text(name) for name in part]) if isinstance(part, tuple) else part


def _written(part: Any) -> str:
    """A part of a `P` as Python."""
    if isinstance(part, tuple):
        return f"({', '.join(map(_written, part))}{',' * (len(part) == 1)})"
    is_zigzag = isinstance(part, str) and part.endswith(f"*{ZIGZAG}")
    return repr(zigzag(part.removesuffix(f"*{ZIGZAG}")) if is_zigzag else part)


def as_stage(stage: Any) -> Any:
    """The `Stage` that a number says."""
    is_number = isinstance(stage, int) and not isinstance(stage, bool)
    return Stage(stage) if is_number else stage


class Auto:
    """The value `sf.auto`, which stands for a placement that `shard` chooses.

    Example:
        >>> import shardfn as sf
        >>> x, w = sf.ShapeDtype((64, 8)), sf.ShapeDtype((8, 8))
        >>> with sf.fake_world(2, numerics=False):
        ...     mesh = sf.make_mesh((2,), ("dp",))
        ...     fn = sf.shard(lambda x, w: x @ w, mesh, (sf.auto, sf.auto))
        ...     print(fn.lower(x, w).placements.in_placements)
        (P('dp'), P())
    """

    def __repr__(self) -> str:
        return "sf.auto"

    def __reduce__(self) -> str:
        return "AUTO"


AUTO = Auto()


@_compat.read_by_dynamo
def is_spec(x: Any) -> bool:
    """Whether x is one leaf of a tree of placements."""
    if isinstance(x, list):
        return bool(x) and all(isinstance(p, Placement) for p in x)
    return x is None or isinstance(x, (P, Placement, Auto))


def marks_of(spec: Any, shape: Sequence[int], axes: MeshAxes) -> MeshPlacements:
    """One placement leaf as placements.

    Raises:
        ValueError: says why the leaf does not fit.
    """
    if isinstance(spec, P):
        return _from_names(spec, shape, axes)
    if spec is AUTO:
        raise ValueError("sf.auto is only for in_placements of sf.shard, which chooses placements")
    if not isinstance(spec, (Placement, list, tuple)):
        raise ValueError(f"{spec!r} is not a placement; write P({spec!r}) or a torch Placement")
    placements = [spec] if isinstance(spec, Placement) else list(spec)
    if len(placements) != len(axes.names):
        raise ValueError(
            f"{len(placements)} placements {placements} for a mesh of {len(axes.names)} axes {axes}"
        )
    rows = zip(placements, axes.sizes, axes.names, strict=True)
    marks = tuple(_mark(p, shape, n, name) for p, n, name in rows)
    _check_strided(placements, marks, shape, axes)
    kinds = {"sum" if m == MEAN else m for m in marks if m in REDUCTIONS}
    if len(kinds) > 1:
        raise ValueError(
            f"{describe(marks, axes)} combines {len(kinds)} kinds of Partial, whose order of "
            "reduction would matter; reduce one of them first"
        )
    return marks


def stages_in(spec: Any, axes: MeshAxes) -> MeshPlacements:
    """The stages that a placement leaf names, and "R" on other axes. They need no shape.

    Raises:
        ValueError: an axis has no such stage.
    """
    if isinstance(spec, P):
        return with_stages(["R"] * len(axes.names), spec, axes)
    placements = spec if isinstance(spec, (list, tuple)) else [spec]
    rows = zip(placements, axes.sizes, axes.names, strict=False)
    return tuple(_stage_mark(p, n, name) if isinstance(p, Stage) else "R" for p, n, name in rows)


def check_whole(spec: Any, marks: MeshPlacements) -> None:
    """Raise ValueError if `in_placements` says that a plain tensor is Partial."""
    if any(m in REDUCTIONS for m in marks):
        raise ValueError(
            f"a plain tensor is a global value, so its placement cannot be {spec}; use "
            "sf.from_local"
        )


def check_pending(marks: MeshPlacements, dtype: torch.dtype) -> None:
    """Raise ValueError if the dtype does not have the reduction of a Partial placement."""
    if MEAN in marks and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(
            f"a Partial mean of {dtype} may not be an integer; use Partial('sum'), or a "
            "floating-point dtype"
        )
    if dtype.is_complex and {"max", "min"} & {*marks}:
        raise ValueError(
            f"a Partial maximum or minimum of {dtype} is not defined, because complex numbers have "
            "no order"
        )


def _from_names(spec: P, shape: Sequence[int], axes: MeshAxes) -> MeshPlacements:
    if len(spec.parts) > len(shape):
        raise ValueError(
            f"{spec} names dim {len(spec.parts) - 1} of a tensor with {len(shape)} dims, "
            f"shape {tuple(shape)}"
        )
    named_axes = [name for names in names_of(spec) for name in names]
    unknown = next((name for name in named_axes if name not in axes.names), None)
    if unknown is not None:
        raise ValueError(f"{spec} names axis {unknown!r}; the mesh has {axes}")
    check_axes(spec)
    return with_stages(named(rows_of(spec), shape, axes), spec, axes)


def with_stages(marks: Sequence[AxisPlacement], spec: P, axes: MeshAxes) -> MeshPlacements:
    """The placements of a `P`'s dims, with those of its stages."""
    placed = list(marks)
    for name, stage in spec.stages.items():
        if name not in axes.names:
            raise ValueError(f"{spec} names axis {name!r}; the mesh has {axes}")
        k = axes.names.index(name)
        placed[k] = _stage_mark(as_stage(stage), axes.sizes[k], name)
    return tuple(placed)


def named(rows: Sequence[Sequence[str]], shape: Sequence[int], axes: MeshAxes) -> MeshPlacements:
    """The placements of the names of the axes that shard each dim, in their order.

    Raises:
        ValueError: a number of blocks does not divide the dim, or axes in another order than
            the mesh's give shards that DTensor does not have.
    """
    marks: list[AxisPlacement] = ["R"] * len(axes.names)
    for dim, names in enumerate(rows):
        ranks = 1
        outer = 1
        last = -1
        for part in names:
            name, blocks = blocks_of(part)
            k = axes.names.index(name)
            if blocks < 0 and axes.sizes[k] > 1 and shape[dim]:
                marks[k] = _zigzag(dim, shape[dim], names, part, axes)
                outer = ranks = 2 * axes.sizes[k]  # the next axes shard each of its chunks
                continue
            if blocks > 1:
                outer = ranks = _checked(dim, shape[dim], names, part)
            outer = ranks if k < last else outer
            last = k
            is_plain = outer == 1 or axes.sizes[k] == 1 or shape[dim] == 0
            marks[k] = dim if is_plain else (dim, 1, outer)
            ranks *= axes.sizes[k]
        # uneven blocks must be those of DTensor
        is_uneven = outer > 1 and shape[dim] % outer > 0
        if is_uneven and not _compat.is_in_order(shape[dim], dim, marks, axes.sizes):
            raise ValueError(_undivided(dim, shape[dim], names, outer, axes))
    return tuple(marks)


def blocks_of(part: str) -> tuple[str, int]:
    """An axis, and the number of blocks as which it views its dim, of "axis*blocks": -2 of a
    zigzag.
    """
    name, _, blocks = part.partition("*")
    return name, -2 if blocks == ZIGZAG else int(blocks or 1)


def _zigzag(
    dim: int, size: int, names: Sequence[str], part: str, axes: MeshAxes
) -> tuple[int, int, int]:
    """The placement of a zigzag.

    Raises:
        ValueError: an axis shards the dim before the zigzag, or the dim does not have its chunks.
    """
    name, blocks = blocks_of(part)
    sizes = dict(zip(axes.names, axes.sizes, strict=True))
    wide = [other for other in names if sizes[blocks_of(other)[0]] > 1]
    if blocks != -2 or wide[0] != part:
        rest = [blocks_of(other)[0] for other in names if other != part]
        raise ValueError(
            f"{_written(part)} shards dim {dim} after {_written(wide[0])}; a zigzag must be the "
            f"first axis of its dim: {_written((part, *rest))}"
        )
    check_zigzag(dim, size, name, sizes[name])
    shards = 2 * math.prod(sizes[blocks_of(other)[0]] for other in wide)
    if size % shards:
        raise ValueError(
            f"{_written(tuple(names))} views dim {dim} of size {size} as {shards} equal chunks, so "
            f"{shards} must divide it; pad it by {-size % shards}"
        )
    return dim, 1, blocks


def zigzag_dims(spec: Any) -> list[int]:
    """The dims that a placement leaf shards as zigzags."""
    if isinstance(spec, P):
        return [
            dim
            for dim, part in enumerate(spec.parts)
            for name in (part if isinstance(part, tuple) else (part,))
            if isinstance(name, str) and name.endswith(f"*{ZIGZAG}")
        ]
    placements = spec if isinstance(spec, (list, tuple)) else [spec]
    return [p.dim for p in placements if isinstance(p, Zigzag)]


def check_zigzag(dim: int, size: int, axis: str, n: int) -> None:
    """Check that a dim can be a zigzag over n ranks.

    Raises:
        ValueError: 2n does not divide its size.
    """
    if size % (2 * n):
        raise ValueError(
            f"{zigzag(axis)} views dim {dim} of size {size} as {2 * n} equal chunks, two for each "
            f"of {n} ranks, so {2 * n} must divide it; pad it by {-size % (2 * n)}"
        )


def _checked(dim: int, size: int, names: Sequence[str], part: str) -> int:
    """The number of blocks of the first axis of a dim."""
    _, blocks = blocks_of(part)
    if part != names[0]:
        raise ValueError(
            f"P({tuple(names)}) views dim {dim} as {blocks} blocks for an axis after the "
            f"first; only the first axis may do so: {(part, *(n for n in names if n != part))}"
        )
    if size % blocks:
        raise ValueError(
            f"{part!r} views dim {dim} of size {size} as {blocks} equal blocks, so {blocks} must "
            f"divide it; pad it by {-size % blocks}"
        )
    return blocks


def _undivided(dim: int, size: int, names: Sequence[str], ranks: int, axes: MeshAxes) -> str:
    in_order = tuple(sorted(names, key=lambda x: axes.names.index(blocks_of(x)[0])))
    return (
        f"P({tuple(names)}) shards dim {dim} of size {size} over axes in another order than the "
        f"mesh's {axes}, in shards that DTensor cannot describe; pad it by {-size % ranks}, so "
        f"that {ranks} divides it, or write {in_order}"
    )


def names_in(dim: int, marks: MeshPlacements, axes: MeshAxes) -> tuple[str, ...]:
    """The axes that shard a dim, in the order in which they do."""
    found = [
        (abs(_blocks(mark)), k)
        for k, mark in enumerate(marks)
        if not isinstance(mark, str) and (mark[0] if isinstance(mark, tuple) else mark) == dim
    ]
    return tuple(axes.names[k] for _, k in sorted(found))


def row_of(dim: int, marks: MeshPlacements, axes: MeshAxes) -> tuple[str, ...]:
    """The parts of a `P` for a dim: its axes, the first with its number of blocks, and zigzags."""
    names = names_in(dim, marks, axes)
    size = dict(zip(axes.names, axes.sizes, strict=True))
    wide = [name for name in names if size[name] > 1]
    parts = []
    for place, name in enumerate(wide):
        blocks = _blocks(marks[axes.names.index(name)])
        is_written = blocks < 0 or (blocks > 1 and place == 0)
        text = ZIGZAG if blocks == -2 else blocks
        parts.append(f"{name}*{text}" if is_written else name)
    return names if parts == wide else (*parts, *sorted({*names} - {*wide}))


def _blocks(mark: AxisPlacement) -> int:
    """The blocks of a strided shard, negative of a zigzag."""
    return mark[2] if isinstance(mark, tuple) and len(mark) == 3 else 1


def spec_of(marks: MeshPlacements, dims: int, axes: MeshAxes) -> P:
    """The axes that shard each dim of a tensor as a `P`."""
    rows = [row_of(dim, marks, axes) for dim in range(dims)]
    while rows and not rows[-1]:
        rows.pop()
    parts = [row[0] if len(row) == 1 else row or None for row in rows]
    return P(*parts, **stages_of(marks, axes))


def stages_of(marks: MeshPlacements, axes: MeshAxes) -> dict[str, int | Stage]:
    """The stages among placements by mesh axis, as a `P` takes them."""
    rows = zip(axes.names, map(stage_of, marks), strict=True)
    return {
        name: Stage(*stage) if stage.chunk else stage.coordinate
        for name, stage in rows
        if stage is not None
    }


def is_expressible(marks: MeshPlacements, shape: Sequence[int], axes: MeshAxes) -> bool:
    """Whether a P says so."""
    rows = [row_of(dim, marks, axes) for dim in range(len(shape))]
    return _are(marks, rows, shape, axes)


def in_some_order(marks: MeshPlacements, shape: Sequence[int], axes: MeshAxes) -> bool:
    """Whether axes shard dims in plain chunks, in some order, or as zigzags."""
    turning = {mark[0] for mark in marks if isinstance(mark, tuple) and _blocks(mark) < 0}
    rows = [(row_of if dim in turning else names_in)(dim, marks, axes) for dim in range(len(shape))]
    return _are(marks, rows, shape, axes)


def _are(
    marks: MeshPlacements, rows: Sequence[Sequence[str]], shape: Sequence[int], axes: MeshAxes
) -> bool:
    sharded = [m for m in marks if not isinstance(m, str)]
    try:
        plain = named(rows, shape, axes)
    except ValueError:
        return False
    return [m for m in plain if not isinstance(m, str)] == sharded


def _check_strided(
    placements: list[Placement], marks: MeshPlacements, shape: Sequence[int], axes: MeshAxes
) -> None:
    """Raise ValueError for a strided shard that no P says."""
    if any(isinstance(p, Zigzag) for p in placements):
        named([row_of(dim, marks, axes) for dim in range(len(shape))], shape, axes)
    is_strided = any(isinstance(m, tuple) for m in marks)
    if is_strided and not is_expressible(marks, shape, axes):
        raise ValueError(
            f"{placements} has a strided shard that shardfn cannot express for shape "
            f"{tuple(shape)}, neither by an order of axes nor by equal blocks; redistribute it "
            "to Shard"
        )


def names_of(spec: P) -> list[tuple[str, ...]]:
    """The mesh axes over which each dim is sharded.

    Raises:
        ValueError: a part that is neither None, nor an axis name, nor a tuple of names.
    """
    return [tuple(blocks_of(part)[0] for part in row) for row in rows_of(spec)]


def rows_of(spec: P) -> list[tuple[str, ...]]:
    """The parts of a spec for each dim: axis names, some with a number of blocks.

    Raises:
        ValueError: a part that is neither None, nor an axis name, nor a tuple of names.
    """
    rows = []
    for dim, part in enumerate(spec.parts):
        names = () if part is None else tuple(part) if isinstance(part, (tuple, list)) else (part,)
        wrong = [name for name in names if not _is_part(name)]
        if wrong:
            raise ValueError(
                f"{spec} names {wrong[0]!r} for dim {dim}, which is not an axis name; write "
                "'axis', a tuple of names, or None"
            )
        rows.append(names)
    return rows


def _is_part(part: Any) -> bool:
    """Whether a part is the name of an axis, or "axis*blocks"."""
    if not isinstance(part, str):
        return False
    name, star, blocks = part.partition("*")
    counts = not star or blocks == ZIGZAG or (blocks.isdecimal() and int(blocks) > 0)
    return bool(name) and counts and not set(name) & set(",;*")


def check_axes(spec: P) -> None:
    """Check that no axis is named twice.

    Raises:
        ValueError: names the axis.
    """
    used: dict[str, int] = {}
    for dim, names in enumerate(names_of(spec)):
        for name in names:
            if name in used:
                raise ValueError(
                    f"{spec} uses axis {name!r} twice, for dims {used[name]} and {dim}"
                )
            used[name] = dim
    for name in spec.stages:
        if name in used:
            raise ValueError(
                f"{spec} uses axis {name!r} twice, for dim {used[name]} and for a pipeline stage"
            )


def check_order(spec: P, known: tuple[str, ...]) -> None:
    """Check that the axes of one dim are in mesh order, and shard it as one block.

    Raises:
        ValueError: names the dim.
    """
    for dim, parts in enumerate(rows_of(spec)):
        if any(blocks_of(part)[1] < 0 for part in parts):
            raise ValueError(
                f"{spec} shards dim {dim} as a zigzag, but in shard_map each rank has one "
                "chunk; write the axis alone, or use the zigzag outside of shard_map"
            )
        if any(blocks_of(part)[1] > 1 for part in parts):
            raise ValueError(
                f"{spec} views dim {dim} as blocks, which shard_map does not support; use this "
                "placement outside of shard_map"
            )
    for dim, names in enumerate(names_of(spec)):
        if names != tuple(sorted(names, key=known.index)):
            raise ValueError(
                f"{spec} shards dim {dim} over {names}; the axes of one dim must be in mesh "
                f"order {known}"
            )


def check_stages(spec: P) -> None:
    """Check that stages are numbers from 0, where the mesh is not known.

    Raises:
        ValueError: names the axis.
    """
    for axis, stage in spec.stages.items():
        _check_stage(as_stage(stage), axis)


def _check_stage(stage: Any, axis: str) -> None:
    if not isinstance(stage, Stage):
        raise ValueError(f"{axis}={stage!r} is not a stage; write {axis}=0 or an sf.Stage")
    check_numbers(stage, f" on axis {axis!r}")


def check_numbers(stage: Stage, where: str = "") -> None:
    """Check that the coordinate and the chunk of a stage are numbers from 0.

    Raises:
        ValueError: says which is not; `where` follows the stage in its text.
    """
    for word, number in (("stage", stage.coordinate), ("chunk", stage.chunk)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise ValueError(f"{stage}{where}: {word} must be an int of 0 or more")


def _stage_mark(stage: Any, n: int, axis: str) -> str:
    _check_stage(stage, axis)
    if stage.coordinate >= n:
        raise ValueError(
            f"{stage} on axis {axis!r}, which has the stages 0 to {n - 1}; a second stage on a "
            f"coordinate is sf.Stage({stage.coordinate % n}, chunk={stage.coordinate // n})"
        )
    return AtStage(stage.coordinate, stage.chunk).mark


def is_reduced_by_torch(placement: Placement) -> bool:
    """Whether only torch knows how to reduce the terms of a placement, such as those of a norm."""
    is_known = type(placement) is Partial and placement.reduce_op in REDUCTIONS
    return isinstance(placement, Partial) and not is_known


def _mark(placement: Placement, shape: Sequence[int], n: int, axis: str) -> AxisPlacement:
    if type(placement) is Replicate:
        return "R"
    if isinstance(placement, Stage):
        return _stage_mark(placement, n, axis)
    blocks = _compat.split_factor(placement)
    if blocks is not None:
        dim = placement.dim % max(len(shape), 1)
        return dim if blocks == 1 or n == 1 else (dim, 1, blocks)
    if type(placement) in (Shard, Zigzag):
        dim = placement.dim + len(shape) if placement.dim < 0 else placement.dim
        if not 0 <= dim < len(shape):
            raise ValueError(
                f"{placement} names dim {placement.dim} of a tensor with {len(shape)} "
                f"dims, shape {tuple(shape)}"
            )
        if type(placement) is Shard or n == 1 or not shape[dim]:
            return dim
        check_zigzag(dim, shape[dim], axis, n)
        return dim, 1, -2
    if type(placement) is Partial and placement.reduce_op in REDUCTIONS:
        return placement.reduce_op
    raise ValueError(
        f"{placement} is not a placement that shardfn supports: Shard, Replicate, Stage, "
        "Zigzag, Partial of sum, avg, max or min"
    )


def torch_placements(marks: MeshPlacements) -> tuple[Placement, ...]:
    """Placements of the stages as DTensor's placements."""
    return tuple(_placement(m) for m in marks)


def _placement(mark: AxisPlacement) -> Placement:
    if mark == "R":
        return Replicate()
    if (stage := stage_of(mark)) is not None:
        return Stage(*stage)
    if isinstance(mark, str):
        return Partial(mark)
    if isinstance(mark, tuple) and mark[1:] == (1, -2):
        return Zigzag(mark[0])
    if isinstance(mark, tuple) and len(mark) == 3 and mark[1] == 1 and mark[2] > 0:
        return _compat.strided_shard(mark[0], mark[2])
    assert isinstance(mark, int), f"the internal placement {mark} cannot leave the program"
    return Shard(mark)


def describe(marks: MeshPlacements, axes: MeshAxes) -> str:
    """Placements in the user's words: `Shard(0) on dp, Replicate() on tp`."""
    said = [f"{_placement(m)!r} on {name}" for name, m in zip(axes.names, marks, strict=True)]
    return ", ".join(said) or "one device"
