"""Digests of the values of a run, and the comparison of two runs by them: that of a cluster with
that of a laptop, or two of a cluster.

SHARDFN_DIGESTS=path is a folder with a file for each rank. A line is a call, or a value with its
hash, its norm and its projection on fixed weights. The projection is linear and separable, so that
it adds up over shards and over the terms of a Partial sum: runs of other layouts can be compared.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from ... import extensions
from ...capture.printed_names import op_name
from ...compile.op_by_op import run_as
from ...compile.separate import separate
from ...errors import DivergenceError, ShardError, call_site, listed
from ...mesh import all_coordinates
from ...ops.nodes import returned_by
from ...partition import layout
from ...runtime.compiled import Compiled
from ...runtime.layouts import cut
from ...runtime.stages import Lowered
from ...schedule import copied
from ...types import REDUCTIONS, LocalProgram, MeshAxes, MeshPlacements, Program
from .op_results import op_of
from .rounding import epsilons, length_of_sums
from .values_of_ranks import node_of_slots, of_one_rank, slots_and_steps

STEP = 2.399963  # radians between the weights of neighbours: the golden angle
JUMP = 32.0  # how much more than its inputs a value must differ to differ by itself
SUMS = ("add", "sub", "sum", "mean")  # ops whose results may cancel
ROUNDINGS = 16.0  # of a value that has no differing input
FIX = "SHARDFN_DIGESTS=run.digests python train.py, then sf.compare('run.digests', 'other.digests')"


@attrs.frozen(eq=False)
class _Described:
    """What the lines of the values of one program have in common, whichever rank writes them."""

    name: str
    axes: MeshAxes
    nodes: dict[int, torch.fx.Node]  # of slots
    marks: dict[int, MeshPlacements]
    shapes: dict[int, tuple[int, ...]]
    own: set[torch.fx.Node]  # values of one rank
    paths: dict[torch.fx.Node, str]  # of the arguments
    places: dict[torch.fx.Node, int]  # of the nodes in the program

    @classmethod
    def of(cls, name: str, program: Program, plan: Any, axes: MeshAxes) -> _Described:
        slots, _ = slots_and_steps(plan)
        return cls(
            name,
            axes,
            node_of_slots(program, plan),
            {n: slot.placements for n, slot in slots.items()},
            {n: tuple(slot.value.shape) for n, slot in slots.items()},
            of_one_rank(program.graph.graph),
            dict(
                zip(program.graph.graph.find_nodes(op="placeholder"), program.in_paths, strict=True)
            ),
            {node: i for i, node in enumerate(program.graph.graph.nodes)},
        )

    def line(self, number: int, x: torch.Tensor, coordinates: tuple[int, ...]) -> dict[str, Any]:
        """The line of one rank's local tensor of a slot."""
        node = self.nodes[number]
        is_own = node in self.own
        marks = ("R",) * len(self.axes.names) if is_own else self.marks[number]
        shape = tuple(x.shape) if is_own else self.shapes[number]
        is_here = layout.is_here(marks, coordinates)
        op = op_of(node)
        return {
            "slot": number,
            "place": self.places[node],
            "value": node.name,
            "op": op_name(op) if op.op == "call_function" else f"argument {self.paths[op]}",
            "line": node.meta.get("source"),
            "phase": node.meta.get("phase") or "forward",
            "reads": [y.name for y in op.all_input_nodes],
            "shape": shape,
            "dtype": str(x.dtype).removeprefix("torch."),
            "length": _length(op, x),
            "placements": marks,
            "of_rank": is_own,
            "hash": hash_of(x),
            "norm": norm_of(x) if is_here else 0.0,
            "projection": projection_of(x, shape, marks, self.axes, coordinates)
            if is_here
            else 0.0,
        }


def _length(op: torch.fx.Node, x: torch.Tensor) -> int:
    ins = [y.meta["val"] for y in op.all_input_nodes]
    return length_of_sums(op.target, [y for y in ins if isinstance(y, torch.Tensor)], x)


class _Writer:
    """Writes the lines of one rank's call."""

    def __init__(self, described: _Described, rank: int, coordinates: tuple[int, ...]) -> None:
        folder = Path(os.environ[extensions.DIGESTS])
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank{rank}.jsonl"
        self.described, self.coordinates = described, coordinates
        axes = described.axes
        head = {"call": described.name, "axes": axes.names, "sizes": axes.sizes}
        self.lines = [{**head, "coordinates": coordinates}]

    def note(self, node: torch.fx.Node, x: Any) -> None:
        """Take the result of a node."""
        if not isinstance(x, torch.Tensor):
            return
        for number in node.meta.get("slots", ()):
            if number in self.described.nodes:
                self.lines.append(self.described.line(number, x, self.coordinates))

    def close(self) -> None:
        """Append the lines to the file of the rank."""
        with open(self.path, "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in self.lines)
        self.lines = []


def runner(lowered: Lowered, run: extensions.Run) -> extensions.Run:
    """Build a runner of this rank's program that runs op by op and writes digests.

    Args:
        lowered: the program.
        run: the runner in whose place it stands.
    """
    del run
    placed = lowered.traced.placed
    program: LocalProgram = lowered.program
    described = _Described.of(
        lowered.traced.request.name, lowered.traced.program, lowered.partition, placed.axes
    )
    module = torch.fx.GraphModule(torch.nn.Module(), copied(program.graph))
    separate(module, ())
    graph = module.graph
    rank = placed.world.rank if placed.world.kind == "real" else 0

    def run_op_by_op(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        writer = _Writer(described, rank, placed.coordinate)
        with torch.no_grad():
            results = _interpreted(graph, list(inputs), writer.note)
        inputs.clear()
        writer.close()
        return results

    return run_op_by_op


def _interpreted(
    graph: torch.fx.Graph, inputs: list[torch.Tensor], note: Callable[[torch.fx.Node, Any], None]
) -> list[torch.Tensor]:
    """Run a local graph op by op, with the collectives of real ranks."""
    values: dict[torch.fx.Node, Any] = {}
    feed = iter(inputs)
    for node in graph.nodes:
        if node.op == "output":
            break
        if node.op == "placeholder":
            values[node] = next(feed)
        else:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = run_as(node.target)(*args, **kwargs)
        note(node, values[node])
    return [values[x] for x in returned_by(graph)]


def watch(compiled: Compiled) -> Callable[[], Any]:
    """Build the function that makes, for a call, what watches the nodes of all simulated ranks."""
    placed = compiled.placed
    described = _Described.of(
        compiled.request.name, compiled.captured.program, compiled.partition, placed.axes
    )
    everyone = all_coordinates(placed.axes)
    last = [compiled.programs[c].graph.output_node().prev for c in everyone]

    def watch_of_call() -> Any:
        writers = [_Writer(described, r, c) for r, c in enumerate(everyone)]

        def note(rank: int, node: torch.fx.Node, x: Any) -> None:
            if node.graph is not last[rank].graph:
                return  # of a loop
            writers[rank].note(node, x)
            if node is last[rank]:
                writers[rank].close()

        return note

    return watch_of_call


def hash_of(x: torch.Tensor) -> str:
    """The hash of a tensor's bytes in row-major order."""
    bytes_of = x.detach().resolve_conj().resolve_neg().contiguous().cpu().view(-1)
    raw = bytes_of.view(torch.uint8).numpy().tobytes() if bytes_of.numel() else b""
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


def norm_of(x: torch.Tensor) -> float:
    """The Euclidean norm of a tensor, in float64."""
    return float(torch.linalg.vector_norm(_real(x)))


def projection_of(
    x: torch.Tensor,
    shape: tuple[int, ...],
    marks: MeshPlacements,
    axes: MeshAxes,
    coordinates: tuple[int, ...],
) -> float:
    """The sum of a local tensor's elements, each with a weight that depends on its global index."""
    total = _real(x)
    if any(any(layout.halo(m)) for m in marks):
        return math.nan
    for dim in reversed(range(x.dim())):
        held = torch.arange(shape[dim], dtype=torch.float64)
        own = tuple(_along(m, dim) for m in marks)
        held = cut(held, own, axes, coordinates) if axes.names else held
        weights = torch.cos(STEP * held + 1.3 * dim).to(total.device)
        total = (total * weights.view(*(1,) * dim, -1)).sum(dim)
    return float(total)


def _along(mark: Any, dim: int) -> Any:
    """The placement of the indices of one dim."""
    if layout.split(mark) is None or not layout.shards(mark, dim):
        return "R"
    return (0, *mark[1:]) if isinstance(mark, tuple) else 0


def _real(x: torch.Tensor) -> torch.Tensor:
    if x.is_complex():
        x = x.resolve_conj()
        return x.real.double() + 0.7 * x.imag.double()
    return x.detach().double()


@attrs.frozen(eq=False)
class RecordedValue:
    """A value of a recorded call, put together from the lines of its ranks.

    Args:
        value: its name in the program.
        op: its op.
        line: of the user's code.
        phase: "forward" or "backward".
        reads: the names of the values that its op reads.
        shape: global.
        dtype: as text.
        length: the number of terms in the sums of its op.
        placements: on the mesh.
        hashes: of the local tensor of each rank.
        norm: of the global tensor; None for a Partial value.
        projection: of the global tensor; None where it does not add up.
    """

    value: str
    op: str
    line: str | None
    phase: str
    reads: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    length: int
    placements: tuple[Any, ...]
    hashes: Mapping[int, str]
    norm: float | None
    projection: float | None


@attrs.frozen(eq=False)
class RecordedCall:
    """A recorded call: the function, its mesh, and each value in order, once."""

    name: str
    axes: MeshAxes
    values: dict[str, RecordedValue]


def read_digests(path: Any) -> list[RecordedCall]:
    """Read the calls of a folder of digests, or of one rank's file.

    Raises:
        ShardError: it does not exist, has no digests, or ranks have recorded other calls.
    """
    files = [Path(path)] if Path(path).is_file() else sorted(Path(path).glob("rank*.jsonl"))
    where = f"compare, digests {str(path)!r}"
    if not files:
        got = "there is no such folder" if not Path(path).exists() else "it has no rank*.jsonl"
        raise ShardError.of(where, got, fix=FIX, source=call_site())
    by_rank: dict[int, list[tuple[dict[str, Any], list[dict[str, Any]]]]] = {}
    for number, file in enumerate(files):
        name = file.stem.removeprefix("rank")
        by_rank[int(name) if name.isdigit() else number] = _calls_of(file, where)
    counts = {len(calls) for calls in by_rank.values()}
    if len(counts) > 1:
        shown = [f"rank {r}: {len(calls)} calls" for r, calls in sorted(by_rank.items())[:8]]
        fix = "the files of runs that ended, in a folder of their own"
        raise ShardError.of(where, "ranks have recorded other calls", *shown, fix=fix)
    rows = zip(*(by_rank[r] for r in sorted(by_rank)), strict=True)
    return [_call(dict(zip(sorted(by_rank), row, strict=True)), where) for row in rows]


def _calls_of(file: Path, where: str) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    calls: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    for number, text in enumerate(file.read_text().splitlines(), 1):
        try:
            row = json.loads(text)
            if "call" in row:
                calls.append((row, []))
            else:
                calls[-1][1].append(row)
        except (json.JSONDecodeError, IndexError, TypeError):
            got = f"line {number} of {file.name} is no digest"
            raise ShardError.of(where, got, fix=FIX, source=call_site()) from None
    return calls


def _call(
    ranks: Mapping[int, tuple[dict[str, Any], list[dict[str, Any]]]], where: str
) -> RecordedCall:
    """Put one call together from what its ranks wrote."""
    head = next(iter(ranks.values()))[0]
    heads = {(h["call"], tuple(h["axes"]), tuple(h["sizes"])) for h, _ in ranks.values()}
    if len(heads) > 1:
        got = f"ranks have recorded other calls: {', '.join(sorted({h[0] for h in heads}))}"
        fix = "the files of one run, in a folder of their own"
        raise ShardError.of(where, got, fix=fix, source=call_site())
    axes = MeshAxes(tuple(head["axes"]), tuple(head["sizes"]))
    coordinates = {r: tuple(h["coordinates"]) for r, (h, _) in ranks.items()}
    by_slot: dict[int, dict[int, dict[str, Any]]] = {}
    for rank, (_, rows) in ranks.items():
        for row in rows:
            by_slot.setdefault(row["slot"], {})[rank] = row
    values: dict[str, RecordedValue] = {}
    places: dict[str, int] = {}
    for slot in sorted(by_slot):
        rows = by_slot[slot]
        one = next(iter(rows.values()))
        if one["value"] not in values:
            values[one["value"]] = _value(rows, coordinates)
            places[one["value"]] = one["place"]
    ordered = sorted(values, key=places.__getitem__)
    return RecordedCall(head["call"], axes, {name: values[name] for name in ordered})


def _value(
    rows: Mapping[int, dict[str, Any]], coordinates: Mapping[int, tuple[int, ...]]
) -> RecordedValue:
    one = next(iter(rows.values()))
    marks = tuple(tuple(m) if isinstance(m, list) else m for m in one["placements"])
    firsts = [
        r
        for r in rows
        if all(m != "R" or not k for m, k in zip(marks, coordinates[r], strict=True))
        and layout.is_here(marks, coordinates[r])
    ]
    adds = all(m == "sum" or m not in REDUCTIONS for m in marks) and not one["of_rank"]
    is_partial = any(m in REDUCTIONS for m in marks) or one["of_rank"]
    squares = sum(rows[r]["norm"] ** 2 for r in firsts)
    return RecordedValue(
        one["value"],
        one["op"],
        one["line"],
        one["phase"],
        tuple(one["reads"]),
        tuple(one["shape"]),
        one["dtype"],
        one["length"],
        marks,
        {r: row["hash"] for r, row in rows.items()},
        None if is_partial else math.sqrt(squares),
        sum(rows[r]["projection"] for r in firsts) if adds else None,
    )


@attrs.frozen
class DigestDifference:
    """A value of two recorded runs that differs more than its inputs do.

    Args:
        call: the number of the call, from 0.
        name: of the function that was called.
        value: its name in the program.
        op: its op.
        line: of the user's code, `file:line`, or None.
        phase: "forward" or "backward".
        a: its placements in a, as text.
        b: its placements in b.
        difference: of norms or projections, in units of the norm; None where only the bytes of
            local tensors can be compared.
        inputs: the largest such difference of a value that its op reads.
        ranks: the ranks whose bytes differ, in runs of one layout.
    """

    call: int
    name: str
    value: str
    op: str
    line: str | None
    phase: str
    a: str
    b: str
    difference: float | None
    inputs: float
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        where = f" at {self.line}" if self.line else ""
        size = "" if self.difference is None else f" by {self.difference:.1e} of its norm"
        lines = [
            f"{self.op}{where}, {self.phase}, in call {self.call} of {self.name}: differs{size}"
        ]
        lines.append(f"  its inputs by {self.inputs:.1e}")
        lines += [f"  a: {self.a}", f"  b: {self.b}"]
        if self.ranks:
            lines.append(f"  other bytes on {listed(self.ranks)}")
        return "\n".join(lines)


@attrs.frozen
class DigestComparison:
    """The comparison of two recorded runs. It is true if no value differs by itself.

    Args:
        a: the path of the first run.
        b: the path of the second run.
        values: how many values were compared.
        same: how many of them have equal bytes on all ranks.
        differences: the values that differ more than rounding and than their inputs, in order.
        first_bytes: the first value whose bytes differ, in runs of one layout; else None.
    """

    a: str
    b: str
    values: int
    same: int
    differences: tuple[DigestDifference, ...]
    first_bytes: str | None

    @property
    def equal(self) -> bool:
        """Whether no value differs by itself."""
        return not self.differences

    @property
    def first(self) -> DigestDifference | None:
        """The first value that differs; None if none does."""
        return self.differences[0] if self.differences else None

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        lines = [f"compare digests, a: {self.a}, b: {self.b}"]
        lines.append(f"  {self.values} values, {self.same} of them with equal bytes on all ranks")
        if self.first_bytes is not None:
            lines.append(f"  the first with other bytes: {self.first_bytes}")
        if self.first is None:
            lines.append("  no value differs by more than rounding and than its inputs")
            return "\n".join(lines)
        head, *rest = str(self.first).split("\n")
        lines += [f"  first: {head}", *(f"  {x}" for x in rest)]
        if len(self.differences) > 1:
            lines.append(f"  {len(self.differences) - 1} later values differ by themselves, too")
        return "\n".join(lines)

    __repr__ = __str__


def compare_digests(*paths: Any, raises: bool = False) -> DigestComparison:
    """Compare two recorded runs.

    Raises:
        ShardError: not two paths, no digests, or runs of other calls.
        DivergenceError: a value differs, and `raises` is set.
    """
    if len(paths) != 2 or not all(isinstance(x, str | os.PathLike) for x in paths):
        got = f"{len(paths)} arguments, of which the first is a path"
        needed = "the paths of two folders of digests"
        raise ShardError.of("compare", got, needed=needed, fix=FIX, source=call_site())
    a, b = (read_digests(path) for path in paths)
    names = [[_function(call.name) for call in calls] for calls in (a, b)]
    if len(a) != len(b):
        got = f"{paths[0]} has {len(a)} calls, {paths[1]} has {len(b)}"
        fix = "runs of the same number of steps, each in a folder of its own"
        raise ShardError.of("compare", got, fix=fix, source=call_site())
    if names[0] != names[1]:
        first = next(i for i, (x, y) in enumerate(zip(*names, strict=True)) if x != y)
        got = f"call {first} is {a[first].name} in a, {b[first].name} in b"
        fix = "two runs of one script"
        raise ShardError.of("compare", got, fix=fix, source=call_site())
    rows = [row for i, pair in enumerate(zip(a, b, strict=True)) for row in _pairs(i, *pair)]
    wrong = tuple(row.difference for row in rows if row.difference is not None)
    unequal = [row for row in rows if row.unequal]
    result = DigestComparison(
        os.fspath(paths[0]),
        os.fspath(paths[1]),
        len(rows),
        sum(row.is_same for row in rows),
        wrong,
        unequal[0].text if unequal else None,
    )
    if raises and wrong:
        line = wrong[0].line
        raise DivergenceError.of("compare", *str(result).split("\n")[1:], source=line)
    return result


def _function(name: str) -> str:
    """The name of a function without the transform that placed it or not: a run on one device is
    compared with one on a mesh.
    """
    for verb in ("shard(", "jit("):
        if name.startswith(verb):
            return name.removeprefix(verb).removesuffix(")")
    return name


@attrs.frozen(eq=False)
class _Pair:
    text: str
    is_same: bool
    unequal: tuple[int, ...]
    difference: DigestDifference | None


def _pairs(number: int, a: RecordedCall, b: RecordedCall) -> Iterator[_Pair]:
    """Compare the values of two calls, in order."""
    sizes: dict[str, float] = {}  # the difference of each value so far
    for name, x, y in _aligned(a, b):
        is_one_layout = x.placements == y.placements and a.axes == b.axes
        unequal: tuple[int, ...] = ()
        if is_one_layout:
            both = x.hashes.keys() & y.hashes.keys()
            unequal = tuple(sorted(r for r in both if x.hashes[r] != y.hashes[r]))
        scale = _scale(x, a.values)
        size = 0.0 if is_one_layout and not unequal else _distance(x, y, scale)
        inputs = max((sizes.get(read, 0.0) for read in x.reads), default=0.0)
        is_wrong = size is not None and size > _bound(x, y) + JUMP * inputs
        if size is not None:
            # what comes after is measured by this one
            sizes[name] = size
        line = f" at {os.path.basename(x.line)}" if x.line else ""
        difference = None
        if is_wrong:
            texts = (str(MarksText(x.placements, a.axes)), str(MarksText(y.placements, b.axes)))
            difference = DigestDifference(
                number, a.name, name, x.op, x.line, x.phase, *texts, size, inputs, unequal
            )
        yield _Pair(f"{x.op}{line}", is_one_layout and not unequal, unequal, difference)


def _aligned(
    a: RecordedCall, b: RecordedCall
) -> Iterator[tuple[str, RecordedValue, RecordedValue]]:
    """Pair the values of two calls: by order, where their programs are not the same."""
    one, two = list(a.values.values()), list(b.values.values())
    keys = [[(x.op, x.shape, x.phase) for x in values] for values in (one, two)]
    for block in difflib.SequenceMatcher(None, *keys, autojunk=False).get_matching_blocks():
        for i in range(block.size):
            x = one[block.a + i]
            yield x.value, x, two[block.b + i]


@attrs.frozen
class MarksText:
    """Placements as a user writes them, by axis."""

    marks: tuple[Any, ...]
    axes: MeshAxes

    def __str__(self) -> str:
        rows: Iterable[tuple[str, Any]] = zip(self.axes.names, self.marks, strict=True)
        shown = [
            f"{axis}: {'replicated' if m == 'R' else f'Partial {m}' if m in REDUCTIONS else m}"
            for axis, m in rows
        ]
        return ", ".join(shown) or "one device"


def _scale(x: RecordedValue, values: Mapping[str, RecordedValue]) -> float:
    """The norm of what an op adds up, by which a sum rounds however much of it cancels."""
    if x.op not in SUMS:
        return 0.0
    norms = [values[read].norm for read in x.reads if read in values]
    return max((n for n in norms if n is not None and math.isfinite(n)), default=0.0)


def _distance(x: RecordedValue, y: RecordedValue, scale: float) -> float | None:
    """The difference of two values, in units of their norm; None if it is unknown."""
    sizes = [abs(n) for v in (x, y) for n in (v.norm, v.projection) if n is not None]
    scale = max([scale, *(n for n in sizes if math.isfinite(n))])
    found = []
    for one, two in ((x.norm, y.norm), (x.projection, y.projection)):
        if one is None or two is None:
            continue
        if math.isfinite(one) != math.isfinite(two):
            return math.inf
        if math.isfinite(one):
            found.append(abs(one - two) / scale if scale else abs(one - two))
    return max(found, default=None)


def _bound(x: RecordedValue, y: RecordedValue) -> float:
    """How far two values may differ by rounding, in units of their norm."""
    dtypes = [getattr(torch, name) for name in (x.dtype, y.dtype)]
    floats = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    if not floats:
        return 0.0
    eps = max(epsilons(dtype)[0] for dtype in floats)
    return ROUNDINGS * eps * (1.0 + math.log2(max(x.length, 1)))
