"""`Kernels`: a model of the kernels into which Inductor fuses the ops of a graph.

Inductor computes elementwise values where they are read, runs ops over equal elements as one loop,
writes loops that follow each other as one function, and computes the tensors of a bucket into its
memory. It also leaves out what only one loop reads, writes results over values that end there, and
keeps the memory of others for later: these about cancel, and do not count here.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping

import attrs
import torch
from torch.fx import Graph, Node

from ..capture.checkpoint.recompute import SHAPE_ONLY
from ..inspect.memory import PACK, MemoryPeaks
from ..ops.loops import Loop
from ..ops.placement import AFTER
from ..partition.planner import op_cost

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

ELEMENTWISE = {  # beside the ops that torch tags as pointwise
    *("_to_copy", "_unsafe_index", "arange", "clone", "constant_pad_nd", "copy", "embedding"),
    *("empty", "flip", "full", "full_like", "gather", "index", "index_select", "iota"),
    *("new_full", "new_ones", "new_zeros", "ones", "ones_like", "random_bits", "repeat", "roll"),
    *("scalar_tensor", "select_backward", "select_scatter", "slice_backward", "slice_scatter"),
    *("tril", "triu", "zeros", "zeros_like"),
}
ROWWISE = {  # a loop over the elements that they read
    *("all", "amax", "amin", "any", "argmax", "argmin", "logsumexp", "max", "mean", "min"),
    *("prod", "std", "sum", "var", "var_mean", "_softmax", "_softmax_backward_data"),
    *("_log_softmax", "_log_softmax_backward_data", "_fused_rms_norm", "_fused_rms_norm_backward"),
    *("native_layer_norm", "native_layer_norm_backward", "native_group_norm"),
}
COSTLY = {"exp", "gelu_backward", "log", "sigmoid", "silu", "silu_backward", "softplus", "tanh"}
REUSED_READS, READS = 6, 8  # of an elementwise value that several ops read, and of any: not stored
FUNCTION_READS = 500  # of one function of C++
IN_PLACE = {c10d.all_reduce.default, AFTER, op_cost.WAIT}  # their result is their input


@attrs.define(eq=False)
class Kernel:
    """A model of one fused kernel: the ops that run as one loop.

    Args:
        number: its place in the order in which kernels begin.
        nodes: its ops.
        loop: the elements over which it runs; 0 for a call of another library.
        before: the kernels that it waits for.
    """

    number: int
    nodes: list[Node]
    loop: int
    before: set[Kernel]

    def waits_for(self, kernel: Kernel) -> bool:
        """Return whether this kernel runs after another one, or is that kernel."""
        seen: set[Kernel] = {self}
        queue: list[Kernel] = [self]
        while queue:
            new = queue.pop().before - seen
            seen |= new
            queue += new
        return kernel in seen


class Kernels:
    """A model of Inductor's fusion: the kernels of a graph, and the values that they store.

    Args:
        graph: one rank's program.
        pairs: the donated argument into which each of some results is written, by position.
    """

    def __init__(self, graph: Graph, pairs: Mapping[int, int] | None = None) -> None:
        (output,) = graph.find_nodes(op="output")
        self.arguments = graph.find_nodes(op="placeholder")
        self.results: list[Node] = output.args[0]
        self.donated = {self.results[k] for k in pairs or {}}
        self.base: dict[Node, Node] = {}  # the value of which another is a view
        self.owner: dict[Node, Node] = {}  # the value in whose memory another lies
        self.read: dict[Node, tuple[Node, ...]] = {}  # the stored values that an op reads
        self.formulas: set[Node] = set()  # values that each reader computes
        self.kernel: dict[Node, Kernel] = {}
        self.kernels: list[Kernel] = []
        self.readers: dict[Node, list[Kernel]] = {}
        for node in graph.nodes:
            if node.op == "call_function":
                self.add_node(node)
            else:
                self.base[node] = self.owner[node] = node
        for node in filter(None, self.results):
            self.store(self.base[node])
        for node in graph.find_nodes(op="call_function", target=PACK):
            self.pack_into_bucket(node)

    def add_node(self, node: Node) -> None:
        """Add an op to a kernel, to the views, or to the formulas that its readers compute."""
        first = node.all_input_nodes[0] if node.all_input_nodes else node
        is_item = node.target is operator.getitem and first in self.kernel
        if is_item:
            self.base[node] = self.owner[node] = node
            self.kernel[node] = self.kernel[first]
        elif _is_view(node):
            self.base[node], self.owner[node] = self.base[first], self.owner[first]
        else:
            self.base[node] = node
            self.owner[node] = self.owner[first] if node.target in IN_PLACE else node
            self.add_op(node)

    def add_op(self, node: Node) -> None:
        """Add an op that is no view."""
        inputs = [] if node.target in SHAPE_ONLY else [self.base[x] for x in node.all_input_nodes]
        loop = _loop(node)
        if not loop:
            for x in inputs:
                self.store(x)
        if node.target is op_cost.WAIT:  # what a collective sends is held until it has ended
            inputs += self.read[inputs[0]]
        reads = [self.read[x] if x in self.formulas else (x,) for x in inputs]
        self.read[node] = tuple(dict.fromkeys(itertools.chain(*reads)))
        if _is_elementwise(node) and not self.is_stored(node):
            self.formulas.add(node)
        else:
            self.fuse(node, loop)

    def is_stored(self, node: Node) -> bool:
        """Return whether an elementwise value is too long a formula to be computed by its
        readers.
        """
        count = len(self.read[node])
        is_reused = len(_readers(node)) > 1
        return count > READS or (is_reused and (count > REUSED_READS or _name(node) in COSTLY))

    def store(self, node: Node) -> None:
        """Store a value that was a formula so far."""
        if node in self.formulas:
            self.formulas.remove(node)
            self.fuse(node, _loop(node))

    def fuse(self, node: Node, loop: int) -> None:
        """Add an op to the last kernel over as many elements that makes or reads its inputs; else
        to a new kernel.
        """
        reads = self.read[node]
        before = {self.kernel[x] for x in reads if x in self.kernel}
        near = {k for x in reads if _count(x) == loop for k in self.readers.get(x, ())}
        for kernel in sorted(before | near, key=lambda k: -k.number):
            others = before - {kernel}
            if loop and kernel.loop == loop and not any(k.waits_for(kernel) for k in others):
                kernel.nodes.append(node)
                kernel.before |= others
                break
        else:
            kernel = Kernel(len(self.kernels), [node], loop, before)
            self.kernels.append(kernel)
        self.kernel[node] = kernel
        for x in reads:
            self.readers.setdefault(x, []).append(kernel)

    def pack_into_bucket(self, node: Node) -> None:
        """Let the tensors of a bucket lie in the bucket's memory."""
        for part in node.all_input_nodes:
            owner = self.owner[part]
            is_all = _count(owner) == _count(part) and owner.target is not PACK
            if is_all and owner.op == "call_function" and self.owner[owner] is owner:
                self.owner[owner] = node

    def memory_of(self, node: Node) -> Node:
        """Return the value in whose memory another lies, also in a bucket."""
        owner = self.owner[node]
        return self.owner[owner]

    def order(self) -> list[Kernel]:
        """Return the kernels in the order of their run: each where it begins, after those that it
        waits for.
        """
        ordered: dict[Kernel, None] = {}
        for kernel in self.kernels:
            stack = [kernel]
            while stack:
                waiting = [k for k in stack[-1].before if k not in ordered]
                if waiting:
                    stack.append(min(waiting, key=lambda k: k.number))
                else:
                    ordered[stack.pop()] = None
        return list(ordered)

    def functions(self) -> list[list[Node]]:
        """Group the ops by the function that runs them: one external call, or loops that follow
        each other.
        """
        functions: list[list[Node]] = []
        is_open, reads = False, 0
        for kernel in self.order():
            count = sum(1 + len(self.read[node]) for node in kernel.nodes)
            if is_open and kernel.loop and reads + count <= FUNCTION_READS:
                functions[-1] += kernel.nodes
                reads += count
            else:
                functions.append(list(kernel.nodes))
                is_open, reads = bool(kernel.loop), count
        return functions

    def live_by_function(self) -> MemoryPeaks:
        """Yield the last op of each function, with the values alive while it runs."""
        functions = self.functions()
        last: dict[Node, int] = {}
        for k, nodes in enumerate(functions):
            last |= {self.memory_of(x): k for node in nodes for x in (node, *self.read[node])}
        results = {self.memory_of(x) for x in self.results if x is not None}
        alive: dict[Node, None] = {}
        for k, nodes in enumerate(functions):
            alive |= dict.fromkeys(self.stored(nodes))
            yield nodes[-1], [*self.arguments, *alive]
            alive = {x: None for x in alive if x in results or last.get(x) != k}

    def stored(self, nodes: list[Node]) -> Iterator[Node]:
        """Yield the values into whose memory ops write, except the arguments."""
        for value in itertools.chain(*map(_values, nodes)):
            memory = self.memory_of(value)
            if memory.op != "placeholder" and value not in self.donated:
                yield memory


def _name(node: Node) -> str:
    """Return the name of an op without its overload."""
    return getattr(node.target, "_opname", "")


def _values(node: Node) -> list[Node]:
    """Return the values of an op: the elements of a tuple one by one."""
    is_tuple = isinstance(node.meta.get("val"), (tuple, list))
    return [x for x in node.users if x.target is operator.getitem] if is_tuple else [node]


def _is_view(node: Node) -> bool:
    """Return whether an op makes a view, which has no memory of its own."""
    is_alias = node.op == "call_function" and op_cost.is_alias(node)
    return (is_alias and node.target not in IN_PLACE) or node.target is aten._unsafe_view.default


def _readers(node: Node) -> list[Node]:
    """Return the ops that read a value, also through views."""
    readers: list[Node] = []
    for user in node.users:
        readers += _readers(user) if _is_view(user) else [user]
    return readers


def _is_elementwise(node: Node) -> bool:
    """Return whether an op computes each element from the elements at the same place."""
    is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
    tags = getattr(node.target, "tags", ())
    return is_tensor and (torch.Tag.pointwise in tags or _name(node) in ELEMENTWISE)


def _loop(node: Node) -> int:
    """Return the number of elements over which the loop of an op runs; 0 for an external call."""
    if isinstance(node.target, Loop):
        return 0
    if _is_elementwise(node):
        return _count(node)
    return max(map(_count, node.all_input_nodes)) if _name(node) in ROWWISE else 0


def _count(node: Node) -> int:
    """Return the number of elements of a value; 0 for a tuple."""
    value = node.meta["val"]
    return value.numel() if isinstance(value, torch.Tensor) else 0
