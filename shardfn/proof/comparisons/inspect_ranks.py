"""`sf.inspect_ranks`: the local tensors of all ranks at each op of a simulated run, forwards and
backwards; `sf.first_nan`: the first op of a run whose result has a nan.
"""

from __future__ import annotations

import html
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from ...accepted import accept
from ...byte_sizes import human_bytes
from ...capture.printed_names import dotted_names, op_name, printed_names
from ...capture.printing import DTYPES, tensor_type
from ...errors import ShardError, call_site, listed
from ...mesh import all_coordinates
from ...runtime.compiled import Compiled, inputs_of_ranks
from ...runtime.simulator import WAIT, simulate
from ...tracebacks import filter_errors
from ...transforms.sharding._shard import Shard
from ...types import LocalProgram
from .layouts import layout_of, staged

SHOWN = 8  # ranks of a printed op
Watch = Callable[[int, torch.Tensor], Any]


@attrs.frozen
class TensorState:
    """Statistics of the elements of a local tensor.

    Args:
        type: the dtype and local shape, as in a printed program.
        least: the smallest finite element, or None.
        most: the largest finite element, or None.
        nans: the number of NaN elements.
        infinities: the number of infinite elements.
        zeros: the number of elements that are zero.
    """

    type: str
    least: float | None
    most: float | None
    nans: int
    infinities: int
    zeros: int

    def __str__(self) -> str:
        counts = {"nan": self.nans, "inf": self.infinities, "zero": self.zeros}
        parts = [f"{n} {name}" for name, n in counts.items() if n]
        span = f"{self.least:.4g} to {self.most:.4g}" if self.least is not None else "no element"
        if self.least == self.most and self.least is not None:
            span = f"all {self.least:.4g}"
        if self.least is None and (self.nans or self.infinities):
            span = "no finite element"
        return ", ".join([f"{self.type} {span}", *parts])


def _state_of(x: torch.Tensor) -> TensorState:
    """What a tensor holds, in numbers; of a complex one, its magnitudes."""
    wide = x.detach().abs().double() if x.is_complex() else x.detach().double()
    finite = wide[torch.isfinite(wide)]
    has_any = bool(finite.numel())
    return TensorState(
        _type(x),
        float(finite.min()) if has_any else None,
        float(finite.max()) if has_any else None,
        int(torch.isnan(wide).sum()),
        int(torch.isinf(wide).sum()),
        int((wide == 0).sum()),
    )


def _type(x: torch.Tensor) -> str:
    return f"{DTYPES.get(x.dtype, x.dtype)}[{', '.join(map(str, x.shape))}]"


@attrs.frozen(eq=False, repr=False)
class OpOnRanks:
    """One op of a simulated run, with the local tensors of all ranks.

    Args:
        number: the position of the op in the run, from 0.
        total: the number of ops in the run.
        op: the name of the op, as in a printed program, or "argument".
        name: the name of the result.
        line: the user's source line as `file:line`, or None.
        phase: "forward" or "backward".
        type: the dtype, global shape and placements of the result, or "" for a part of a larger op.
        values: the result on each rank, or None on a rank that does not run the op.
        inputs: the local tensors that the op reads on each rank, by name.
        on_the_way: the collectives in flight, as text.
        holds: the ranks on which `watch` returns True.
    """

    number: int
    total: int
    op: str
    name: str
    line: str | None
    phase: str
    type: str
    values: tuple[Any, ...]
    inputs: Mapping[str, tuple[Any, ...]]
    on_the_way: tuple[str, ...]
    holds: tuple[int, ...]

    def state(self, rank: int) -> TensorState | None:
        """The statistics of the result on one rank, or None if the result is not a tensor.

        Raises:
            ShardError: the run does not have the rank.
        """
        accept("OpOnRanks.state", rank=rank)
        if rank >= len(self.values):
            got, fix = f"the run has {len(self.values)} ranks", f"0 to {len(self.values) - 1}"
            raise ShardError.of("OpOnRanks.state, rank", f"{got}, no rank {rank}", fix=fix)
        x = self.values[rank]
        return _state_of(x) if isinstance(x, torch.Tensor) else None

    @property
    def heading(self) -> str:
        """A text with the number, name, op, type and source line."""
        where = f"  # {os.path.basename(self.line)}" if self.line else ""
        late = ", backward" if self.phase == "backward" and where else ""
        typed = f": {self.type}" if self.type else ""
        reads = f"({', '.join(self.inputs)})" if self.op != "argument" else ""
        return f"[{self.number}/{self.total}] {self.name} = {self.op}{reads}{typed}{where}{late}"

    def rows(self) -> list[tuple[str, str]]:
        """One row for each group of ranks with equal results, with the ranks and the statistics."""
        texts: dict[str, list[int]] = {}
        for rank, x in enumerate(self.values):
            texts.setdefault(_shown(x), []).append(rank)
        return [(listed(ranks), text) for text, ranks in texts.items()]

    def __repr__(self) -> str:
        lines = [self.heading]
        rows = self.rows()
        lines += [f"  {ranks}: {text}" for ranks, text in rows[:SHOWN]]
        if len(rows) > SHOWN:
            lines.append(f"  and {len(rows) - SHOWN} more")
        lines += [f"  on the way: {text}" for text in self.on_the_way]
        if self.holds:
            lines.append(f"  the watch holds on {listed(self.holds)}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        cells = [
            f"<tr><td>{html.escape(ranks)}</td><td>{html.escape(text)}</td></tr>"
            for ranks, text in self.rows()[:SHOWN]
        ]
        notes = [f"on the way: {text}" for text in self.on_the_way]
        notes += [f"the watch holds on {listed(self.holds)}"] if self.holds else []
        tail = "".join(f"<p>{html.escape(text)}</p>" for text in notes)
        head = f"<p><code>{html.escape(self.heading)}</code></p>"
        return f"{head}<table>{''.join(cells)}</table>{tail}"


def _shown(x: Any) -> str:
    if x is None:
        return "does not run it"
    if isinstance(x, torch.Tensor):
        return str(_state_of(x))
    return f"{len(x)} results" if isinstance(x, list | tuple) else type(x).__name__


class InspectedRun:
    """A record of all ops of a simulated run, with a cursor that points to the current op.

    Iterating over the run yields all ops, and `run[k]` is op k. `next`, `back`, `goto` and
    `next_stop` move the cursor, and return the op at the new position.
    """

    def __init__(self, name: str, ops: Sequence[OpOnRanks]) -> None:
        self.name = name
        self.ops = tuple(ops)
        self.stops = tuple(op for op in self.ops if op.holds)
        self._at = self.stops[0].number if self.stops else 0

    @property
    def here(self) -> OpOnRanks:
        """The op at the cursor."""
        return self.ops[self._at]

    def next(self, count: int = 1) -> OpOnRanks:
        """Move the cursor forwards, at most to the last op."""
        accept("InspectedRun.next", count=count)
        self._at = min(self._at + count, len(self.ops) - 1)
        return self.here

    def back(self, count: int = 1) -> OpOnRanks:
        """Move the cursor backwards, at most to the first op."""
        accept("InspectedRun.back", count=count)
        self._at = max(self._at - count, 0)
        return self.here

    def goto(self, where: int | str) -> OpOnRanks:
        """Move the cursor to an op.

        Args:
            where: the number of the op, from 0, or from -1 backwards. A text that `find` accepts
                means the next matching op after the cursor, or else the first matching op.

        Raises:
            ShardError: the run has no matching op.
        """
        accept("InspectedRun.goto", where=where)
        if isinstance(where, int):
            if not -len(self.ops) <= where < len(self.ops):
                fix = f"0 to {len(self.ops) - 1}"
                raise _refused("goto", f"the run has no op {where}", fix)
            self._at = where % len(self.ops)
            return self.here
        found = self.find(where)
        if not found:
            lines = dict.fromkeys(os.path.basename(x.line) for x in self.ops if x.line)
            places = ", ".join([*lines][:SHOWN])
            fix = f"pass the name of an op, the name of a result, or a source line: {places}"
            raise _refused("goto", f"no op is {where!r}", fix)
        later = [op for op in found if op.number > self._at]
        self._at = (later or found)[0].number
        return self.here

    def find(self, where: str) -> tuple[OpOnRanks, ...]:
        """List the ops of a source line (`train.py:12`), with a result name (`mm_1`), or of a kind
        (`mm`).
        """
        accept("InspectedRun.find", where=where)
        return tuple(op for op in self.ops if _is_at(op, where))

    def next_stop(self) -> OpOnRanks | None:
        """Move the cursor to the next op for which `watch` returns True on a rank. If there is no
        such op, return None.
        """
        later = [op for op in self.stops if op.number > self._at]
        return self.goto(later[0].number) if later else None

    def __len__(self) -> int:
        return len(self.ops)

    def __iter__(self) -> Iterator[OpOnRanks]:
        return iter(self.ops)

    def __getitem__(self, number: int) -> OpOnRanks:
        return self.ops[number]

    def __repr__(self) -> str:
        ranks = len(self.here.values)
        stops = f", a watch holds at {len(self.stops)}" if self.stops else ""
        head = f"{self.name} on {ranks} rank{'s' if ranks > 1 else ''}: {len(self.ops)} ops{stops}"
        return f"{head}\n{self.here!r}"

    def _repr_html_(self) -> str:
        head, *_ = repr(self).split("\n")
        return f"<p>{html.escape(head)}</p>{self.here._repr_html_()}"


def _is_at(op: OpOnRanks, where: str) -> bool:
    if where in (op.name, op.op):
        return True
    return bool(op.line) and (op.line == where or str(op.line).endswith(f"{os.sep}{where}"))


def _refused(place: str, got: str, fix: str) -> ShardError:
    return ShardError.of(f"inspect_ranks, {place}", got, fix=fix, source=call_site())


@filter_errors
def inspect_ranks(step: Any, *args: Any, watch: Watch | None = None) -> InspectedRun:
    """Run a step on all simulated ranks, and keep the local tensors of each op for inspection.

    Args:
        step: a function under `shard`, in a fake world. A function without `shard` runs on one
            device.
        args: the arguments of the step.
        watch: a function of a rank and a local tensor. The cursor of the record starts at the first
            op for which `watch` returns True on a rank.

    Returns:
        A record of all ops of the run, with a cursor that points to the current op. Move the cursor
        with `next()`, `back()`, `goto("train.py:12")` and `next_stop()`, and read the current op
        from `here`. The record keeps all local tensors of all ranks in memory.

    Raises:
        ShardError: the world does not compute the values of all ranks, or `watch` raises an error.

    Example:
        >>> import torch, shardfn as sf
        >>> with sf.fake_world(2):
        ...     mesh = sf.make_mesh((2,), ("dp",))
        ...     mean = sf.shard(lambda x: x.sum(), mesh, sf.P("dp"))
        ...     run = sf.inspect_ranks(mean, torch.arange(4.0))
        >>> run.here
        [0/4] x = argument: f32[4@dp]
          rank 0: f32[2] 0 to 1, 1 zero
          rank 1: f32[2] 2 to 3
    """
    accept("inspect_ranks", step=step, watch=watch)
    return _inspected("inspect_ranks", step, args, watch)


def _inspected(where: str, step: Any, args: tuple[Any, ...], watch: Watch | None) -> InspectedRun:
    layout = layout_of(where, "step", step, {} if isinstance(step, Shard) else None)
    with staged(where, layout, args) as (compiled, leaves):
        return InspectedRun(compiled.request.name, _ops(compiled, leaves, watch))


@attrs.frozen
class _Key:
    """An op of a run, on whichever rank: ranks with other sizes have other graphs."""

    step: int
    target: str
    occurrence: int


def _ops(compiled: Compiled, leaves: list[Any], watch: Watch | None) -> list[OpOnRanks]:
    """Run a program for all ranks, and list its ops in order."""
    axes = compiled.placed.axes
    everyone = all_coordinates(axes) if axes.names else [()]
    programs = [compiled.programs[c] for c in everyone]
    inputs = inputs_of_ranks(compiled)(leaves)
    events: list[list[tuple[torch.fx.Node, Any]]] = [[] for _ in programs]

    def note(rank: int, node: torch.fx.Node, x: Any) -> None:
        events[rank].append((node, x))

    simulate(programs, inputs, everyone, note)
    names = {id(p): _names(p) for p in programs}
    by_rank = [_by_key(rows) for rows in events]
    order = _merged([[*rows] for rows in by_rank])
    # of each rank, the values of the nodes so far: a loop runs its nodes again and again
    values: list[dict[torch.fx.Node, Any]] = [{} for _ in programs]
    waiting: dict[torch.fx.Node, str] = {}
    made = []
    tops = {id(p.graph) for p in programs}
    is_shown = lambda node: not (node.op == "placeholder" and not _is_argument(node, axes, tops))
    order = [key for key in order if any(is_shown(rows[key][0]) for rows in by_rank if key in rows)]
    for rank, rows in enumerate(events):
        for node, x in rows[: len(axes.names)]:
            values[rank][node] = x
    for number, key in enumerate(order):
        here = {rank: rows[key] for rank, rows in enumerate(by_rank) if key in rows}
        node, _ = next(iter(here.values()))
        for rank, (own, x) in here.items():
            values[rank][own] = x
        _note_waiting(waiting, node)
        name_of = names[id(programs[next(iter(here))])]
        made.append(
            OpOnRanks(
                number=number,
                total=len(order),
                op="argument" if node.op == "placeholder" else op_name(node),
                name=name_of.get(node, node.name),
                line=node.meta.get("source"),
                phase=node.meta.get("phase") or "forward",
                type=_global_type(node, axes),
                values=tuple(here[r][1] if r in here else None for r in range(len(programs))),
                inputs=_inputs_of(node, here, values, name_of),
                on_the_way=tuple(waiting.values()),
                holds=_holding(watch, node, here),
            )
        )
    return made


def _names(program: LocalProgram) -> dict[torch.fx.Node, str]:
    held = program.graph.find_nodes(op="placeholder")
    coordinates = len(program.axes.names)
    inputs = {x: x.name for x in held[:coordinates]}
    inputs |= dict(zip(held[coordinates:], dotted_names(program.in_paths), strict=False))
    return printed_names(program.graph, inputs)


def _by_key(rows: list[tuple[torch.fx.Node, Any]]) -> dict[_Key, tuple[torch.fx.Node, Any]]:
    """Key the events of one rank, in order."""
    counts = Counter[tuple[int, str]]()
    keyed = {}
    for node, x in rows:
        target = node.name if node.op == "placeholder" else str(node.target)
        one = node.meta.get("step", -1), target
        keyed[_Key(*one, counts[one])] = (node, x)
        counts[one] += 1
    return keyed


def _merged(rows: list[list[_Key]]) -> list[_Key]:
    """Merge the orders of all ranks: that of the first one, with what only others run after what
    they run before it.
    """
    merged = list(rows[0])
    known = set(merged)
    for row in rows[1:]:
        if row == rows[0]:
            continue
        before: _Key | None = None
        for key in row:
            if key not in known:
                merged.insert(0 if before is None else merged.index(before) + 1, key)
                known.add(key)
            before = key
    return merged


def _is_argument(node: torch.fx.Node, axes: Any, tops: set[int]) -> bool:
    """Whether a placeholder is an argument of the step: no coordinate, and of no loop."""
    if id(node.graph) not in tops:
        return False
    return node.name not in {f"coord_{name}" for name in axes.names}


def _global_type(node: torch.fx.Node, axes: Any) -> str:
    placed = node.meta.get("type")
    value = node.meta.get("val")
    if placed is None or not isinstance(value, torch.Tensor):
        return ""
    shape, marks = placed
    return tensor_type(shape, value.dtype, marks, axes.names if marks else ())


def _note_waiting(waiting: dict[torch.fx.Node, str], node: torch.fx.Node) -> None:
    """Enter a collective that starts, and remove one that is waited for."""
    record = node.meta.get("collective")
    if record is not None:
        where = f" for {os.path.basename(record.source)}" if record.source else ""
        waiting[node] = f"{record.kind} over {record.axis}, {human_bytes(record.nbytes)}{where}"
    if node.target is WAIT:
        for x in node.all_input_nodes:
            waiting.pop(x, None)


def _inputs_of(
    node: torch.fx.Node,
    here: Mapping[int, tuple[torch.fx.Node, Any]],
    values: list[dict[torch.fx.Node, Any]],
    names: Mapping[torch.fx.Node, str],
) -> dict[str, tuple[Any, ...]]:
    """The local tensors that an op reads, on each rank, by name."""
    found = {}
    for k, x in enumerate(node.all_input_nodes):
        row: list[Any] = [None] * len(values)
        for rank, (own, _) in here.items():
            reads = own.all_input_nodes
            row[rank] = values[rank].get(reads[k]) if k < len(reads) else None
        found[names.get(x, x.name)] = tuple(row)
    return found


def _holding(
    watch: Watch | None, node: torch.fx.Node, here: Mapping[int, tuple[torch.fx.Node, Any]]
) -> tuple[int, ...]:
    """List the ranks on which a watch holds."""
    if watch is None:
        return ()
    holds = []
    for rank, (_, x) in here.items():
        if not isinstance(x, torch.Tensor):
            continue
        try:
            if bool(watch(rank, x)):
                holds.append(rank)
        except Exception as error:  # the user's function may raise anything
            where = node.meta.get("source") or node.name
            got = f"it raises {type(error).__name__}: {error}"
            at = f"watch was called at {where}, on rank {rank}, with a {_type(x)}"
            fix = "watch=lambda rank, x: bool(x.isnan().any())"
            raise ShardError.of("inspect_ranks, watch", got, at, fix=fix) from error
    return tuple(holds)


@attrs.frozen(eq=False, repr=False)
class NanFound:
    """The first op of a run whose result contains a NaN.

    Args:
        op: the name of the op, or "argument" if an argument contains a NaN.
        name: the name of the result.
        line: the user's source line as `file:line`, or None.
        phase: "forward" or "backward".
        type: the dtype, global shape and placements of the result.
        ranks: the ranks whose local tensor contains a NaN.
        result: the statistics of the result on the first rank with a NaN.
        inputs: the statistics of the inputs of the op on this rank, by name.
    """

    op: str
    name: str
    line: str | None
    phase: str
    type: str
    ranks: tuple[int, ...]
    result: TensorState
    inputs: Mapping[str, TensorState]

    def __repr__(self) -> str:
        where = f" at {self.line}" if self.line else ""
        lines = [
            f"first nan: {self.name} = {self.op}{where}, {self.phase}, on {listed(self.ranks)}"
        ]
        lines.append(f"  {self.type or 'result'}; on rank {self.ranks[0]}: {self.result}")
        lines += [f"  reads {name}: {state}" for name, state in self.inputs.items()]
        return "\n".join(lines)


@filter_errors
def first_nan(step: Any, *args: Any) -> NanFound | None:
    """Run a step on all simulated ranks, and find the first op whose result contains a NaN.

    Args:
        step: a function under `shard`, in a fake world. A function without `shard` runs on one
            device.
        args: the arguments of the step.

    Returns:
        A record of the first op whose result contains a NaN, with the source line, the ranks and
        the inputs of the op. `first_nan` returns None if no value contains a NaN.

    Raises:
        ShardError: the world does not compute the values of all ranks.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.first_nan(lambda x: (x - 1).sqrt().sum(), torch.tensor([0.5, 2.0])).op
        'sqrt'
    """
    accept("first_nan", step=step)
    run = _inspected("first_nan", step, args, lambda rank, x: x.isnan().any())
    if not run.stops:
        return None
    op = run.stops[0]
    rank = op.holds[0]
    rows = {name: row[rank] for name, row in op.inputs.items()}
    return NanFound(
        op.op,
        op.name,
        op.line,
        op.phase,
        op.type,
        op.holds,
        _state_of(op.values[rank]),
        {name: _state_of(x) for name, x in rows.items() if isinstance(x, torch.Tensor)},
    )
