"""A compiled program as a record of JSON and tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from ... import _compat
from ..._compat.cuda import unnumbered
from ..._compat.versions import VERSION
from ...accepted.check import described
from ...compile.text import Unwritable, tensor_text, text_of, value_text
from ...errors import ArtefactError, call_site
from ...random import ambient
from ...types import TENSOR, LocalProgram
from . import file
from .trees import tree_text

Coordinate = tuple[int, ...]
FIX = (
    "call the program in a process that has its Python source, or remove this part from the "
    "function"
)
TENSOR_TEXT = {"tensor": True}


def save_compiled(path: Any, compiled: Any, programs: Mapping[Coordinate, LocalProgram]) -> None:
    """Write a compiled program to an artefact file.

    Args:
        path: of the file.
        compiled: the program.
        programs: of every rank, by its coordinates in row-major order.

    Raises:
        ArtefactError: a file cannot hold it.
    """
    where = f"compiled {compiled.request.name}, save"
    if not isinstance(path, (str, os.PathLike)):
        got, needed = f"path is {described(path)}", "a path"
        raise ArtefactError.of(where, got, needed=needed, source=call_site())
    reason = _unfit(compiled)
    if reason:
        raise ArtefactError.of(where, reason, fix=FIX, source=call_site())
    try:
        record = {
            **_origin(compiled),
            "arguments": _arguments(compiled.placed),
            "outside": _outside(compiled.captured),
            "results": _results(compiled),
            **_programs(programs),
        }
    except Unwritable as found:
        got = f"the program has {found}, which a file cannot hold"
        raise ArtefactError.of(where, got, fix=FIX, source=call_site()) from None
    closed = enumerate(compiled.captured.closed_over)
    file.write(
        os.fspath(path),
        record,
        {str(i): x for i, x in closed if x is not ambient.PLACEHOLDER_STATE},
    )


def _unfit(compiled: Any) -> str:
    """Say why a compiled program cannot be saved, or return None."""
    closed = compiled.captured.closed_over
    if compiled.backward is not None:
        return "autograd records the call, so the call has two programs, a forward and a backward"
    if compiled.request.around is not None or compiled.request.rank is not None:
        return "the function is code of one rank, with tensors that differ between ranks"
    if any(type(x) not in (torch.Tensor, torch.nn.Parameter) for x in closed):
        return "the function closes over a DTensor or another tensor subclass"
    if any(x.is_meta for x in closed):
        return "the function closes over a tensor on the meta device"
    return ""


def _origin(compiled: Any) -> dict[str, Any]:
    """Record the versions, mesh and settings that a program was compiled with."""
    placed = compiled.placed
    device = placed.mesh.device_type if placed.mesh is not None else None
    state = zip(_compat.SETTINGS, placed.state, strict=True)
    return {
        "torch": _compat.TORCH_VERSION,
        "shardfn": VERSION,
        "name": compiled.request.name,
        "backend": compiled.backend,
        "cuda_graphs": compiled.request.cuda_graphs,
        "mesh": [list(placed.axes.names), list(placed.axes.sizes), device],
        "settings": [[name, _constant(x)] for name, x in state],
    }


def _constant(x: Any) -> Any:
    return value_text(x, lambda node: -1)


def _arguments(placed: Any) -> dict[str, Any]:
    return {
        "tree": tree_text(placed.treedef),
        "paths": list(placed.paths),
        "tensors": list(placed.tensors),
        "dtensors": list(placed.dtensors),
        "avals": [
            [list(x.shape), list(x.stride), 0, _dtype(x.dtype), _device(x.device)]
            for x in placed.avals
        ],
        "marks": [marks_text(marks) for marks in placed.marks],
        "unreduced": list(placed.unreduced),
        "donated": list(placed.donated),
        "constants": [[i, _constant(x)] for i, _, x in placed.constants],
    }


def _dtype(x: torch.dtype) -> str:
    return str(x).removeprefix("torch.")


def _device(x: str) -> str:
    return str(unnumbered(torch.device(x)))


def marks_text(marks: Any) -> list[Any]:
    """Print placements as JSON."""
    return [list(x) if isinstance(x, tuple) else x for x in marks]


def _outside(captured: Any) -> dict[str, Any]:
    """Record the closed-over tensors, and how the program takes its inputs."""
    outside = captured.outside
    return {
        "tensors": [
            None if x is ambient.PLACEHOLDER_STATE else tensor_text(x) for x in outside.tensors
        ],
        "names": list(outside.names),
        "draws": outside.draws,
        "constants": outside.constants,
        "strided": [[k, is_own] for k, is_own in captured.strided.items()],
        "paths": list(captured.program.in_paths),
        "inputs": _metas(captured.program.graph.graph.find_nodes(op="placeholder")),
    }


def _metas(nodes: Any) -> list[Any]:
    return [tensor_text(node.meta["val"]) for node in nodes]


def _results(compiled: Any) -> dict[str, Any]:
    program, plan = compiled.captured.program, compiled.partition
    (output,) = program.graph.graph.find_nodes(op="output")
    unreduced = {slot.number for slot, _ in plan.unreduced}
    return {
        "tree": tree_text(program.out_tree),
        "paths": list(program.out_paths),
        "leaves": [TENSOR_TEXT if x is TENSOR else _constant(x) for x in program.out_leaves],
        "values": _metas(output.args[0]),
        "marks": [marks_text(slot.placements) for slot in plan.outs],
        "unreduced": [k for k, slot in enumerate(plan.outs) if slot.number in unreduced],
        "inputs": [marks_text(slot.placements) for slot in plan.ins],
    }


def _programs(programs: Mapping[Coordinate, LocalProgram]) -> dict[str, Any]:
    """Record the distinct local programs, and which of them each rank runs."""
    distinct = list(dict.fromkeys(programs.values()))
    numbers = {program: k for k, program in enumerate(distinct)}
    return {
        "programs": [
            {"graph": text_of(x.graph, notes=True), "elided": list(x.elided)} for x in distinct
        ],
        "of": [numbers[program] for program in programs.values()],
    }
