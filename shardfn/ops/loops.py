"""Loops and branches (`Scan`, `While`, `Branch`) as ops of a graph: a node whose target is one of
these runs its graphs on its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import attrs
import torch

Tensors = list[torch.Tensor]
# yields (which graph, or which message; its inputs), and is sent its outputs
Driver = Generator[tuple[Any, Tensors], Tensors, Tensors]


@attrs.frozen(eq=False, repr=False)
class Loop:
    """The base class of `Scan`, `While` and `Branch`: graphs, and how often to run each.

    Args:
        graphs: the graphs to run. The leading arguments, which are constant, are the leading
            inputs of each.
        consts: the number of arguments that are the same for every run of a graph.
    """

    graphs: tuple[torch.fx.Graph, ...]
    consts: int

    def drive(self, tensors: Sequence[torch.Tensor]) -> Driver:
        """Yield each graph to run with its inputs, and return the results of the loop."""
        raise NotImplementedError

    def sums_of(self, graph: int) -> dict[int, int]:
        """Return the results of a graph that take the memory of an input, which is that value
        before: of a pipeline its sums.
        """
        return {}

    def runs(self) -> Iterator[torch.fx.Graph]:
        """Yield the graphs as often as they run, as far as that is known."""
        yield from self.graphs

    def runs_and_messages(self) -> Iterator[Any]:
        """Yield the graphs as often as they run, and records of the messages between them."""
        yield from self.runs()

    def exchange(self) -> Any:
        """Return what carries the messages that it yields; None for one that has none."""
        return None

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        modules = [torch.fx.GraphModule(torch.nn.Module(), graph) for graph in self.graphs]
        return unaliased(
            drive_loop(self, tensors, lambda which, inputs: modules[which](*inputs)), tensors
        )

    def __repr__(self) -> str:
        return type(self).__name__.lower()

    @property
    def __name__(self) -> str:
        return repr(self)


@attrs.frozen(eq=False, repr=False)
class Scan(Loop):
    """A scan: one graph (consts, carries, rows) -> (carries, per-step outputs), run over slices
    of tensors. The rows are the per-step inputs.

    The results are the carries after the last step, then the stacked per-step outputs.

    Args:
        carries: the number of loop-carried values.
        length: the number of steps.
        reverse: whether the steps run from the last row to the first.
        transposes: (consts, carries, rows) of the primal scan, if this is a transpose. The rows
            of the transpose begin with those carries and rows.
    """

    carries: int
    length: int
    reverse: bool = False
    transposes: tuple[int, int, int] | None = None

    def runs(self) -> Iterator[torch.fx.Graph]:
        for _ in range(self.length):
            yield from self.graphs

    def drive(self, tensors: Sequence[torch.Tensor]) -> Driver:
        consts = list(tensors[: self.consts])
        carry = list(tensors[self.consts : self.consts + self.carries])
        stacked_inputs = tensors[self.consts + self.carries :]
        values = graph_outputs(self.graphs[0])[self.carries :]
        stacked = [_empty_stack(x, 0) for x in values]
        steps = range(self.length)
        for i in reversed(steps) if self.reverse else steps:
            outs = yield 0, [*consts, *carry, *(x[i] for x in stacked_inputs)]
            carry = list(outs[: self.carries])
            stacked = self.put(i, outs[self.carries :], stacked)
            del outs  # not alive beside those of the next step
        return [*carry, *stacked]

    def put(self, i: int, row: Sequence[torch.Tensor], stacked: Tensors) -> Tensors:
        """Write the outputs of one step into the stacked outputs."""
        if row and not len(stacked[0]):
            stacked = [_empty_stack(x, self.length) for x in row]
        for stack, x in zip(stacked, row, strict=True):
            stack[i].copy_(x)
        return stacked


@attrs.frozen(eq=False, repr=False)
class While(Loop):
    """A while loop: applies the second graph, (consts, carries) -> carries, to its own results
    while the first graph returns true.

    Args:
        carries: the number of loop-carried values.
    """

    carries: int

    def drive(self, tensors: Sequence[torch.Tensor]) -> Driver:
        consts = list(tensors[: self.consts])
        carry = list(tensors[self.consts :])
        while True:
            (go_on,) = yield 0, [*consts, *carry]
            if not bool(go_on):
                return carry
            carry = list((yield 1, [*consts, *carry]))


@attrs.frozen(eq=False, repr=False)
class Branch(Loop):
    """A cond: runs the first of two graphs if a truth value holds, else the second; (consts,
    truth) -> results.
    """

    def drive(self, tensors: Sequence[torch.Tensor]) -> Driver:
        *consts, truth = tensors
        return list((yield (0 if bool(truth) else 1), consts))

    def __repr__(self) -> str:
        return "cond"


def loop_of(node: torch.fx.Node) -> Loop:
    """Return the Loop that is the target of a node."""
    assert isinstance(node.target, Loop), f"{node} runs no loop"
    return node.target


def drive_loop(
    loop: Loop, tensors: Sequence[torch.Tensor], call: Callable[[int, Tensors], Tensors]
) -> Tensors:
    """Run a loop to its end, calling a function for each of its graphs."""
    driver: Any = loop.drive(tensors)
    exchange = loop.exchange()
    outs: Any = None
    while True:
        try:
            which, inputs = driver.send(outs)
        except StopIteration as stop:
            if exchange is not None:
                exchange.finish()
            return stop.value
        outs = None  # not alive beside those of the next step
        outs = call(which, inputs) if isinstance(which, int) else exchange(which, inputs)


def unaliased(outs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Tensors:
    """Copy each result that shares memory with an argument or another result."""
    pointers = {x.untyped_storage().data_ptr() for x in tensors}
    separate = []
    for x in outs:
        pointer = x.untyped_storage().data_ptr()
        separate.append(x.clone() if pointer in pointers else x)
        pointers.add(pointer)
    return separate


def graph_outputs(graph: torch.fx.Graph) -> list[Any]:
    """Return the fake values that a graph returns."""
    (output,) = graph.find_nodes(op="output")
    return [node.meta["val"] for node in output.args[0]]


def _empty_stack(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return an empty tensor of n stacked values like x."""
    return torch.empty((rows, *x.shape), dtype=x.dtype, device=x.device)


def empty_results(loop: Loop) -> list[torch.Tensor]:
    """Return the results of a loop as empty tensors, with their shapes and dtypes."""
    values = graph_outputs(loop.graphs[-1])
    if not isinstance(loop, Scan):
        return [torch.empty_like(x) for x in values]
    carries = [torch.empty_like(x) for x in values[: loop.carries]]
    return [*carries, *(_empty_stack(x, loop.length) for x in values[loop.carries :])]


def inner_nodes(graph: torch.fx.Graph, *, once: bool = False) -> Generator[torch.fx.Node]:
    """Yield every node in the order in which it runs. The nodes of a loop are repeated as often as
    it is known to run them, or listed once for each graph.
    """
    for node in graph.nodes:
        yield node
        if isinstance(node.target, Loop):
            for inner in node.target.graphs if once else node.target.runs():
                yield from inner_nodes(inner, once=once)
