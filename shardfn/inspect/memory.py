"""`Memory`: the memory peak of one rank's program, and the tensors that are alive at the peak."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch

from ..accepted import accept
from ..buckets import human_bytes
from ..extensions import page_of
from ..ops.loops import Branch, Loop, loop_of
from ..ops.messages import Receive
from ..ops.nodes import args_of, origin_of
from ..ops.pack import PACK
from ..ops.pipeline import Free, Pipeline, Run, Zero
from ..partition.lifetimes import ends_of, owners
from ..partition.planner import op_cost
from ..source_text import located
from ..types import Aval, LocalProgram

ARGUMENT = "arguments"
RESULT = "results"
ACTIVATION = "activations"
COLLECTIVE = "collectives"
TEMPORARY = "temporaries"
KINDS = (ARGUMENT, RESULT, ACTIVATION, COLLECTIVE, TEMPORARY)
SHOWN = 10  # tensors in the text


@attrs.frozen
class Allocation:
    """One tensor that a program holds.

    Args:
        kind: one of "arguments", "results", "activations" (computed in the forward, read in the
            backward), "collectives" (send and receive buffers) and "temporaries".
        name: the path of an argument, or the op that computes the tensor.
        shape: the local shape of the tensor.
        dtype: the dtype of the tensor.
        nbytes: the size of the local tensor, in bytes.
        source: the source line that creates the tensor.
        module: the path of the submodule that runs the source line.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    source: str | None
    module: str | None = None

    def __str__(self) -> str:
        size = human_bytes(self.nbytes)
        form = f"{self.name} {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"
        return f"{size:>10}  {self.kind:<12} {form}  {located(self.source, self.module)}".rstrip()


@attrs.frozen
class Moment:
    """The memory of one rank's program while one op runs, in bytes.

    Args:
        source: the source line of the op.
        phase: either "forward" or "backward", or "" if the program computes no gradient.
        sizes: for each kind of tensor, in the order of `KINDS`, the bytes that are alive.
        op: the name of the op's node in the program.
    """

    source: str | None
    phase: str
    sizes: tuple[int, ...]
    op: str = ""

    @property
    def nbytes(self) -> int:
        """Return the bytes that are alive, over all kinds of tensors."""
        return sum(self.sizes)


@attrs.frozen
class Memory:
    """The memory of one rank's program, in bytes.

    Args:
        name: the name of the program.
        peak: the largest number of bytes that are alive at once. Arguments are always alive, and
            views share the memory of their base.
        at: the source line at the memory peak.
        alive: the tensors that are alive at the memory peak, the largest first.
        module: the path of the submodule that runs the source line at the memory peak.
        moments: a function that returns a `Moment` for each op, in order.
    """

    name: str
    peak: int
    at: str | None
    alive: tuple[Allocation, ...]
    module: str | None = None
    moments: Callable[[], tuple[Moment, ...]] = attrs.field(default=tuple, eq=False, repr=False)

    def of(self, kind: str) -> int:
        """Return the bytes of one kind of tensor at the memory peak."""
        accept("Memory.of", kind=kind)
        return sum(tensor.nbytes for tensor in self.alive if tensor.kind == kind)

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        """Print the table in a notebook."""
        printer.text(str(self))

    def _repr_html_(self) -> str | None:
        """Draw a picture in a notebook."""
        return page_of(self)

    def __str__(self) -> str:
        lines = [f"{self.name}: {human_bytes(self.peak)} on one rank"]
        if self.at:
            lines[0] += f", at {located(self.at, self.module)}"
        for kind in KINDS:
            size = human_bytes(self.of(kind))
            lines.append(f"  {kind:<12} {size:>10}")
        lines.append("values in memory at the peak, the largest first")
        shown = self.alive[:SHOWN]
        lines += [f"  {tensor}" for tensor in shown]
        if len(self.alive) > len(shown):
            lines.append(f"  and {len(self.alive) - len(shown)} more")
        return "\n".join(lines)


# an op, and the nodes that own the memory that is held while it runs, arguments among them
MemoryPeaks = Iterator[tuple[torch.fx.Node, list[torch.fx.Node]]]


def memory(
    program: LocalProgram,
    moments: Callable[[torch.fx.Graph], MemoryPeaks] | None = None,
    every: Callable[[torch.fx.Graph], MemoryPeaks] | None = None,
) -> Memory:
    """Compute the peak of one rank's program and the tensors alive there, by kind.

    Args:
        program: one rank's program.
        moments: what is held while a graph runs, its own and those of loops; op by op in its
            order by default.
        every: the same, for each op and not only where more is held than before; by default those
            of `moments`.
    """
    graph = program.graph
    peak, at, alive = _peak(graph, moments or liveness_by_op)
    kinds = _kind_by_owner(graph, owners(graph, elements=True))
    paths = _paths(program)
    tensors = []
    for node in alive:
        kind = kinds.get(node, TEMPORARY)
        name = paths.get(node, _op_name(node))
        tensors += _allocations(node, kind, name)
    largest = sorted(tensors, key=lambda tensor: -tensor.nbytes)
    meta = at.meta if at else {}
    line, module = meta.get("source"), meta.get("module")
    course = functools.partial(_course, graph, every or moments or live_by_op, kinds)
    return Memory(program.name, peak, line, tuple(largest), module, course)


def _course(
    graph: torch.fx.Graph,
    moments: Callable[[torch.fx.Graph], MemoryPeaks],
    kinds: Mapping[torch.fx.Node, str],
) -> tuple[Moment, ...]:
    """List what a graph holds while each op runs."""
    size = functools.cache(_nbytes)
    course = []
    for node, alive in _held(graph, moments):
        if node.op == "placeholder":
            continue
        sizes: dict[str, int] = dict.fromkeys(KINDS, 0)
        for x in alive:
            sizes[kinds.get(x, TEMPORARY)] += size(x)
        line = node.meta.get("source")
        course.append(Moment(line, _phase(node), tuple(sizes.values()), node.name))
    return tuple(course)


def _allocations(node: torch.fx.Node, kind: str, name: str) -> list[Allocation]:
    """Build an Allocation for each tensor that a node owns."""
    return [
        Allocation(kind, name, tuple(x.shape), x.dtype, op_cost.nbytes(x), **origin_of(node))
        for x in _tensors(node)
    ]


def peak_bytes(graph: torch.fx.Graph) -> int:
    """Return the most bytes that a graph holds when it runs op by op."""
    return _peak(graph, liveness_by_op)[0]


def _peak(
    graph: torch.fx.Graph, moments: Callable[[torch.fx.Graph], MemoryPeaks]
) -> tuple[int, torch.fx.Node | None, list[torch.fx.Node]]:
    """Find the moment at which a graph holds the most bytes: return the bytes, the op that runs
    then, and the nodes that own them.
    """
    most, at, alive = 0, None, []
    size = functools.cache(_nbytes)
    for node, alive_now in _held(graph, moments):
        nbytes = sum(map(size, alive_now))
        if nbytes > most:
            most, at, alive = nbytes, node, alive_now
    return most, at, alive


def _held(graph: torch.fx.Graph, moments: Callable[[torch.fx.Graph], MemoryPeaks]) -> MemoryPeaks:
    """Yield ops with the nodes that own what is held, inside of loops too."""
    for node, owned in moments(graph):
        inside = _alive_in_loop(node, moments)
        # the results of a branch are those of its graph, and those of a pipeline are its sums
        is_inside = isinstance(node.target, (Branch, Pipeline))
        counted = {node, *_getitems(node)} if is_inside else set()
        yield node, [*(x for x in owned if x not in counted), *inside]


def liveness_by_op(graph: torch.fx.Graph) -> MemoryPeaks:
    """Yield each op at which a graph that runs op by op holds more than before, and each loop,
    with the nodes that own the memory. A tensor of a tuple is owned by its getitem.
    """
    return _by_op(graph, is_every=False)


def live_by_op(graph: torch.fx.Graph) -> MemoryPeaks:
    """Yield each op of a graph that runs op by op, with the nodes that own the memory."""
    return _by_op(graph, is_every=True)


def _by_op(graph: torch.fx.Graph, *, is_every: bool) -> MemoryPeaks:
    owner = owners(graph, elements=True)
    ends = ends_of(graph, owner)
    alive: dict[torch.fx.Node, int] = {}
    nbytes = most = 0
    nodes: list[torch.fx.Node] = list(graph.nodes)
    for node in nodes:
        allocated = [x for x in (node, *_getitems(node)) if owner[x] is x]
        if node.target is not operator.getitem:
            alive.update((x, _nbytes(x)) for x in allocated)
            nbytes += sum(map(_nbytes, allocated))
        is_op = is_every and node.op == "call_function" and node.target is not operator.getitem
        if is_op or nbytes > most or isinstance(node.target, Loop):
            most = max(most, nbytes)
            yield node, list(alive)
        for dead in ends[node]:
            if dead.op != "placeholder":
                nbytes -= alive.pop(dead, 0)


def _getitems(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the getitem nodes that read the tensors of a tuple."""
    return [user for user in node.users if user.target is operator.getitem]


def _alive_in_loop(
    node: torch.fx.Node, moments: Callable[[torch.fx.Graph], MemoryPeaks]
) -> list[torch.fx.Node]:
    """Return the nodes alive at the peak of a loop's or branch's largest body, without
    its inputs.
    """
    if not isinstance(node.target, Loop):
        return []
    if isinstance(node.target, Pipeline):
        return _alive_in_pipeline(node.target, moments)
    every = [_alive_in_body(graph, moments) for graph in loop_of(node).graphs]
    return max(every, key=lambda alive: sum(map(_nbytes, alive)))


def _alive_in_pipeline(
    pipeline: Pipeline, moments: Callable[[torch.fx.Graph], MemoryPeaks]
) -> list[torch.fx.Node]:
    """Return the nodes alive at the peak of a coordinate's part of a pipeline, without its inputs:
    the values of the microbatches on their way, the sums, and those inside of an action.
    """
    outputs = [graph.find_nodes(op="output")[0].args[0] for graph in pipeline.graphs]
    inside = []
    for i, graph in enumerate(pipeline.graphs):
        sums = {outputs[i][k] for k in pipeline.sums_of(i)}
        inside.append([x for x in _alive_in_body(graph, moments) if x not in sums])
    scratch = torch.fx.Graph()
    values: dict[Any, torch.fx.Node] = {}
    size = functools.cache(_nbytes)
    most, peak = -1, list[torch.fx.Node]()
    for x in pipeline.instructions:
        busy: list[torch.fx.Node] = []
        made: dict[Any, torch.fx.Node] = {}
        if isinstance(x, Run):
            busy = inside[x.graph]
            made = dict(zip(x.makes, outputs[x.graph], strict=True))
        elif isinstance(x, Receive):
            made[x.message.value] = _empty(x.message.aval, "received", scratch)
        elif isinstance(x, Zero):
            made[x.total] = _empty(x.aval, "a_sum", scratch)
        now = [*values.values(), *busy]
        if (nbytes := sum(map(size, now))) > most:
            most, peak = nbytes, now
        values.update((ref, node) for ref, node in made.items() if node.op == "call_function")
        for ref in x.values if isinstance(x, Free) else ():
            values.pop(ref, None)
    return peak


def _empty(aval: Aval, name: str, scratch: torch.fx.Graph) -> torch.fx.Node:
    """Make a node for a tensor that no graph makes: of a message, or the begin of a sum."""
    node = scratch.call_function(torch.empty, name=name)
    node.meta["val"] = torch.empty(aval.shape, dtype=aval.dtype, device="meta")
    return node


def _alive_in_body(
    graph: torch.fx.Graph, moments: Callable[[torch.fx.Graph], MemoryPeaks]
) -> list[torch.fx.Node]:
    """Return the nodes of a body that are alive at its peak, without its inputs."""
    _, _, alive = _peak(graph, moments)
    return [node for node in alive if node.op != "placeholder"]


def _nbytes(node: torch.fx.Node) -> int:
    """Return the bytes that a node owns."""
    return sum(map(op_cost.nbytes, _tensors(node)))


def _tensors(node: torch.fx.Node) -> list[torch.Tensor]:
    """Return the tensors that a node owns: of a tuple those that no getitem reads."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    read = {args_of(item)[1] for item in _getitems(node)}
    return [x for i, x in enumerate(values) if isinstance(x, torch.Tensor) and i not in read]


def _kind_by_owner(
    graph: torch.fx.Graph, owner: dict[torch.fx.Node, torch.fx.Node]
) -> dict[torch.fx.Node, str]:
    """Map each node that owns memory to its kind: argument, result, activation or collective. The
    others are temporaries.
    """
    (output,) = graph.find_nodes(op="output")
    kinds: dict[torch.fx.Node, str] = {}
    for node in graph.nodes:
        for read in node.all_input_nodes:
            if _phase(read) == "forward" and _phase(node) == "backward":
                kinds[owner[read]] = ACTIVATION
        if "collective" in node.meta:
            kinds[owner[node]] = COLLECTIVE
            sent = [x for x in node.all_input_nodes if x.target is PACK]
            kinds.update((x, COLLECTIVE) for x in sent)
    kinds.update((owner[x], RESULT) for x in output.all_input_nodes)
    kinds.update((x, ARGUMENT) for x in graph.find_nodes(op="placeholder"))
    return kinds


def _paths(program: LocalProgram) -> dict[torch.fx.Node, str]:
    """Map the placeholders of a program to the paths of its arguments. The first inputs are the
    rank's coordinates, which have none.
    """
    placeholders = program.graph.find_nodes(op="placeholder")
    coordinates = len(placeholders) - len(program.in_paths)
    return dict(zip(placeholders[coordinates:], program.in_paths, strict=True))


def _op_name(node: torch.fx.Node) -> str:
    """Return the name of the op that made a tensor."""
    if node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return getattr(node.target, "_opname", node.name)


def _phase(node: torch.fx.Node) -> str:
    return node.meta.get("phase", "")
