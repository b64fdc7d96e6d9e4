"""The captured programs of a function, and the one that fits a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from ... import _compat
from ...capture import Arguments, Captured, Settings, Template, capture, capture_again, raise_users
from ...capture.rewrites import decompositions
from ...mesh import axes_of, is_of_ended_world
from ...partition.rule_api import registry
from ...stage_log import artefact, stage
from ...world import World
from .. import cache
from ..arguments import Placed
from ..options import Request


def explain_failed(
    request: Request, arguments: Arguments, placed: Placed, failed: Exception
) -> None:
    """Raise the error of a program that ran for the first time as one of the function's own, if
    Python has it too.
    """
    settings = attrs.evolve(_settings(request, placed, frozenset()), dynamic={})
    raise_users(request.fn, arguments, settings, failed)


def captured_for(request: Request, arguments: Arguments, placed: Placed) -> Captured:
    """Return the capture of a function for a call, from the cache or newly captured."""
    # composite ops that are not decomposed, because they have a rule
    undecomposed = frozenset(decompositions.table().keys() & registry.ops())
    known, transforms = cache.programs(request)
    leaves = _leaf_keys(placed)
    rest = (transforms, request.may_be_of_ranks, undecomposed, placed.treedef)
    rest = (*rest, request.rank, request.differing)
    signature = (*rest, placed.state), leaves
    for made in known:
        if made.signature == signature and _is_for(made, placed, arguments.leaves):
            return made.captured
    settings = _settings(request, placed, undecomposed)
    captured = _replayed(request, known, signature, placed, arguments, settings)
    if captured is None:
        cache.counts["captures"] += 1
        if reason := _fixed(known, signature, placed):
            settings = attrs.evolve(settings, dynamic={})
        with stage("capture", request.name) as note:
            captured = capture(request.fn, request.name, arguments, settings)
            note(nodes=len(captured.program.graph.graph.nodes))
        captured = attrs.evolve(captured, fixed=captured.fixed or reason)
        _leave_artefact(request, captured)
    if request.around is not None:
        captured = _with_paths(captured)
    _remember(known, Made(signature, placed.world, placed.mesh, captured))
    return captured


def _settings(request: Request, placed: Placed, undecomposed: frozenset[Any]) -> Settings:
    """Collect the capture settings (mesh, rules, decompositions) that key a capture."""
    return Settings(
        signature_of=request.signature_of,
        device=placed.device,
        undecomposed=undecomposed,
        mesh=placed.mesh,
        may_be_of_ranks=request.may_be_of_ranks,
        gradients=request.followed and request.followed.paths,
        with_known=request.followed is not None and request.followed.on_stages,
        dynamic={} if request.has_own_sizes else placed.dynamic,
        name=request.name,
        rank=request.rank,
        differing=request.differing,
    )


def _replayed(
    request: Request,
    known: list[Made],
    signature: Any,
    placed: Placed,
    arguments: Arguments,
    settings: Settings,
) -> Captured | None:
    """Replay Dynamo's graph of an earlier call of similar sizes, in place of reading the Python
    again.
    """
    template = _template(known, signature, placed, arguments.leaves)
    if template is None:
        return None
    with stage("replay", request.name) as note:
        captured = capture_again(template, arguments, settings)
        if captured is not None:
            note(nodes=len(captured.program.graph.graph.nodes))
    if captured is not None:
        cache.counts["replays"] += 1
        _leave_artefact(request, captured)
    return captured


def _leave_artefact(request: Request, captured: Captured) -> None:
    """Write a captured program to the log and the trace, where they are on."""
    program = captured.program
    artefact("captured_program", request.name, lambda: program.show(program, full=True))


def _template(
    known: list[Made], signature: Any, placed: Placed, given: Sequence[Any]
) -> Template | None:
    """Find Dynamo's graph that was read for sizes like a call's."""
    rest, leaves = signature
    misfits: dict[int, str | None] = {}  # by template, which many captures share
    for made in known:
        template = made.captured.template
        if template is None or made.signature[0] != rest:
            continue
        if not template.is_alike(leaves, made.signature[1]):
            continue
        if id(template) not in misfits:
            misfits[id(template)] = template.misfit(leaves)
        if misfits[id(template)] is None and _is_for(made, placed, given):
            return template
    return None


def _fixed(known: list[Made], signature: Any, placed: Placed) -> str:
    """Say why a function cannot be captured with symbolic sizes, if an earlier
    capture found out.
    """
    if any(is_strict for dims in placed.dynamic.values() for is_strict in dims.values()):
        return ""
    same = (made for made in known if made.signature[0] == signature[0])
    reasons = (made.captured.fixed for made in same if _is_for(made, placed))
    return next(filter(None, reasons), "") if placed.dynamic else ""


def _with_paths(captured: Captured) -> Captured:
    """Take the user's result, with its paths, out of a per-rank capture that returns (result,
    texts).
    """
    program = captured.program
    names = [path.replace("result[0]", "result", 1) for path in program.out_paths]
    named = attrs.evolve(program, out_paths=tuple(names))
    return attrs.evolve(captured, program=named)


def _leaf_keys(placed: Placed) -> list[Any]:
    """Key the leaves of a call for the cache: tensor metadata and constant keys."""
    found = dict(zip(placed.tensors, placed.avals, strict=True))
    found |= {i: key for i, key, _ in placed.constants}
    return [found[i] for i in range(len(placed.paths))]


def _remember(known: list[Made], made: Made) -> None:
    """Add a capture to those of its function, evicting unusable and oldest ones."""
    known[:] = [other for other in known if not other.captured.reads.is_lost()]
    del known[: max(0, len(known) - cache.PROGRAMS + 1)]
    known.append(made)


@attrs.frozen(eq=False)
class Made:
    """A capture together with the call that it was made for."""

    signature: tuple[Any, list[Any]]  # its leaves last
    world: World
    mesh: Any
    captured: Captured


def _is_for(made: Made, placed: Placed, leaves: Sequence[Any] | None = None) -> bool:
    """Return whether the capture of one call is valid for another with the same signature.

    A capture with a shard_map inside depends on the names and sizes of the mesh. A function
    that reads the world or the mesh depends on those.
    """
    captured = made.captured
    if (
        not captured.reads.same()
        or not captured.outside.is_known()
        or not captured.outside.is_unchanged()
        or (leaves is not None and not _compat.have_facts(leaves, captured.facts))
    ):
        return False
    elsewhere = made.world is not placed.world or made.mesh is not placed.mesh
    if captured.reads.asks_world and elsewhere:
        return False
    own = captured.own_mesh
    if own is not None and (is_of_ended_world(own) or own != (placed.mesh or own)):
        return False
    if captured.mesh is None:
        return True
    if placed.mesh is None:
        return captured.brought_mesh is not None
    return axes_of(captured.mesh) == placed.axes
