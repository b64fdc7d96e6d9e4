"""Placements that the program sets: by `constrain`, and for a gradient by its parameter."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from ...buckets import Wish
from ...errors import PlacementError
from ...ops.nodes import args_of
from ...ops.text_formats import KEEP, parse_spec
from ...placement import P, blocks_of, check_axes, is_said, named, names_in, names_of, row_of
from ...types import PENDING, Mark, Marks, MeshAxes
from .. import layout, plan
from ..protocols import Walk
from .values import Unaligned, Value, in_plain_chunks, is_partial, settled

ADD = torch.ops.aten.add.Tensor
ALIGN = "prim_align"  # the op that aligns a gradient
CONSTRAIN = "prim_redistribute"  # the op of a constraint


def constrain(walk: Walk, node: torch.fx.Node) -> None:
    """Redistribute a value to the placements of the user's constraint."""
    constrained_node, text_of_spec = args_of(node)
    value = walk.values[constrained_node]
    current = settled(value, walk.axes, walk.given)
    try:
        marks = constrained(text_of_spec, walk.axes, value.fake.shape, current)
    except ValueError as error:
        source = node.meta.get("source")
        fix = "P with axes of the mesh, one part for each dim"
        raise PlacementError.of(
            "constrain", str(error), fix=fix, source=source, placements=text_of_spec
        ) from None
    walk.note_given(value.fake.shape, marks)
    slot = walk.redistribute(value, marks, node, implicit=False)
    walk.place_as(node, value, slot)


def align(walk: Walk, node: torch.fx.Node) -> None:
    """Redistribute a gradient to the placements of its parameter, unless it stays Partial until
    the end of its loop.
    """
    gradient, parameter, wish = args_of(node)
    value = walk.values[gradient]
    slots = value.readable(node.meta["phase"])
    if node in walk.later and slots and is_partial(slots[0].marks):
        walk.place_as(node, value, slots[0])
    else:
        align_to(walk, node, value, parameter, wish)


def align_to(
    walk: Walk, node: torch.fx.Node, value: Value, parameter: torch.fx.Node, wish: str
) -> None:
    """Redistribute a gradient to the placement of its parameter.

    Args:
        walk: the current walk.
        node: on whose behalf.
        value: the gradient.
        parameter: of the Program.
        wish: the bucketing options of the gradient, as text; empty for none.
    """
    like = walk.values[parameter]
    wanted, marks = aligned_to(walk, value, parameter, node)
    before = attrs.evolve(value, slots=dict(value.slots))
    walk.unaligned[node] = Unaligned(before, parameter, wish)
    slot = walk.redistribute(value, marks, node, implicit=False)
    walk.place_as(node, value, slot)
    if wish:
        walk.gradients[node] = plan.Gradient(
            node=node,
            wish=Wish.of(wish),
            region=node.meta.get("custom", {}).get("gradients", ""),
            like=like.slots[wanted][0] if wanted in like.slots else None,
            slot=slot,
            unused=value.fill is not None and value.fill[1] == 0,
        )


def aligned_to(
    walk: Walk, value: Value, parameter: torch.fx.Node, node: torch.fx.Node
) -> tuple[Marks, Marks]:
    """The placements of a parameter, and those of its gradient: those of the parameter, or of a
    constraint that is the only reader of the aligned gradient. So a gradient that is constrained
    to shards is reduce-scattered.
    """
    like = walk.values[parameter]
    shape = value.fake.shape
    replicated = ("R",) * len(walk.axes.sizes)
    wanted = next(iter(like.slots), replicated)
    marks = aligned(shape, like.fake.shape, wanted, walk.axes)
    readers = [*node.users]
    names = [getattr(reader.target, "_opname", "") for reader in readers]
    if names != [CONSTRAIN]:
        return wanted, marks
    _, text = args_of(readers[0])
    try:
        return wanted, constrained(text, walk.axes, shape, marks)
    except ValueError:
        return wanted, marks  # `constrain` refuses it


def add_unaligned(walk: Walk, node: torch.fx.Node) -> bool:
    """Add two gradients of one parameter before they are reduced, if nothing else reads them.
    Returns whether the op is such a sum.
    """
    terms = node.all_input_nodes
    is_sum = node.target is ADD and len(terms) == 2 and not node.kwargs
    if not is_sum or any(len(term.users) > 1 for term in terms):
        return False
    if any(term not in walk.unaligned for term in terms):
        return False
    parts = [walk.unaligned[term] for term in terms]
    if parts[0].like is not parts[1].like:
        return False
    for term, part in zip(terms, parts, strict=True):
        walk.values[term] = part.value
        walk.gradients.pop(term, None)
    walk.merged.update(terms)
    walk.apply(node)
    align_to(walk, node, walk.values[node], parts[0].like, parts[0].wish)
    return True


def constrained(text: str, axes: MeshAxes, shape: Sequence[int], current: Marks) -> Marks:
    """The placements of a constraint's text. Dims with `*` keep their sharding."""
    if not axes.names:
        return ()
    entries = parse_spec(text)
    parts = [() if entry == (KEEP,) else entry for entry in entries]
    axes_named = {name for names in names_of(P(*parts)) for name in names}
    unknown = axes_named - {*axes.names}
    if unknown:
        raise ValueError(f"no axis {', '.join(sorted(unknown))}; the mesh has {axes}")
    if any(entries[len(shape) :]):
        raise ValueError(
            f"a placement of {len(entries)} dims for a tensor of {len(shape)}, shape {tuple(shape)}"
        )
    check_axes(P(*parts))
    row_now = row_of if is_said(current, shape, axes) else names_in
    rows: list[tuple[str, ...]] = []
    for dim, entry in enumerate(entries):
        if entry == (KEEP,):
            now = row_now(dim, current, axes)
            entry = tuple(x for x in now if blocks_of(x)[0] not in axes_named)
        rows.append(entry)
    return layout.fitted(shape, named(rows, shape, axes), axes.sizes)


def aligned(shape: Sequence[int], like: Sequence[int], wanted: Marks, axes: MeshAxes) -> Marks:
    """The placements of `like` where its dims have the same size; replicated elsewhere."""
    marks = tuple("R" if _differs(m, shape, like) else m for m in wanted)
    if is_said(marks, shape, axes):
        return layout.fitted(shape, marks, axes.sizes)
    return in_plain_chunks(shape, marks, axes)


def _differs(mark: Mark, shape: Sequence[int], like: Sequence[int]) -> bool:
    """Whether a gradient cannot have a placement of its parameter."""
    cut = layout.split(mark)
    if cut is None:
        return mark in PENDING
    return shape[cut[0]] != like[cut[0]]
