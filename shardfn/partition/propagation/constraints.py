"""Placements that the program sets by `constrain`."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from ...errors import PlacementError
from ...ops.nodes import args_of, origin_of
from ...ops.text_formats import KEEP, parse_spec, parse_stages
from ...placement import (
    P,
    Stage,
    blocks_of,
    check_axes,
    is_expressible,
    named,
    names_in,
    names_of,
    row_of,
    with_stages,
)
from ...types import MeshAxes, MeshPlacements, stage_of
from .. import layout
from ..plan import OnStage
from .values import default_placements, value_of_slot
from .walk import Walk


def constrain(walk: Walk, node: Node) -> None:
    """Place a `constrain` node: redistribute its value to the placements that the user wrote."""
    constrained_node, text_of_spec = args_of(node)
    value = walk.values[constrained_node]
    current = default_placements(value, walk.axes, walk.user_placements)
    try:
        placements = constrained(text_of_spec, walk.axes, value.fake.shape, current)
    except ValueError as error:
        fix = "use P with axes of the mesh and one entry for each dim"
        raise PlacementError.of(
            "constrain", str(error), fix=fix, placements=text_of_spec, **origin_of(node)
        ) from None
    at = next((stage for stage in map(stage_of, placements) if stage is not None), None)
    placements = tuple("R" if stage_of(placement) else placement for placement in placements)
    walk.note_user_placements(value.fake.shape, placements)
    slot = walk.redistribute(value, placements, node, implicit=False)
    if at is not None:
        before, slot = slot, walk.slot(slot.value, slot.placements)
        walk.steps.append(OnStage(node, before, slot, home=at))
    walk.values[node] = value_of_slot(slot, len(node.users), value.varies)


def constrained(
    text: str, axes: MeshAxes, shape: Sequence[int], current: MeshPlacements
) -> MeshPlacements:
    """Parse a constraint's text into placements; a dim written `*` keeps its sharding."""
    if not axes.names:
        return ()
    entries = parse_spec(text)
    parts = [() if entry == (KEEP,) else entry for entry in entries]
    stages = {
        axis or axes.closed[0]: Stage(*stage)
        for axis, placement in parse_stages(text)
        if (stage := stage_of(placement)) is not None
    }
    axes_named = {name for names in names_of(P(*parts)) for name in names} | {*stages}
    unknown = axes_named - {*axes.names}
    if unknown:
        raise ValueError(f"the mesh {axes} has no axis {', '.join(sorted(unknown))}")
    if any(entries[len(shape) :]):
        raise ValueError(
            f"a placement of {len(entries)} dims for a tensor of {len(shape)}, shape {tuple(shape)}"
        )
    check_axes(P(*parts, **stages))
    row_now = row_of if is_expressible(current, shape, axes) else names_in
    rows: list[tuple[str, ...]] = []
    for dim, entry in enumerate(entries):
        if entry == (KEEP,):
            now = row_now(dim, current, axes)
            entry = tuple(x for x in now if blocks_of(x)[0] not in axes_named)
        rows.append(entry)
    on_dims = layout.fitted(shape, named(rows, shape, axes), axes.sizes)
    return with_stages(on_dims, P(**stages), axes)
