"""`sf.compare`: two layouts, two versions or two dtypes of one step, value by value, and the first
op that differs.

Each side runs for all its ranks. Each op of its program then runs once more on one device, on the
values that the side had, so that an error of an op is told from what it carries on. Where the
programs differ, the second one runs on the values of the first.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

from ...accepted import accept
from ...capture.printed_names import op_name
from ...capture.printing import tensor_type
from ...errors import DivergenceError, ShardError, call_site, listed
from ...ops.loops import Loop
from ...tracebacks import filter_errors
from ...transforms.sharding._shard import Shard
from ...types import MeshAxes, MeshPlacements
from .aligned import Alignment, aligned, errors_between, first_other_node
from .compare_digests import DigestComparison, compare_digests
from .layouts import EXAMPLE, Side, layout_of, run
from .op_results import OpError, errors_of, op_of
from .rounding import epsilons
from .values_of_ranks import GlobalValue, Values

Node = torch.fx.Node
SHOWN = 12  # rows of a printed comparison
KINDS = {
    "op": "in run {}, the result is not what the op computes from its inputs on one device",
    "replicas": "ranks of run {} have different replicas of the result",
    "redistribute": "a redistribution in run {} changes the value",
    "argument": "ranks of run {} start with different replicas of the argument",
    "program": "a and b compute different results from the same inputs",
}


@attrs.frozen
class ComparedValue:
    """A value that both programs compute.

    Args:
        op: the name of the op, as in a printed program.
        line: the user's source line as `file:line`, or None.
        phase: "forward" or "backward".
        a: the dtype, shape and placements of the value in run a, or "" if run a does not compute
            the value.
        b: the dtype, shape and placements of the value in run b, or "" if run b does not compute
            the value.
        difference: the largest absolute difference of an element, or None if the values cannot be
            compared.
        relative: the largest difference of an element, divided by the largest element.
    """

    op: str
    line: str | None
    phase: str
    a: str
    b: str
    difference: float | None
    relative: float | None

    def __str__(self) -> str:
        where = f"  # {os.path.basename(self.line)}" if self.line else ""
        size = "-" if self.relative is None else f"{self.relative:.1e}"
        if self.a == self.b:
            types = self.a
        else:
            types = f"{self.a or 'not in a'} | {self.b or 'not in b'}"
        return f"{self.op:<24} {size:>8}  {types}{where}"


@attrs.frozen
class OpDifference:
    """An op whose results differ by more than rounding between the two compared runs, although its
    inputs agree.

    Args:
        op: the name of the op, as in a printed program.
        line: the user's source line as `file:line`, or None.
        phase: "forward" or "backward".
        kind: the kind of difference: "op", "replicas", "redistribute", "argument", or, if the two
            programs differ, "program".
        side: the run with the wrong value, "a" or "b", or "both" if the two programs differ.
        a: the dtype, shape and placements of the result in run a, or "" if run a does not contain
            the op.
        b: the dtype, shape and placements of the result in run b, or "" if run b does not contain
            the op.
        ranks: the ranks of the run with the wrong value that hold differing elements or replicas.
        count: the number of elements that differ.
        total: the number of elements of the result.
        index: the index of the element that differs most, or None if only replicas differ.
        got: the element at `index` in the run with the wrong value, or in run b if the programs
            differ.
        wanted: the correct element at `index`, or the element in run a if the programs differ.
        how: the placements before and after a wrong redistribution.
    """

    op: str
    line: str | None
    phase: str
    kind: str
    side: str
    a: str
    b: str
    ranks: tuple[int, ...]
    count: int
    total: int
    index: tuple[int, ...] | None
    got: float | complex | int | bool | None
    wanted: float | complex | int | bool | None
    how: str = ""

    def __str__(self) -> str:
        where = f" at {self.line}" if self.line else ""
        lines = [f"{self.op}{where}, {self.phase}: {KINDS[self.kind].format(self.side)}"]
        if self.how:
            lines.append(f"  {self.how}")
        lines += [f"  a: {self.a or 'has no such op'}", f"  b: {self.b or 'has no such op'}"]
        if self.index is not None:
            names = ("b", "a") if self.side == "both" else ("got", "needed")
            pairs = f"{names[0]} {self.got}, {names[1]} {self.wanted}"
            lines.append(
                f"  {self.count} of {self.total} elements; the largest at {self.index}: {pairs}"
            )
        if self.ranks:
            lines.append(f"  on {listed(self.ranks)}")
        return "\n".join(lines)


@attrs.frozen
class Comparison:
    """The result of `compare`, whose truth value is True if no op differs by more than rounding.

    Args:
        name: the name of the step.
        a: a text that describes the first of the two compared runs.
        b: a text that describes the second of the two compared runs.
        rows: one row for each compared value, in program order.
        differences: the ops that differ by more than rounding, in program order.
        only_a: the ops that only the program of run a contains.
        only_b: the ops that only the program of run b contains.
    """

    name: str
    a: str
    b: str
    rows: tuple[ComparedValue, ...] = attrs.field(repr=False)
    differences: tuple[OpDifference, ...]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether no op differs by more than rounding."""
        return not self.differences

    @property
    def first(self) -> OpDifference | None:
        """The first op that differs, or None if no op differs."""
        return self.differences[0] if self.differences else None

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        lines = [f"compare({self.name}), a: {self.a}, b: {self.b}"]
        for name, ops in (("a", self.only_a), ("b", self.only_b)):
            if ops:
                more = ", ..." if len(ops) > SHOWN else ""
                lines.append(f"  only in {name}: {', '.join(ops[:SHOWN])}{more}")
        if self.first is None:
            both = [x for x in self.rows if x.difference is not None]
            lines.append(f"  {len(both)} values agree up to rounding{_worst(both)}")
            if len(both) < len(self.rows):
                more = len(self.rows) - len(both)
                lines.append(
                    f"  {more} more values exist only in a or only in b, or inside a larger op"
                )
            return "\n".join(lines)
        lines += [f"  first: {line}" if not i else f"  {line}" for i, line in _lines(self.first)]
        others = self.differences[1:]
        if others:
            shown = [f"    {x.op}" + (f" at {x.line}" if x.line else "") for x in others[:SHOWN]]
            lines += [f"  {len(others)} later ops also add differences of their own:", *shown]
        return "\n".join(lines)

    __repr__ = __str__

    def table(self) -> str:
        """A text with one line for each compared value and its largest relative difference."""
        return "\n".join(map(str, self.rows))


def _lines(first: OpDifference) -> Iterator[tuple[int, str]]:
    return enumerate(str(first).split("\n"))


def _worst(rows: Sequence[ComparedValue]) -> str:
    known = [x for x in rows if x.relative is not None]
    if not known:
        return ""
    worst = max(known, key=lambda x: x.relative or 0.0)
    return f"; the largest relative difference is {worst.relative:.1e}, of {worst.op}"


@filter_errors
def compare(
    step: Any, *args: Any, a: Any = None, b: Any = None, raises: bool = False
) -> Comparison | DigestComparison:
    """Compare two layouts, versions or dtypes of a step, and name the first op that differs.

    `compare` compares the results of all ops of the program. An op differs if, for the inputs that
    the op read, its result is wrong by more than rounding. The tolerance depends on the dtype, the
    length of sums and the magnitude of values. A different order of summation, or an error in the
    inputs of an op, does not count as a difference of the op.

    Args:
        step: a pure function of pytrees, or a function under `shard`. If step is under `shard` and
            neither `a` nor `b` is given, one device is compared with the mesh and the options of
            that `shard`. To compare two earlier runs, pass the paths of two digest files instead of
            a step. A run writes a digest file if the environment variable SHARDFN_DIGESTS is set.
        args: the arguments of the step: ordinary tensors with global values, or DTensors.
        a: a dict with the options of the first of the two compared runs, or None for a run on one
            device. The dicts `a` and `b` can have the keys `mesh` (a DeviceMesh, or a dict of axis
            names and sizes), `in_placements` and other options of `shard`, `dtype` for
            floating-point arguments, and `fn` for another version of the step. If the dict `a` or
            `b` has no key `mesh`, and step is under `shard`, the mesh and the options of that
            `shard` are the defaults.
        b: a dict with the options of the second of the two compared runs, or None for a run on one
            device. The dict `b` can have the same keys as the dict `a`.
        raises: whether `compare` raises an error if an op differs.

    Returns:
        A record that prints as a report, and whose truth value is True if no op differs. The field
        `first` of the record describes the first op that differs: its source line, its placements
        in both runs, and the ranks and elements that differ. The field `rows` of the record lists
        all values that were compared.

    Raises:
        ShardError: one of the two compared runs cannot be executed, or the arguments do not fit the
            step.
        DivergenceError: an op differs, and `raises` is True.

    Example:
        >>> import torch, shardfn as sf
        >>> def step(w, x):
        ...     return (x @ w).relu().sum()
        >>> x, w = torch.ones(4, 3), torch.ones(3, 2)
        >>> print(sf.compare(step, w, x, b=dict(mesh={"dp": 2}, in_placements=(None, sf.P("dp")))))
        compare(step), a: one device, b: (dp=2)
          5 values agree up to rounding; the largest relative difference is 0.0e+00, of w
    """
    accept("compare", raises=raises)
    if isinstance(step, str | os.PathLike):
        return compare_digests(step, *args, raises=raises)
    if not callable(step):
        got, fix = f"step is {type(step).__name__}", "sf.compare(step, *args, b=dict(mesh=...))"
        raise ShardError.of("compare", got, needed="a function", fix=fix, source=call_site())
    if isinstance(step, Shard) and a is None and b is None:
        b = {}
    if a is None and b is None:
        got = "neither a nor b is given, so both runs would be on one device"
        raise ShardError.of("compare", got, fix=EXAMPLE, source=call_site())
    layouts = [layout_of("compare", n, step, x) for n, x in (("a", a), ("b", b))]
    sides = [run("compare", layout, args) for layout in layouts]
    result = _compared(*sides)
    if raises and not result.equal:
        line = result.first and result.first.line
        raise DivergenceError.of("compare", *str(result).split("\n")[1:], source=line)
    return result


def _compared(a: Side, b: Side) -> Comparison:
    first, second = a.values.program, b.values.program
    dtypes = {a.layout.dtype, b.layout.dtype}
    coarse = _coarser(a, b) if len(dtypes) > 1 else None
    how = aligned(first, second, same_dtypes=coarse is None)
    place = {node: i for i, node in enumerate(first.graph.graph.nodes)}
    places = _places(second.graph.graph, how, place)
    # by place, then by side
    errors: list[tuple[float, int, OpError, str]] = []
    errors += [(place[e.node], 0, e, "a") for e in errors_of(a.values)]
    errors += [(places[e.node], 1, e, "b") for e in errors_of(b.values)]
    if not how.is_same:
        between = errors_between(a.values, second, how, coarse)
        every = {**place, **places}
        errors += [(every[e.node], 2, e, "both") for e in between]
    errors.sort(key=lambda row: row[:2])
    unique: dict[Any, OpDifference] = {}
    for _, _, error, side in errors:
        key = op_of(error.node), side
        unique.setdefault(key, _difference(error, side, a, b, how))
    return Comparison(
        name=getattr(a.layout.fn, "__name__", type(a.layout.fn).__name__),
        a=_side_text(a, b),
        b=_side_text(b, a),
        rows=tuple(_rows(a.values, b.values, how)),
        differences=tuple(unique.values()),
        only_a=tuple(_only(first.graph.graph, how.of_first)),
        only_b=tuple(_only(second.graph.graph, how.of_second)),
    )


def _coarser(a: Side, b: Side) -> torch.dtype | None:
    """The dtype of both sides that rounds most; that of arguments where none is given."""
    dtypes = []
    for side in (a, b):
        held = side.values.program.graph.graph.find_nodes(op="placeholder")
        floats = [x.meta["val"].dtype for x in held if x.meta["val"].dtype.is_floating_point]
        dtypes += [side.layout.dtype] if side.layout.dtype else floats[:1]
    return max(dtypes, key=lambda dtype: epsilons(dtype)[0], default=None)


def _places(graph: torch.fx.Graph, how: Alignment, place: dict[Node, int]) -> dict[Node, float]:
    """Number the nodes of the second program by those of the first; those that it alone has come
    just after the node before them.
    """
    places: dict[Node, float] = {}
    last = -1.0
    for node in graph.nodes:
        partner = how.of_second.get(node)
        last = max(last, place[partner]) if partner is not None else last
        places[node] = place[partner] if partner is not None else last + 0.5
    return places


def _only(graph: torch.fx.Graph, partners: dict[Node, Node]) -> Iterator[str]:
    for node in graph.nodes:
        if node.op == "call_function" and node not in partners:
            line = node.meta.get("source")
            yield op_name(node) + (f" at {os.path.basename(line)}" if line else "")


def _side_text(side: Side, other: Side) -> str:
    parts = []
    if side.layout.fn is not other.layout.fn:
        parts.append(getattr(side.layout.fn, "__name__", type(side.layout.fn).__name__))
    parts.append(str(side.values.axes) if side.values.axes.names else "one device")
    if side.layout.dtype is not None:
        parts.append(str(side.layout.dtype).removeprefix("torch."))
    return " ".join(parts)


def _rows(a: Values, b: Values, how: Alignment) -> Iterator[ComparedValue]:
    held = dict(
        zip(a.program.graph.graph.find_nodes(op="placeholder"), a.program.in_paths, strict=True)
    )
    for node, first in a.first.items():
        partner = how.of_first.get(node)
        second = b.first.get(partner) if partner is not None else None
        difference = relative = None
        if partner is not None and second is not None and _have_one_shape(first, second):
            difference, relative = _distance(a.read[node], b.read[partner])
        yield ComparedValue(
            op=held.get(node) or op_name(op_of(node)),
            line=node.meta.get("source"),
            phase=node.meta.get("phase") or "forward",
            a=_type(first, a.axes),
            b=_type(second, b.axes),
            difference=difference,
            relative=relative,
        )


def _have_one_shape(x: GlobalValue, y: GlobalValue) -> bool:
    return x.value.shape == y.value.shape


def _distance(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """The largest difference of an element, and the same in units of the largest element."""
    if not x.numel() or (x.dtype == y.dtype and torch.equal(x, y)):
        return 0.0, 0.0
    dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
    x, y = x.to(dtype), y.to(dtype)
    difference, scale = float((x - y).abs().max()), float(x.abs().max())
    if not math.isfinite(difference) or not math.isfinite(scale):
        equal = (x == y) | (torch.isnan(x) & torch.isnan(y))
        difference = float(torch.where(equal, 0.0, (x - y).abs()).max())
        scale = float(torch.nan_to_num(x.abs(), posinf=0.0).max())
    return difference, difference / scale if scale else difference


def _type(value: GlobalValue | None, axes: MeshAxes) -> str:
    if value is None:
        return ""
    return _typed(value.value, value.slot.placements, axes)


def _typed(x: torch.Tensor, marks: MeshPlacements, axes: MeshAxes) -> str:
    return tensor_type(x.shape, x.dtype, marks, axes.names if marks else ())


def _difference(error: OpError, side: str, a: Side, b: Side, how: Alignment) -> OpDifference:
    one, two = _of_both(error.node, a, how)
    node = op = op_of(error.node)
    if error.kind == "program" and isinstance(op.target, Loop):
        node = _inside(op, how) or op
    index = got = wanted = None
    if error.wanted is not None and bool(error.wrong.any()):
        index = _worst_index(error)
        got, wanted = error.got[index].item(), error.wanted[index].item()
    how_text = ""
    axes = (b if side == "b" else a).values.axes
    if error.kind == "redistribute":
        kinds = ", ".join(move.kind for move in error.step.moves)
        before = _typed(error.got, error.before, axes)
        how_text = f"{kinds}: {before} -> {_typed(error.got, error.marks, axes)}"
    held = (b if side == "b" else a).values.program
    paths = dict(zip(held.graph.graph.find_nodes(op="placeholder"), held.in_paths, strict=True))
    return OpDifference(
        op=paths.get(op) or op_name(node),
        line=node.meta.get("source") or op.meta.get("source"),
        phase=op.meta.get("phase") or "forward",
        kind=error.kind,
        side=side,
        a=_value_text(a, one),
        b=_value_text(b, two),
        ranks=error.ranks,
        count=int(error.wrong.sum()),
        total=error.wrong.numel(),
        index=index,
        got=got,
        wanted=wanted,
        how=how_text,
    )


def _of_both(node: Node, a: Side, how: Alignment) -> tuple[Node | None, Node | None]:
    """The node of an error in each program."""
    if node.graph is a.values.program.graph.graph:
        return node, how.of_first.get(node)
    return how.of_second.get(node), node


def _value_text(side: Side, node: Node | None) -> str:
    if node is None:
        return ""
    value = side.values.first.get(node)
    if value is not None:
        return _type(value, side.values.axes)
    fake = node.meta.get("val")
    return tensor_type(fake.shape, fake.dtype) if isinstance(fake, torch.Tensor) else "known"


def _worst_index(error: OpError) -> tuple[int, ...]:
    assert error.wanted is not None
    wide = torch.complex128 if error.got.is_complex() else torch.float64
    size = (error.got.to(wide) - error.wanted.to(wide)).abs().nan_to_num(nan=float("inf"))
    flat = torch.where(error.wrong, size, -1.0).flatten().argmax()
    return tuple(int(i) for i in torch.unravel_index(flat, error.got.shape))


def _inside(node: Node, how: Alignment) -> Node | None:
    """The first op inside of a loop of the second program that the first one's loop lacks."""
    partner = how.of_second.get(node)
    if partner is None or type(partner.target) is not type(node.target):
        return None
    for x, y in zip(partner.target.graphs, node.target.graphs, strict=False):
        inner = first_other_node(x, y)
        if inner is not None:
            return inner
    return None
