"""The look-up of compiled programs for equal calls, so that no call is compiled twice."""

from __future__ import annotations

from typing import Any

import attrs

from ...partition.rule_api import registry
from ..agreement import agree, has_others
from ..arguments import Placed
from ..compiled import Compiled
from .traced import Lowered, Traced

KEPT = 8  # compiled programs of one function; the oldest are dropped first
SAME = (  # of two calls of one capture that run one program
    "axes",
    "treedef",
    "tensors",
    "avals",
    "marks",
    "unreduced",
    "donated",
    "followed",
    "static",
    "state",
)


@attrs.frozen(eq=False)
class Ready:
    """A compiled program in the cache, and what it was lowered from."""

    lowered: Lowered
    compiled: Compiled
    rules: Any  # the sharding rules of users


def _is_of(lowered: Lowered, rules: Any, traced: Traced) -> bool:
    """Return whether a program that was lowered with some rules of users is that of a call."""
    mine = lowered.traced
    return (
        mine.captured is traced.captured
        and mine.request is traced.request
        and rules == registry.active()
        and _are_alike(mine.placed, traced.placed)
    )


def _are_alike(a: Placed, b: Placed) -> bool:
    is_here = a.world is b.world and a.mesh is b.mesh
    return is_here and all(getattr(a, name) == getattr(b, name) for name in SAME)


def compiled_for(traced: Traced, *, warm: bool = False) -> Compiled:
    """Return the compiled program of a call, from an earlier call or compiled now.

    Args:
        traced: the call.
        warm: whether it may be compiled in the background, if the request says so.
    """
    known = traced.request.store.compiled
    for ready in known:
        if _is_of(ready.lowered, ready.rules, traced):
            _agree(ready.lowered)
            return _placed(ready.compiled, traced.placed)
    in_use = [*traced.request.store.lowered.items()]
    lowered = next((x for x, rules in in_use if _is_of(x, rules, traced)), None) or traced.lower()
    compiled = lowered.compile(warm=warm)
    is_whole = not (warm and traced.request.warmup)
    if is_whole and not traced.ranks:
        known.insert(0, Ready(lowered, compiled, registry.active()))
        del known[KEPT:]
    return _placed(compiled, traced.placed)


def _placed(compiled: Compiled, placed: Placed) -> Compiled:
    """Adapt a compiled program to arguments of the same placements, DTensors or global tensors."""
    if placed.dtensors == compiled.placed.dtensors:
        return compiled
    backward = compiled.backward and attrs.evolve(compiled.backward, placed=placed)
    return attrs.evolve(compiled, placed=placed, backward=backward)


def _agree(lowered: Lowered) -> None:
    """Compare the program among the ranks, some of which may be compiling it now."""
    traced = lowered.traced
    if not has_others(traced.placed):
        return
    halves = [lowered, lowered.backward] if lowered.backward else [lowered]
    is_unsure = traced.request.rank is not None
    for half in halves:
        name, plan = traced.request.name, half.partition
        agree(name, plan, half.schedule_plan, may_have_own_sizes=is_unsure)
