"""What Inductor's code for a lowered program allocates, read from the code, which is not built."""

from __future__ import annotations

import contextlib
import math
import re
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import attrs
import torch
from torch._inductor import config, ir
from torch._inductor.graph import GraphLowering

from shardfn import _compat
from shardfn.compile import backends, loops
from shardfn.compile.donations import donations
from shardfn.runtime.stages.compiling import donated_places
from shardfn.schedule import copied

EMPTY = re.compile(r"(\w+) = empty_strided_cpu\(\((.*?)\), \((.*?)\), (torch\.\w+)\)")
DELETED = re.compile(r"del (.+)")
PART = re.compile(r"(\w+) = (\w+)\[\d+\]")
RENAMED = re.compile(r"(\w+) = (?:reinterpret_tensor\()?(\w+)(?:, .*\))?")
ONLY = re.compile(r"(\w+) = (\w+)").fullmatch
ARGUMENT = re.compile(r"arg\d+_\d+")
MADE = re.compile(r"(\w+) = .+")


BLOCK = re.compile(r"def (block_\d+)\(args\):\n(.*?)\n    return \((.*?)\)\n", re.DOTALL)
OPERANDS = re.compile(r"(block_\d+)_args = \[(.*)\]")
CALL = re.compile(r"(\w+) = (block_\d+)\(\w+\)")
LAST_CALL = re.compile(r"(\w+) = (block_\d+)\(\[(.*)\]\)")
LOOP = re.compile(r"\w+ = torch\.ops\.shardfn\.run_loop\.default\(.*\], (\d+)\)")


@attrs.define
class _Written:
    """Code that Inductor wrote, each with its own graph: of bodies of loops, then of what is
    around them.

    Args:
        parts: the code of each graph.
        loops: the most bytes that the bodies of each loop hold, beside their inputs.
    """

    parts: list[tuple[str, Any]] = attrs.field(factory=list)
    loops: dict[int, int] = attrs.field(factory=dict)

    def peak(self) -> int:
        """The most bytes that the last part holds at once, beside its arguments."""
        code, inner = self.parts[-1]
        return _peak(code, _sizes(inner), self.loops)

    def body(self, graph: torch.fx.Graph, sums: dict[int, int]) -> Any:
        """Write the code of a body. Its peak stands in the place of the function."""
        module = torch.fx.GraphModule(torch.nn.Module(), copied(graph))
        backends.inductor(module, [*sums.values()], pairs=sums or None)
        return self.peak()

    def compile_loops(self, module: torch.fx.GraphModule, _: Any) -> list[Any]:
        """Write the code of all bodies of a graph."""
        every = loops.compile_loops(module, self.body)
        self.loops |= {x.number: max(x.runners) for x in every}
        return every


@contextlib.contextmanager
def _without_building(written: _Written) -> Iterator[None]:
    """A context in which Inductor writes code, and compiles none."""

    def unbuilt(graph: Any) -> Any:
        code, _ = graph.codegen()
        written.parts.append((code.value, graph))
        return mock.Mock(__file__="none.py", key="none", call=lambda *args: None)

    def extended(_: Any, last: str) -> None:
        code, graph = written.parts.pop()
        written.parts.append((code + last, graph))

    with (
        mock.patch.object(GraphLowering, "compile_to_module", unbuilt),
        mock.patch("shardfn._compat.inductor.extend", extended),
        mock.patch("torch._dynamo.repro.after_aot.save_graph_repro"),
        mock.patch.object(backends, "key_of", lambda *args: None),
        mock.patch.object(backends, "compile_loops", written.compile_loops),
        mock.patch.object(loops, "_compiled", weakref.WeakValueDictionary()),
        config.patch(fx_graph_cache=False),
        _compat.staging(),
        _compat.autocast_off(),
    ):
        yield


def allocated(lowered: Any) -> int:
    """The peak of a rank's memory in the code that Inductor writes for a lowered program, with
    all arguments.
    """
    placeholders = lowered.program.graph.find_nodes(op="placeholder")
    values = [x.meta["val"] for x in placeholders]
    return sum(x.nbytes for x in values) + _all_written(lowered).peak()


def allocations(lowered: Any) -> int:
    """How often that code allocates memory that it does not take from a value before."""
    code, _ = written(lowered)
    return sum(EMPTY.fullmatch(line) is not None for line in _lines(code))


def written(lowered: Any) -> tuple[str, Any]:
    """The code that Inductor writes for a lowered program, and its own graph of that."""
    return _all_written(lowered).parts[-1]


def _all_written(lowered: Any) -> _Written:
    program = lowered.program
    donated = donated_places(lowered.traced.placed)
    graph = torch.fx.GraphModule(torch.nn.Module(), copied(program.graph))
    pairs = donations(program, donated)
    every = _Written()
    with _without_building(every):
        backends.inductor(graph, donated, pairs=pairs)
    return every


def _sizes(graph: Any) -> dict[str, int]:
    """The bytes of each buffer that a kernel allocates itself, also in blocks."""
    found = {}
    for part in (graph, *(block.graph for block in graph.seen_subgraphs.values())):
        for buffer in part.buffers:
            layout = buffer.maybe_get_output_spec()
            if isinstance(layout, ir.Layout) and not isinstance(layout, ir.NoneLayout):
                count = int(layout.storage_size())
                found[buffer.get_name()] = count * layout.dtype.itemsize
    return found


class _Held:
    """The memory that names refer to."""

    def __init__(self) -> None:
        self.memory: dict[str, int] = {}
        self.nbytes: dict[int, int] = {}
        self.held = self.peak = 0

    def make(self, name: str, nbytes: int) -> None:
        """A name for new memory."""
        number = len(self.nbytes)
        self.memory[name], self.nbytes[number] = number, nbytes
        self.held += nbytes
        self.peak = max(self.peak, self.held)

    def drop(self, name: str) -> None:
        """A name is gone, and its memory if it was the last."""
        number = self.memory.pop(name, None)
        if number is not None and number not in self.memory.values():
            self.held -= self.nbytes[number]

    def take(self, name: str, base: str, nbytes: int) -> None:
        """A name for one of the results of a call, which are made together."""
        if base in self.memory:
            self.held -= nbytes
            self.nbytes[self.memory[base]] -= nbytes
        self.make(name, nbytes)

    def rename(self, name: str, base: str) -> None:
        """A second name for the memory of a first."""
        if base in self.memory:
            self.memory[name] = self.memory[base]


def _peak(code: str, sizes: dict[str, int], inside: dict[int, int]) -> int:
    """The most bytes that a program's code holds at once.

    Args:
        code: of the program.
        sizes: of what kernels allocate themselves.
        inside: the bytes that each loop holds beside its inputs, by its number.
    """
    held = _Held()
    lines = _lines(code)
    given: set[str] = set()  # names of memory of arguments
    together: dict[str, int] = {}  # the bytes of all results of a call
    parts = {x.groups() for x in map(PART.fullmatch, lines) if x}  # once, of all calls of a block
    for name, base in parts:
        together[base] = together.get(base, 0) + sizes.get(name, 0)
    for name, base in (x.groups() for x in map(ONLY, lines) if x):
        if base not in sizes:  # a call of torch, and the name of its only result
            together[base] = sizes.get(name, 0)
    for line in lines:
        if found := EMPTY.fullmatch(line):
            name, shape, stride, dtype = found.groups()
            pairs = zip(_numbers(shape), _numbers(stride), strict=True)
            count = 1 + sum((n - 1) * s for n, s in pairs)
            is_empty = math.prod(_numbers(shape)) == 0
            size = getattr(torch, dtype.removeprefix("torch.")).itemsize
            held.make(name, 0 if is_empty else count * size)
        elif found := DELETED.fullmatch(line):
            for name in found[1].split(","):
                held.drop(name.strip())
        elif found := PART.fullmatch(line):
            name, base = found.groups()
            held.take(name, base, sizes.get(name, 0))
        elif (found := RENAMED.fullmatch(line)) and found[2] in held.memory:
            held.rename(found[1], found[2])
        elif found and (found[2] in given or ARGUMENT.fullmatch(found[2])):
            given.add(found[1])
        elif found := MADE.fullmatch(line):
            name = found[1]
            held.make(name, together.get(name, sizes.get(name, 0)))
            if loop := LOOP.fullmatch(line):
                held.peak = max(held.peak, held.held + inside[int(loop[1])])
    return held.peak


def _lines(code: str) -> list[str]:
    """The statements of the function that runs a program, with those of blocks where it calls
    them.
    """
    blocks = {
        name: (_statements(body), _split(results)) for name, body, results in BLOCK.findall(code)
    }
    lines: list[str] = []
    returned: dict[str, int] = {}  # how many results a call has, by its name
    for line in _all_statements(code):
        if found := OPERANDS.fullmatch(line):
            operands = _split(found[2])
            lines += [f"{found[1]}_arg{k}_1 = {value}" for k, value in enumerate(operands)]
        elif found := CALL.fullmatch(line):
            inside, values = blocks[found[2]]
            returned[found[1]] = len(values)
            results = [f"{found[1]}_{k} = {value}" for k, value in enumerate(values)]
            own = [*inside, *results]
            names = {name for x in own for name in re.findall(rf"{found[2]}_\w+", x)}
            lines += [*own, *(f"del {name}" for name in sorted(names))]
        elif (found := PART.fullmatch(line)) and found[2] in returned:
            lines.append(line.replace("[", "_").replace("]", ""))
        elif (found := DELETED.fullmatch(line)) and found[1] in returned:
            lines += [f"del {found[1]}_{k}" for k in range(returned[found[1]])]
        else:
            lines.append(line)
    return lines


def _all_statements(code: str) -> list[str]:
    """The statements of the function that runs a program, and of the calls after it."""
    code, _, last = code.partition("\nprogram = call\n")
    _, _, body = code.partition("def call(")
    body, _, rest = body.partition("\n        return (")
    lines = _statements(body)
    for line in _statements(last):
        if line.endswith(" = program(args)"):
            values = _split(rest[: rest.index("\n")])
            made = {found[1] for x in lines if (found := MADE.fullmatch(x))}
            lines += [f"r{k} = {value}" for k, value in enumerate(values)]
            lines += [f"del {name}" for name in sorted(made)]
        elif found := LAST_CALL.fullmatch(line):
            lines += [
                f"{found[2]}_args = [{found[3]}]",
                f"{found[1]} = {found[2]}({found[2]}_args)",
            ]
        else:
            lines.append(re.sub(r"args\[(\d+)\]", r"arg\1_1", line))
    return lines


def _statements(body: str) -> list[str]:
    """The statements of a function's body."""
    parts = [part for line in body.splitlines() for part in line.split(";")]
    return [part.partition("#")[0].strip() for part in parts]


def _split(values: str) -> list[str]:
    """The parts of a list of values."""
    return re.findall(r"\w+(?:\((?:[^()]|\([^()]*\))*\))?", values)


def _numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",") if x.strip()]
