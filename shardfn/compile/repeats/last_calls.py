"""The last calls of blocks: those whose results only the program's caller reads, such as the
updates of an optimizer. They run after the compiled program, so Inductor need not read them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from operator import getitem
from typing import Any

import attrs
import torch

from ...capture.aten_views import memory_of
from .calls import CALL, Kind

Node = torch.fx.Node
COPY = torch.ops.aten.copy_.default


@attrs.frozen
class LastCalls:
    """Calls that run after a program, the copies after them, and the results of all together.

    A value has a name in the code: `r3` is result 3 of the program, `i3` its input 3, and `c2[3]`
    result 3 of call 2.

    Args:
        count: the number of results of the program.
        calls: for each call the number of its kind, and the names of its operands.
        copies: (name of an input, name of the value that is written into it at the end).
        results: the names of the results of program and calls.
    """

    count: int
    calls: tuple[tuple[int, tuple[str, ...]], ...]
    copies: tuple[tuple[str, str], ...]
    results: tuple[str, ...]

    def code(self, kinds: Mapping[int, Kind]) -> str:
        """Write the end of a generated module: a function `call` that runs the one before it, and
        then these calls.

        Args:
            kinds: of the blocks, in the order in which Inductor names their functions.
        """
        order = {number: f"block_{k}" for k, number in enumerate(kinds)}
        read = {x for _, operands in self.calls for x in operands} | self._read_at_the_end()
        inputs = sorted((x for x in read if x[0] == "i"), key=lambda x: int(x[1:]))
        lines = [f"{x} = args[{x[1:]}]" for x in inputs]
        lines.append(f"[{', '.join(f'r{k}' for k in range(self.count))}] = program(args)")
        for k, (number, operands) in enumerate(self.calls):
            lines.append(f"c{k} = {order[number]}([{', '.join(operands)}])")
            if done := self._read_last_by(k):
                lines.append(f"del {', '.join(done)}")
        lines += [f"{x}.copy_({value})" for x, value in self.copies]
        lines.append(f"return ({''.join(f'{x}, ' for x in self.results)})")
        body = "".join(f"    {line}\n" for line in lines)
        return f"\n\nprogram = call\n\n\ndef call(args):\n{body}"

    def _read_last_by(self, k: int) -> list[str]:
        """Return the values that nothing reads after a call."""
        later = {x for _, operands in self.calls[k + 1 :] for x in operands}
        later |= self._read_at_the_end()
        return [x for x in dict.fromkeys(self.calls[k][1]) if x not in later]

    def _read_at_the_end(self) -> set[str]:
        """Return the values that copies read or write to, and the results."""
        return {*self.results, *(x for pair in self.copies for x in pair)}


def split_last_calls(program: torch.fx.Graph) -> LastCalls | None:
    """Take the last calls out of a program. One call of each kind stays, so that its function is
    compiled.

    Args:
        program: with calls of blocks, changed in place: it returns what the last calls read.

    Returns:
        The calls; None if there are none.
    """
    output: Any
    (output,) = program.find_nodes(op="output")
    results = list(output.args[0])
    calls, copies = _last_calls(program, results)
    if not calls:
        return None
    naming = _Naming(program)
    call_rows = [naming.call(k, call) for k, call in enumerate(calls)]
    copy_rows = [naming.copy(copy) for copy in copies]
    names = tuple(map(naming.result, results))
    output.args = (naming.returned,)
    values = [value for call in calls for value in call.users]
    for node in (*copies, *values, *calls):
        program.erase_node(node)
    return LastCalls(len(naming.returned), tuple(call_rows), tuple(copy_rows), names)


def _last_calls(program: torch.fx.Graph, results: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the calls that may run after the program, but the first of each kind; and the copies
    into inputs that must follow them.
    """
    calls: Sequence[Any] = program.find_nodes(op="call_function", target=CALL)
    copies: Sequence[Any] = program.find_nodes(op="call_function", target=COPY)
    writes = Counter(memory_of(node) for call in calls for node in call.args[1])
    writes.update(memory_of(copy.args[0]) for copy in copies)
    inputs = set(program.find_nodes(op="placeholder"))
    returned = Counter(x for x in results if isinstance(x, Node))
    memories = Counter(memory_of(x) for x in results if isinstance(x, Node) and x not in copies)

    def is_alone(x: Node, new: Node, others: int) -> bool:
        """Return whether one write into an input, and its result, have the memory to themselves."""
        memory = memory_of(x)
        return writes[memory] == returned[new] == 1 and memories[memory] == others

    late = {
        copy.args[0]: copy
        for copy in copies
        if is_alone(copy.args[0], copy, 0) and _may_be_late(copy, inputs)
    }
    compiled = set()
    found = []
    for call in calls:
        read, into, number = call.args
        readers = [user for value in call.users for user in value.users]
        is_last = (
            all(node.op == "output" or late.get(node.args[0]) is node for node in readers)
            and all(returned[value] <= 1 for value in call.users)
            and all(node in late or memory_of(node) not in writes for node in read)
            and all(is_alone(x, x, 1) for x in into)
            and all(node.meta["val"].device.type == "cpu" for node in (*read, *into))
        )
        if is_last and number in compiled:
            found.append(call)
        compiled.add(number)
    inside = {x for call in found for x in call.args[0]}
    inside |= {value for call in found for value in call.users}
    return found, [x for x in late.values() if not inside.isdisjoint(x.args)]


def _may_be_late(copy: Any, inputs: Collection[Node]) -> bool:
    """Return whether a copy into an input costs as much at the end: of a call's result, which is
    never computed in place, or of a number. A copy of an input is none, which may be written to.
    """
    source = copy.args[1]
    if memory_of(source) in inputs:
        return False
    is_of_call = source.target is getitem and source.args[0].target is CALL
    return is_of_call or source.meta["val"].numel() == 1


class _Naming:
    """The values that a program returns to the calls after it, with names for all that they read.

    Args:
        program: the program.
    """

    def __init__(self, program: torch.fx.Graph) -> None:
        placeholders = program.find_nodes(op="placeholder")
        self.inputs: dict[Node, str] = {node: f"i{k}" for k, node in enumerate(placeholders)}
        self.computed: dict[Node, str] = {}  # after the program
        self.returned: list[Any] = []  # by the program
        self.of_returned: dict[Node, str] = {}

    def call(self, k: int, call: Any) -> tuple[int, tuple[str, ...]]:
        """Name what a call reads, and what it computes."""
        read, into, number = call.args
        operands = tuple(map(self.operand, (*read, *into)))
        self.computed.update({value: f"c{k}[{value.args[1]}]" for value in call.users})
        self.computed.update({x: self.inputs[x] for x in into})
        return number, operands

    def copy(self, copy: Any) -> tuple[str, str]:
        """Name what a copy writes to, and what it reads."""
        into, source = copy.args
        self.computed[copy] = self.inputs[into]
        return self.inputs[into], self.computed.get(source) or self.operand(source)

    def operand(self, node: Node) -> str:
        """Name a value that is read; the program returns it unless it is an input."""
        return self.inputs.get(node) or self.of_returned.get(node) or self._return(node)

    def result(self, x: Any) -> str:
        """Name a result of program and calls together."""
        if x in self.computed:
            return self.computed[x]
        return self.of_returned.pop(x, None) or self._return(x)

    def _return(self, x: Any) -> str:
        """Let the program return a value."""
        name = f"r{len(self.returned)}"
        self.returned.append(x)
        if isinstance(x, Node):
            self.of_returned[x] = name
        return name
