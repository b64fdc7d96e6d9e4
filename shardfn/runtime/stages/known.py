"""The captured programs of a function, and the one that fits a call."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from ... import _tree
from ...capture import Captured, capture, constant_key
from ...capture.rewrites import decompositions
from ...mesh import axes_of, is_over
from ...partition.rule_api import registry
from ...types import ShapeDtype
from ...world import World
from .. import cache
from ..arguments import Placed, aval_of
from ..options import Request


def captured_for(
    request: Request, args: tuple[Any, ...], kwargs: dict[str, Any], placed: Placed
) -> Captured:
    """The program of a function for a call: from the cache, or newly captured."""
    # composite ops that are not decomposed, because they have a rule
    undecomposed = frozenset(decompositions.table().keys() & registry.ops())
    known, transforms = cache.programs(request)
    kind = transforms, request.may_be_of_ranks
    signature = *kind, *_signature(args, kwargs, placed, undecomposed)
    for made in known:
        if _is_for(made, signature, placed):
            return made.captured
    cache.counts["captures"] += 1
    captured = capture(
        request.fn,
        request.name,
        args,
        kwargs,
        list(placed.paths),
        request.signature_of,
        placed.mesh.device_type if placed.mesh is not None else "cpu",
        undecomposed,
        placed.mesh,
        request.may_be_of_ranks,
        request.followed and request.followed.paths,
    )
    if request.around is not None:
        captured = _with_paths(captured)
    _remember(known, Made(signature, placed.world, placed.mesh, captured))
    return captured


def _with_paths(captured: Captured) -> Captured:
    """The capture of code of one rank, whose result is the first of two, with the paths of that."""
    program = captured.program
    names = [path.replace("result[0]", "result", 1) for path in program.out_paths]
    named = attrs.evolve(program, out_paths=tuple(names))
    return attrs.evolve(captured, program=named)


def _signature(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    placed: Placed,
    undecomposed: frozenset[Any],
) -> tuple[Any, ...]:
    """The key of a capture, without the function's reads outside of its arguments."""
    leaves, treedef = _tree.flatten((args, kwargs))
    avals = [
        aval_of(x, placed.mesh)
        if isinstance(x, (torch.Tensor, ShapeDtype))
        else constant_key(x)
        for x in leaves
    ]
    return treedef, avals, undecomposed, placed.state


def _remember(known: list[Made], made: Made) -> None:
    """Add a program to those of its function. Evicts programs that cannot be used again, and
    the oldest.
    """
    known[:] = [other for other in known if not other.captured.reads.is_lost()]
    del known[: max(0, len(known) - cache.PROGRAMS + 1)]
    known.append(made)


@attrs.frozen(eq=False)
class Made:
    """A capture with the call that it was made for."""

    signature: tuple[Any, ...]
    world: World
    mesh: Any
    captured: Captured


def _is_for(made: Made, signature: Any, placed: Placed) -> bool:
    """Whether the capture of one call is valid for another.

    A capture with a shard_map inside depends on the names and sizes of the mesh. A function
    that reads the world or the mesh depends on those.
    """
    captured = made.captured
    if (
        made.signature != signature
        or not captured.reads.same()
        or not captured.outside.is_known()
        or not captured.outside.is_unchanged()
    ):
        return False
    elsewhere = made.world is not placed.world or made.mesh is not placed.mesh
    if captured.reads.asks_world and elsewhere:
        return False
    own = captured.own_mesh
    if own is not None and (is_over(own) or own != (placed.mesh or own)):
        return False
    if captured.mesh is None:
        return True
    if placed.mesh is None:
        return captured.brought_mesh is not None
    return axes_of(captured.mesh) == placed.axes
