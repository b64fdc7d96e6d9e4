"""The price of one rank's step, read from its lowered and its compiled program."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch

from ... import _compat
from ...capture.printing import tensor_type, value_type
from ...errors import ShardError, call_site
from ...hardware import Hardware, Link, hardware_of
from ...inspect.budget import PUBLIC_READERS
from ...inspect.step_time import step_time
from ...types import Collective, LocalProgram
from .lock_file import Bucket, Price, Sent
from .source_lines import SourceLines

STEP, BACKWARD = "step", "backward"  # the programs of a step
START = "start"  # where a bucket of arguments is ready
UNNAMED = "<"  # how the path of a tensor begins that a program closes over
DIGITS = 4  # of a predicted time
DOES = " -> "  # between a line and what it sends
_KERNELS = re.compile(
    r"extern_kernels\.(\w+)\(|\b((?:cpp|triton)_\w*?fused\w*?)(?:_\d+)?(?:\.run)?\("
)


@attrs.frozen
class Read:
    """The price of a step, and where its statements stand now: `file:line` by their text."""

    price: Price
    places: Mapping[str, str]


def read_price(
    lowered: Any,
    lines: SourceLines,
    *,
    hardware: Hardware | str,
    links: Mapping[str, Link] | None,
    kernels: bool,
) -> Read:
    """Read the price of a step.

    Args:
        lowered: its lowered program.
        lines: names the lines of the user's files.
        hardware: the model of its time.
        links: of mesh axes, in place of the hardware's.
        kernels: whether to compile it, and count its kernels.
    """
    model = hardware_of(hardware, "lock")
    halves = {STEP: lowered}
    if lowered.backward is not None:
        halves[BACKWARD] = lowered.backward
    parts = {name: part for half in halves.items() for name, part in _stages(*half)}
    sent = [c for part in parts.values() for c in part.collectives]
    placed, axes = lowered.traced.placed, lowered.program.axes
    rows = [
        row for part in parts.values() for row in step_time(part.program, model).ops if row.source
    ]
    places: dict[str, str] = {}
    for source in [*(row.source for row in rows), *(c.source for c in sent)]:
        if source:
            places.setdefault(str(lines.statement(source)), lines.short(source))
    ops: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in rows:
        if row.axis is None and row.source:
            ops[str(lines.statement(row.source))][row.name] += row.count
    price = Price(
        function=lowered.program.name,
        mesh=str(axes) if axes.names else "one device",
        device=placed.device,
        backend=lowered.traced.request.backend,
        rank=placed.world.rank,
        torch=".".join(str(_compat.TORCH_VERSION).split(".")[:2]),
        hardware=model.name,
        arguments=_arguments(lowered.program),
        closed_over=_closed_over(lowered.program),
        results=_results([part.program for _, part in _stages(STEP, lowered)]),
        collectives=_by_line((c for c in sent if c.bucket is None), lines),
        buckets=_buckets(lowered.plan),
        bytes=_by_axis(sent),
        peak_bytes={name: part.memory.peak for name, part in parts.items()},
        ms={name: _milliseconds(x.time(model, links).total) for name, x in halves.items()},
        ops={line: dict(counts) for line, counts in ops.items()},
        kernels=_kernels(lowered) if kernels else None,
    )
    return Read(price, places)


def _stages(name: str, half: Any) -> list[tuple[str, Any]]:
    """Return the programs of all stages of a pipeline, or the one program, by name."""
    axis = half.partition.stage_axis
    if axis is None:
        return [(name, half)]
    own = half.traced.placed.coordinate
    size = half.program.axes.sizes[axis]
    programs = [half.stage(k) for k in range(size)]
    return [
        (f"stage {k}", attrs.evolve(half, programs={own: program}))
        for k, program in enumerate(programs)
    ]


def _arguments(program: LocalProgram) -> dict[str, str]:
    """Return the types of the arguments, by path."""
    return {path: kind for path, kind in _inputs(program) if not path.startswith(UNNAMED)}


def _closed_over(program: LocalProgram) -> dict[str, int]:
    """Return how many tensors of each type a program closes over. They have numbers for names,
    and which constants are among them depends on torch.
    """
    rows = _inputs(program)
    return dict(collections.Counter(kind for path, kind in rows if path.startswith(UNNAMED)))


def _inputs(program: LocalProgram) -> list[tuple[str, str]]:
    names = program.axes.names
    holders = program.graph.find_nodes(op="placeholder")[len(names) :]
    rows = zip(program.in_paths, holders, strict=True)
    return [(path, _type(x, names)) for path, x in rows]


def _results(programs: Sequence[LocalProgram]) -> dict[str, str]:
    """Return the types of results: of a pipeline, as the stage knows them that computes them."""
    results: dict[str, str] = {}
    known: set[str] = set()  # whose global shape a program has
    for program in programs:
        (output,) = program.graph.find_nodes(op="output")
        rows = zip(program.out_paths, output.args[0], program.out_placements, strict=False)
        for path, x, placements in rows:
            if x is None or path in known:
                continue
            if "type" in x.meta:
                known.add(path)
                shape, _ = x.meta["type"]
                dtype = x.meta["val"].dtype
                results[path] = tensor_type(shape, dtype, placements, program.axes.names)
            else:
                results.setdefault(path, value_type(x.meta["val"]))
    return results


def _type(node: torch.fx.Node, names: tuple[str, ...]) -> str:
    """Return the dtype, global shape and placements of a value, as programs print them."""
    value, placed = node.meta["val"], node.meta.get("type")
    if placed is None:
        return value_type(value)
    shape, placements = placed
    return tensor_type(shape, value.dtype, placements, names)


def does(kind: str, op: str | None, axis: str) -> str:
    """Return a collective as text: its kind, its reduction and its mesh axis."""
    return f"{kind}[{', '.join(filter(None, (op, axis)))}]"


def _by_line(sent: Iterable[Collective], lines: SourceLines) -> dict[str, Sent]:
    """Return what each line sends."""
    rows: dict[str, Sent] = {}
    for c in sent:
        line = str(lines.statement(c.source)) if c.source else _reader(c)
        key = f"{line}{DOES}{does(c.kind, c.op, c.axis)}"
        before = rows.get(key, Sent(0, 0))
        rows[key] = Sent(
            before.count + 1, before.bytes + c.nbytes, before.implicit + int(c.implicit)
        )
    return rows


def _reader(c: Collective) -> str:
    """Return what a collective without a line is for."""
    name = c.name.rstrip("0123456789").rstrip("_")
    return PUBLIC_READERS.get(name, name)


def _by_axis(sent: Iterable[Collective]) -> dict[str, int]:
    """Return the bytes of each kind of collective over each axis."""
    totals: collections.Counter[str] = collections.Counter()
    for c in sent:
        totals[f"{c.kind} over {c.axis}"] += c.nbytes
    return dict(totals)


def _buckets(plan: Any) -> tuple[Bucket, ...]:
    return tuple(
        Bucket(
            does(b.kind, b.op, b.axis),
            b.dtype,
            b.nbytes,
            len(b.leaves),
            b.leaves[0],
            b.leaves[-1],
            f"ready at {b.ready}" if b.ready != START else f"read first by {b.first_use}",
        )
        for b in plan.buckets
    )


def _milliseconds(seconds: float) -> float:
    return float(f"{1e3 * seconds:.{DIGITS}g}")


def _kernels(lowered: Any) -> dict[str, int] | None:
    """Compile a step, and count the kernels that its code calls, by names without numbers.

    Raises:
        ShardError: nothing is compiled in this world, or by this backend.
    """
    compiled = lowered.compile()
    runners = [compiled.runner, compiled.backward and compiled.backward.runner]
    codes = [code for x in runners if x is not None and (code := _compat.generated_code(x))]
    if not codes:
        got = f"kernels of {lowered.program.name}, which is not compiled"
        needed = 'backend="inductor", with one process per rank or with one rank in a fake world'
        fix = "sf.fake_world(n, numerics=False)"
        source = call_site()
        raise ShardError.of("lock, kernels", got, needed=needed, fix=fix, source=source)
    counts: collections.Counter[str] = collections.Counter()
    for code in codes:
        body = code[code.index("def call(") :]
        counts.update(library or fused for library, fused in _KERNELS.findall(body))
    return dict(counts)
