"""The simulator: all ranks of a world in lockstep, in one process, and a deadlock detector.

Each rank is a generator that yields at each collective. When every rank of a group has arrived
with the same request, the values are combined as Gloo combines them and the group goes on.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import attrs
import torch

from ..collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    COLLECTIVES,
    HALO,
    PPERMUTE,
    RAGGED_ALL_TO_ALL,
    REDUCE_SCATTER,
    implement,
)
from ..compile.op_by_op import run_as
from ..errors import SAME_COLLECTIVES, DivergenceError, ShardError
from ..ops import debug
from ..ops.debug import DEBUG
from ..ops.loops import Loop
from ..ops.messages import Receive, Send, shown
from ..ops.ragged import rows_of_each
from ..source_text import located
from ..types import Collective, LocalProgram, MeshAxes
from . import cache
from .ring import ring_reduce

WAIT = torch.ops._c10d_functional.wait_tensor.default
# takes the rank, the node and its result, of each input and of each node that has run; of loops
# the inner ones too
Watch = Callable[[int, torch.fx.Node, Any], None]
REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


@attrs.frozen(eq=False)
class Request:
    """The collective over one axis that a rank stops at."""

    record: Collective
    what: tuple[Any, ...]  # the op and its constants; equal on all ranks of the group
    value: torch.Tensor
    others: tuple[torch.Tensor, ...] = ()  # further tensors; equal on all ranks of the group


@attrs.frozen(eq=False)
class Mail:
    """A message of a pipeline that a rank sends, or waits for."""

    what: Send | Receive
    values: list[torch.Tensor]

    def key(self, coordinates: tuple[int, ...], axes: MeshAxes) -> tuple[Any, ...]:
        """The name of the message among those of all ranks."""
        k = axes.names.index(self.what.axis)
        return (*coordinates[:k], *coordinates[k + 1 :]), self.what.message.number


@attrs.frozen(eq=False)
class Shown:
    """A call of `sf.debug` that a rank stops at, until no other rank can go on."""

    what: str
    values: list[torch.Tensor]


@attrs.frozen(eq=False)
class _Step:
    """One node of a local graph, ready to run: its arguments by register, and the registers to free
    after it.
    """

    run: Callable[..., Any]
    call: tuple[Any, Any]  # args and kwargs, with registers for values
    out: int
    free: tuple[int, ...]
    record: Collective | None
    node: torch.fx.Node


def simulate(
    programs: Sequence[LocalProgram],
    inputs: Sequence[Sequence[torch.Tensor]],
    coordinates: Sequence[Sequence[int]],
    watch: Watch | None = None,
) -> list[Any]:
    """Run one program per rank.

    Args:
        programs: the program of each rank. Ranks may share one.
        inputs: the local tensors of each rank.
        coordinates: the coordinates of each rank.
        watch: takes the rank, the node and its result, of each input and each node that has run.

    Returns:
        The list of results of each rank.

    Raises:
        DivergenceError: the ranks of a group enter different collectives, or deadlock.
    """
    axes = programs[0].axes
    with torch.no_grad():
        ranks = [
            _rank(p.graph, (*map(torch.tensor, c), *xs), _watch_of(watch, rank))
            for rank, (p, xs, c) in enumerate(zip(programs, inputs, coordinates, strict=True))
        ]
        return _lockstep(ranks, [tuple(c) for c in coordinates], axes)


def _watch_of(watch: Watch | None, rank: int) -> Callable[[torch.fx.Node, Any], None] | None:
    return None if watch is None else functools.partial(watch, rank)


def _lockstep(
    ranks: list[Generator[Request, torch.Tensor, Any]],
    coordinates: list[tuple[int, ...]],
    axes: MeshAxes,
) -> list[Any]:
    results: list[Any] = [None] * len(ranks)
    asked: dict[int, Any] = {}  # a Request, or values that a rank shows
    ready: dict[int, Any] = dict.fromkeys(range(len(ranks)))
    at = {c: i for i, c in enumerate(coordinates)}
    mail: dict[Any, torch.Tensor] = {}  # messages on their way
    while ready or asked:
        for i, answer in ready.items():
            try:
                with debug.as_rank(i):
                    asked[i] = ranks[i].send(answer)
            except StopIteration as stop:
                results[i] = stop.value
        ready = {}
        for group in _groups(asked, coordinates, at, axes):
            ready.update(zip(group, combine([asked.pop(i) for i in group]), strict=True))
        ready.update(_delivered(asked, mail, coordinates, axes))
        if not ready:
            ready.update(dict.fromkeys(_shown(asked)))
        if asked and not ready:
            raise _deadlock(asked)
    return results


def _groups(
    asked: dict[int, Request], coordinates: Any, at: Any, axes: MeshAxes
) -> Iterator[list[int]]:
    """Select the groups whose ranks have all arrived at the same collective."""
    done: set[int] = set()
    asked = {i: request for i, request in asked.items() if isinstance(request, Request)}
    for i in list(asked):
        if i in done:
            continue
        k = axes.names.index(asked[i].record.axis)
        before = coordinates[i][:k]
        after = coordinates[i][k + 1 :]
        group = [at[*before, j, *after] for j in range(axes.sizes[k])]
        if all(j in asked and asked[j].record.axis == asked[i].record.axis for j in group):
            _same_request(group, asked)
            done.update(group)
            yield group


def _delivered(
    asked: dict[int, Any], mail: dict[Any, torch.Tensor], coordinates: Any, axes: MeshAxes
) -> dict[int, list[torch.Tensor]]:
    """Take messages on their way, and answer the ranks that wait for one that is."""
    ready: dict[int, list[torch.Tensor]] = {}
    for i, request in list(asked.items()):
        if isinstance(request, Mail):
            key = request.key(coordinates[i], axes)
            if isinstance(request.what, Send):
                mail[key] = request.values[0]
                ready[i] = []
            elif key in mail:
                ready[i] = [mail.pop(key).clone()]
    for i in ready:
        del asked[i]
    return ready


def _shown(asked: dict[int, Any]) -> list[int]:
    """Display the values of all ranks that wait at one `sf.debug` call, and let them go on."""
    waiting = {i: r for i, r in asked.items() if isinstance(r, Shown)}
    first = next(iter(waiting.values()), None)
    ranks = sorted(i for i, r in waiting.items() if first is not None and r.what == first.what)
    if first is not None:
        debug.run_debug_call(first.what, {i: waiting[i].values for i in ranks})
    for i in ranks:
        del asked[i]
    return ranks


def _same_request(group: list[int], asked: dict[int, Request]) -> None:
    first = asked[group[0]]
    for j in group[1:]:
        other = asked[j]
        if (other.what, other.value.shape, other.value.dtype) != (
            first.what,
            first.value.shape,
            first.value.dtype,
        ):
            said = [_said(group[0], first), _said(j, other)]
            raise DivergenceError.of(
                f"axis {first.record.axis}",
                "ranks enter different collectives",
                *said,
                fix=SAME_COLLECTIVES,
            )
        if not all(map(torch.equal, other.others, first.others)):
            raise DivergenceError.of(
                f"axis {first.record.axis}",
                "ranks enter a collective with different counts",
                _said(group[0], first),
                _said(j, other),
                needed="one matrix of counts that is equal on all ranks",
                fix="get the counts from sf.all_gather over the axis",
            )


def _deadlock(asked: dict[int, Any]) -> DivergenceError:
    said = [_said(i, request) for i, request in sorted(asked.items())[:8]]
    waits = {
        "collectives that the other ranks of the group never enter": Request,
        "messages that no rank sends": Mail,
    }
    held = [
        text for text, kind in waits.items() if any(isinstance(r, kind) for r in asked.values())
    ]
    return DivergenceError.of("simulator", f"deadlock: blocked in {', and in '.join(held)}", *said)


def _said(rank: int, request: Request | Mail) -> str:
    if isinstance(request, Mail):
        return f"rank {rank}: waits for {shown(request.what.message)}"
    record, value = request.record, request.value
    what = f"{record.kind} over {record.axis}"
    sent = f"{tuple(value.shape)} {value.dtype}"
    where = located(**record.origin) or record.name
    return f"rank {rank}: {what} of {sent}, at {where}"


def combine(group: list[Request]) -> list[torch.Tensor]:
    """Compute the value that each rank of a group receives from a collective."""
    kind = COLLECTIVES[group[0].record.kind]
    assert kind.combine is not None, f"{kind.name} cannot be simulated"
    try:
        return kind.combine(group)
    except ShardError as error:
        error.locate(**group[0].record.origin)
        raise


def _reduced(group: list[Request]) -> torch.Tensor:
    op = group[0].record.op
    assert op is not None, f"{group[0].record.kind} reduces nothing"
    return ring_reduce([r.value for r in group], REDUCE[op])


def _all_reduce(group: list[Request]) -> list[torch.Tensor]:
    total = _reduced(group)
    return [total.clone() if i else total for i in range(len(group))]


def _all_gather(group: list[Request]) -> list[torch.Tensor]:
    whole = torch.cat([r.value for r in group])
    return [whole.clone() if i else whole for i in range(len(group))]


def _reduce_scatter(group: list[Request]) -> list[torch.Tensor]:
    return [x.clone() for x in _reduced(group).chunk(len(group))]


def _all_to_all(group: list[Request]) -> list[torch.Tensor]:
    sent = [r.value.chunk(len(group)) for r in group]
    return [torch.cat([parts[i] for parts in sent]) for i in range(len(group))]


def _halo(group: list[Request]) -> list[torch.Tensor]:
    """Exchange edge rows with the previous and the next rank. Ranks at the ends have
    one neighbour.
    """
    before = group[0].what[1]
    ends = torch.zeros_like(group[0].value)
    sent = [r.value for r in group]
    after = ends.numel() - before
    previous = [ends, *sent[:-1]]
    following = [*sent[1:], ends]
    neighbours = zip(previous, following, strict=True)
    return [torch.cat([left[after:], right[:after]]) for left, right in neighbours]


def _ppermute(group: list[Request]) -> list[torch.Tensor]:
    """Permute the values among the ranks. A rank without a source gets zeros."""
    _, sources, targets, _ = group[0].what
    out = [torch.zeros_like(r.value) for r in group]
    for source, target in zip(sources, targets, strict=True):
        out[target] = group[source].value.clone()
    return out


def _ragged_all_to_all(group: list[Request]) -> list[torch.Tensor]:
    """Exchange rows by the counts that all ranks have."""
    _, rows, *_ = group[0].what
    (counts,) = group[0].others
    return rows_of_each([r.value for r in group], counts, rows)


implement(ALL_REDUCE, combine=_all_reduce)
implement(ALL_GATHER, combine=_all_gather)
implement(REDUCE_SCATTER, combine=_reduce_scatter)
implement(ALL_TO_ALL, combine=_all_to_all)
implement(HALO, combine=_halo)
implement(PPERMUTE, combine=_ppermute)
implement(RAGGED_ALL_TO_ALL, combine=_ragged_all_to_all)


def _rank(
    graph: torch.fx.Graph,
    inputs: Sequence[torch.Tensor],
    watch: Callable[[torch.fx.Node, Any], None] | None = None,
) -> Generator[Any, torch.Tensor, list[torch.Tensor]]:
    """Run one rank's graph, and yield at each collective, and at each call that shows values."""
    steps, registers, output = cache.prepared(graph, _prepare)
    values: list[Any] = [*inputs, *[None] * (registers - len(inputs))]
    if watch is not None:
        for node, x in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
            watch(node, x)
    for step in steps:
        args, kwargs = torch.fx.node.map_aggregate(
            step.call, lambda a: values[a.index] if isinstance(a, _Register) else a
        )
        if step.run is DEBUG:
            yield Shown(args[1], args[0])
        elif step.record is not None:
            value, *rest = args
            others = tuple(a for a in rest if isinstance(a, torch.Tensor))
            constants = (a for a in rest if not isinstance(a, torch.Tensor))
            values[step.out] = yield Request(step.record, (step.run, *constants), value, others)
        elif isinstance(step.run, Loop):
            values[step.out] = yield from _looping(step.run, args, watch)
        else:
            values[step.out] = step.run(*args, **kwargs)
        if watch is not None:
            watch(step.node, values[step.out])
        for dead in step.free:
            values[dead] = None
    return [values[r.index] for r in output]


def failed_node(frame: types.FrameType) -> torch.fx.Node | None:
    """Return the node that a rank's frame runs, or None for another frame."""
    step = frame.f_locals.get("step") if frame.f_code is _rank.__code__ else None
    return step and step.node


def _looping(
    loop: Loop,
    tensors: Sequence[torch.Tensor],
    watch: Callable[[torch.fx.Node, Any], None] | None = None,
) -> Generator[Any, Any, list[torch.Tensor]]:
    """Run the graphs of a loop for one rank, yielding at each collective and message inside."""
    driver = loop.drive(tensors)
    outs = None
    while True:
        try:
            which, inputs = driver.send(outs) if outs is not None else next(driver)
        except StopIteration as stop:
            return stop.value
        if isinstance(which, int):
            outs = yield from _rank(loop.graphs[which], inputs, watch)
        else:
            outs = yield Mail(which, inputs)


@attrs.frozen
class _Register:
    index: int


def _prepare(graph: torch.fx.Graph) -> tuple[list[_Step], int, list[_Register]]:
    number = {
        node: _Register(i) for i, node in enumerate(n for n in graph.nodes if n.op != "output")
    }
    last = {read: node for node in graph.nodes for read in node.all_input_nodes}
    steps = []
    output = []
    for node in graph.nodes:
        call = torch.fx.node.map_arg((node.args, node.kwargs), number.__getitem__)
        if node.op == "output":
            output = list(call[0][0])
        elif node.op == "call_function":
            free = tuple(number[r].index for r in node.all_input_nodes if last[r] is node)
            run = _identity if node.target is WAIT else run_as(node.target)
            record = node.meta.get("collective")
            steps.append(_Step(run, call, number[node].index, free, record, node))
    return steps, len(number), output


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x
