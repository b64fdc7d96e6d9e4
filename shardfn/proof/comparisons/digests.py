"""Digests of the values of a run: SHARDFN_DIGESTS=path is a folder with a file for each rank. A
line is a call, or a value with its hash, its norm and its projection on fixed weights.

The projection is linear and separable, so that it adds up over shards and over the terms of a
Partial sum: runs of other layouts can be compared.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch

from ... import extensions
from ...capture.printed_names import op_name
from ...compile.op_by_op import run_as
from ...compile.separate import separate
from ...mesh import all_coordinates
from ...ops.nodes import returned_by
from ...partition import layout
from ...runtime.compiled import Compiled
from ...runtime.layouts import cut
from ...runtime.stages import Lowered
from ...schedule import copied
from ...types import LocalProgram, MeshAxes, MeshPlacements, Program
from .op_results import op_of
from .rounding import length_of_sums
from .values_of_ranks import node_of_slots, of_one_rank, slots_and_steps

STEP = 2.399963  # radians between the weights of neighbours: the golden angle


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
