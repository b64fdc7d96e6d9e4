"""Rank agreement: check that a program and its global values are equal on all ranks before it
runs.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import torch
from torch.distributed.tensor import DTensor

from .. import _compat
from ..capture import uneven_shards
from ..errors import SAME_COLLECTIVES, DivergenceError, call_site
from ..ops.loops import inner_nodes
from ..ops.nodes import origin_of
from ..own_dtensors import is_own
from ..partition import Plan
from ..partition.plan import SENDING, Nested, Pipelined
from ..random import ambient
from ..schedule import SchedulePlan
from ..simulated import is_on_part
from ..source_text import located
from ..types import LocalProgram
from ..world import texts_of_ranks
from .arguments import OF_PART, Placed, whole_mesh
from .layouts import as_chunks, on_all_stages
from .options import Request

OF_DTENSOR = "a DTensor"
SAME_PROGRAM = (
    "use the same shapes, placements and Python branches on every rank; if parts of a batch "
    "differ, use torch.where over the global row numbers torch.arange(len(x))"
)
SAME_CONSTANTS = (
    "use the same number on all ranks: read a setting on rank 0, and send it to the others with "
    "torch.distributed.broadcast_object_list; or pass a tensor from sf.from_local"
)
CONSTANTS = re.compile(r"\[[^]]*\]")  # those of an op, in a line of a plan
# those that all processes must share
VERSIONS = (f"torch {_compat.TORCH_VERSION}", f"shardfn {_compat.versions.VERSION}")


class Line(NamedTuple):
    """A fact of a program that ranks compare, with the user's source line, which they do not
    compare: ranks may have their files in other folders.
    """

    text: str
    source: str | None = None

    def __str__(self) -> str:
        return self.text if self.source is None else f"{self.text}, at {self.source}"


def gathered(name: str, kind: str, mine: Any) -> list[Any]:
    """All-gather a JSON value over the ranks of a job through the store. Nothing of another process
    is executed.

    Args:
        name: of the function, which errors name.
        kind: of the values, which must be equal on all ranks.
        mine: the value of this rank.

    Raises:
        DivergenceError: another rank compares something else, or is in another call.
        RankLostError: a rank does not come.
    """
    texts = texts_of_ranks(name, json.dumps([kind, mine]))
    rows = [json.loads(text) for text in texts]
    other = next((r for r, row in enumerate(rows) if row[0] != rows[0][0]), None)
    if other is None:
        return [value for _, value in rows]
    lines = [f"rank {r} compares {rows[r][0]}" for r in (0, other)]
    fix = "make the same calls in the same order on every rank"
    raise DivergenceError.of(name, "ranks are in different calls", *lines, fix=fix)


def agree(
    name: str, plan: Plan, schedule_plan: SchedulePlan, *, may_have_own_sizes: bool = False
) -> None:
    """Compare this rank's plan, order of collectives, and versions of torch and shardfn with the
    others'.

    Raises:
        DivergenceError: quotes the first line that differs.
        NeedsOwnSizes: arguments differ in size, and may.
    """
    others = [
        *str(schedule_plan.plan).splitlines(),
        f"the order of collectives {schedule_plan.starts}",
    ]
    lines = [*map(Line, VERSIONS), *_lines(plan), *map(Line, others)]
    mine = hashlib.sha256("\n".join(x.text for x in lines).encode()).hexdigest()
    digests = gathered(name, "a digest of programs", mine)
    if len(set(digests)) == 1:
        return
    texts = gathered(name, "programs", lines)
    own = [[x for x, _ in lines if x.startswith("in ")] for lines in texts]
    if may_have_own_sizes and any(x != own[0] for x in own):
        got = "arguments differ in size between ranks"
        raise uneven_shards.NeedsOwnSizes.of(name, got)
    other = next(r for r, digest in enumerate(digests) if digest != digests[0])
    raise _different(name, texts[0], texts[other], other)


def agree_on_digest(name: str, placed: Placed, digest: str) -> None:
    """Refuse an artefact whose file has another digest on another rank.

    Raises:
        DivergenceError: ranks have other files.
    """
    if not has_others(placed):
        return
    digests = gathered(name, "digests of files", digest)
    other = next((r for r, x in enumerate(digests) if x != digests[0]), None)
    if other is not None:
        got = f"ranks 0 and {other} load different files"
        raise DivergenceError.of(name, got, fix="load the same file on all ranks")


def _different(name: str, first: list[Any], others: list[Any], rank: int) -> DivergenceError:
    """Build the DivergenceError for two ranks with different programs."""
    none: Any = ("(nothing)", None)
    pairs = itertools.zip_longest(first, others, fillvalue=none)
    a, b = next((a, b) for a, b in pairs if a[0] != b[0])
    a, b = Line(*a), Line(*b)
    fix = SAME_PROGRAM
    if a.text in VERSIONS or b.text in VERSIONS:
        fix = "use the same environment on all ranks"
    elif len({CONSTANTS.sub("", x.text) for x in (a, b)}) == 1:
        fix = SAME_CONSTANTS
    return DivergenceError.of(
        name, "ranks hold different programs", f"rank 0: {a}", f"rank {rank}: {b}", fix=fix
    )


def agree_on_collectives(name: str, placed: Placed, program: LocalProgram) -> None:
    """Compare the collectives of this rank's program with those of the ranks that it
    communicates with. Ranks whose shards are uneven have programs of their own.

    Raises:
        DivergenceError: quotes the first collective that differs.
    """
    mine = placed.coordinate, [*_collectives(program)]
    everyone = gathered(name, "collectives", mine)
    by_place: dict[Any, list[Any]] = {tuple(at): rows for at, rows in everyone}
    wrong = None
    for k, axis in enumerate(placed.axes.names):
        groups: dict[Any, Any] = {}
        for at, rows in sorted(by_place.items()):
            text = [f"{kind} over {over}" for kind, over, _ in rows]
            text += [what for _, over, what in rows if over == axis]
            group = (*at[:k], *at[k + 1 :])
            first = groups.setdefault(group, (at, text))
            wrong = wrong or _first_other(first, (at, text))
    if wrong is not None:
        got = "ranks with shards of different sizes communicate differently"
        raise DivergenceError.of(name, got, *wrong, fix=SAME_COLLECTIVES)


def _collectives(program: LocalProgram) -> Iterator[tuple[str, str, str]]:
    """List kind, axis and payload of each collective of a program, in order."""
    for node in inner_nodes(program.graph):
        record = node.meta.get("collective")
        if record is not None:
            x = node.all_input_nodes[0].meta["val"]
            what = f"{record.kind} {record.op or ''} over {record.axis} of "
            what += f"{tuple(x.shape)} {x.dtype}"
            yield record.kind, record.axis, what


def _first_other(a: Any, b: Any) -> list[str] | None:
    """Find the first lines in which the programs of two ranks differ."""
    pairs = itertools.zip_longest(a[1], b[1], fillvalue="(nothing)")
    for one, other in pairs:
        if one != other:
            return [f"rank at {a[0]}: {one}", f"rank at {b[0]}: {other}"]
    return None


def _lines(plan: Plan) -> list[Line]:
    ins = [
        f"in {tuple(slot.value.shape)} {slot.value.dtype} placed {slot.placements}"
        for slot in plan.ins
    ]
    steps = [line for step in plan.steps for line in (_line(step), *_inside(step))]
    return [Line(str(plan.axes)), *map(Line, ins), *steps]


def _inside(step: Any) -> list[Line]:
    if not isinstance(step, Nested):
        return []
    loop = step.node.target
    settings = [x for x in attrs.astuple(loop, recurse=False) if isinstance(x, (int, bool))]
    heads = [Line(f"{loop} of {settings}")]
    if isinstance(step, Pipelined):
        source = located(**origin_of(step.node)) or None
        rows = (" ".join(map(str, row)) for row in step.actions.schedule.table)
        heads += [Line(f"coordinate {c} runs {row}", source) for c, row in enumerate(rows)]
    return [*heads, *(line for plan in step.plans for line in _lines(plan))]


def _line(step: Any) -> Line:
    source = located(**origin_of(step.node)) or None
    if isinstance(step, SENDING):
        kinds = " ".join(m.kind for m in step.moves)
        text = f"{kinds} {step.source.placements} -> {step.target.placements}"
        return Line(f"%{step.node.name}: {text}", source)
    made = " ".join(f"{tuple(s.value.shape)} placed {s.placements}" for s in step.made)
    constants = [
        torch.fx.node.map_aggregate(x, _without_number)
        for x in (*step.node.args, *step.node.kwargs.items())
        if not isinstance(x, torch.fx.Node)
    ]
    op = getattr(step.node.target, "__name__", step.node.target)
    return Line(f"%{step.node.name}: {op} {constants} -> {made}", source)


def _without_number(x: Any) -> Any:
    """Print a device by its type alone: ranks of one machine differ in the device index."""
    return x.type if isinstance(x, torch.device) else x


def checked(
    run: Callable[[list[Any]], Any], request: Request, placed: Placed
) -> Callable[[list[Any]], Any]:
    """Wrap `run` so that under SHARDFN_CHECK=1 ranks compare their plain tensors at each call."""
    if os.environ.get("SHARDFN_CHECK") != "1" or not has_others(placed):
        return run

    def compare_and_run(leaves: list[Any]) -> Any:
        compare_ranks(request, placed, leaves)
        return run(leaves)

    return compare_and_run


def has_others(placed: Placed) -> bool:
    """Return whether all processes of the job take part in a call, and so can be compared. A call
    without a mesh is local; a mesh of some ranks is not called by the others.
    """
    if placed.world.kind != "real" or placed.world.size == 1 or placed.mesh is None:
        return False
    return _compat.root_mesh(placed.mesh).size() == placed.world.size


def state_agreed(name: str, placed: Placed) -> Callable[[int], torch.Tensor] | None:
    """Build the function that returns the random state of a call. It compares torch's seed among
    ranks when the seed is new. None if no other rank takes part.
    """
    if not has_others(placed):
        return None

    def take(draws: int) -> torch.Tensor:
        seed = ambient.state.uncompared_seed()
        seeds = [] if seed is None else gathered(name, "a new seed of torch", seed)
        other = next((r for r, theirs in enumerate(seeds) if theirs != seeds[0]), None)
        if other is not None:
            got = f"torch's seed is {seeds[0]} on rank 0, but {seeds[other]} on rank {other}"
            fix = (
                "call torch.manual_seed(seed) or sf.random.state.seed(seed) with the same seed on "
                "all ranks"
            )
            needed = "the same random numbers on all ranks"
            raise DivergenceError.of(name, got, needed=needed, fix=fix)
        return ambient.state.take(draws)

    return take


def compare_ranks(
    request: Request,
    placed: Placed,
    leaves: Sequence[Any],
    closed_over: Sequence[torch.Tensor] = (),
    names: Sequence[str] = (),
    *,
    staging: bool = False,
) -> None:
    """Compare the tensors of a call with those of the other ranks. Plain ones are global values,
    and must be equal; a DTensor must be one on all ranks.

    Args:
        request: the function, which errors name.
        placed: the arguments of the call.
        leaves: all leaves of the arguments.
        closed_over: the tensors that the function closes over.
        names: the user's name of each, for errors; those of the last may lack.
        staging: whether `agree` follows, which compares shapes and dtypes.

    Raises:
        DivergenceError: names the first argument that differs, on every rank.
    """
    if not has_others(placed):
        return
    rows = [(f"argument {p}", x) for p, x in zip(placed.paths, leaves, strict=True)]
    outside = [f"closed-over tensor {i}" for i in range(len(closed_over))]
    rows += zip(outside, closed_over, strict=True)
    parts_of = whole_mesh(request)
    mine = [
        [_kind(what, x), _digest(x, parts_of)] for what, x in rows if isinstance(x, torch.Tensor)
    ]
    kind = "tensors" if staging else f"tensors of {request.name}"
    everyone = gathered(request.name, kind, (staging, mine))
    kinds = [[kind for kind, _ in theirs] for _, theirs in everyone]
    if all(is_staging for is_staging, _ in everyone) and any(other != kinds[0] for other in kinds):
        return  # the ranks' programs differ, which `agree` reports line by line
    named = {path: _closed_over(name) for path, name in zip(outside, names, strict=False)}
    _compare(request, [rows for _, rows in everyone], named)


def _closed_over(name: str) -> str:
    """Name a closed-over tensor in an error; one without a name is `a tensor of shape ...`."""
    is_unnamed = name.startswith("a tensor ")
    return name.replace("a tensor", "a closed-over tensor") if is_unnamed else f"closed-over {name}"


def _compare(request: Request, everyone: Sequence[Sequence[Any]], named: Mapping[str, str]) -> None:
    """Raise for the first tensor that is not the same on all ranks.

    Args:
        request: the function.
        everyone: the rows of each rank.
        named: what errors call some tensors, by their path in the rows.

    Raises:
        DivergenceError: names the first argument that differs, on every rank.
    """
    first = _by_path(everyone[0])
    for rank, rows in enumerate(everyone):
        other = _by_path(rows)
        for path in {**first, **other}:
            mine, theirs = first.get(path), other.get(path)
            if mine != theirs:
                raise _differing(request, named.get(path, path), (mine, theirs), rank)


def _by_path(rows: Sequence[Any]) -> dict[str, Any]:
    """Index the rows that ranks compare by the argument path of the tensor."""
    return {row[0][0]: row for row in rows}


def _kind(what: str, x: torch.Tensor) -> list[Any]:
    """Describe a tensor by the facts that ranks compare while they stage; plans tell DTensors
    apart.
    """
    return [what, list(x.shape), str(x.dtype)] if _is_plain(x) else [what, None, ""]


def _digest(x: torch.Tensor, mesh: Any) -> str:
    """Hash what must be the same on all ranks: the values of a plain tensor, or of a DTensor on a
    submesh.
    """
    if _is_plain(x):
        return digest_of(x)
    if not getattr(x, OF_PART, False) and not is_on_part(x, mesh):
        return ""
    whole: Any = x
    return digest_of((on_all_stages(as_chunks(whole)) if is_own(x) else whole).full_tensor())


def _differing(request: Request, what: str, rows: tuple[Any, Any], rank: int) -> DivergenceError:
    """Build the error for a tensor that differs between rank 0 and another rank.

    Args:
        request: the function.
        what: the path of the tensor.
        rows: what rank 0 compares of it, and the other rank; None where it has no tensor there.
        rank: the other rank.
    """
    where = f"{request.name}, {what}"
    source = call_site()
    fix = "use the same value on every rank (set a seed, or broadcast), "
    fix += "or sf.from_local if the value is this rank's shard"
    mine, theirs = map(_class_of, rows)
    got = f"{mine} that differs between rank 0 and rank {rank}"
    if mine == OF_DTENSOR:
        got = (
            f"the DTensor is on a submesh, but rank {rank} is on another submesh, which holds "
            "other values"
        )
        fix = "DTensor.from_local(x.to_local(), mesh, placements) on the whole mesh"
    if mine != theirs:
        got = f"{mine} on rank 0, {theirs} on rank {rank}"
        fix = "use sf.distribute or sf.from_local on every rank, or on none"
    needed = "a global value, the same on every rank"
    return DivergenceError.of(
        where, got, needed=needed, fix=fix, source=source, arg_path=what.removeprefix("argument ")
    )


def _class_of(row: Any) -> str:
    """Print the tensor class in a compared row, for an error."""
    if row is None:
        return "no tensor"
    return OF_DTENSOR if row[0][1] is None else "a plain tensor"


def _is_plain(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not isinstance(x, DTensor)


def digest_of(x: torch.Tensor) -> str:
    """Hash the values of one tensor."""
    plain = x.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return hashlib.sha256(plain.view(-1).view(torch.uint8).numpy().data).hexdigest()
