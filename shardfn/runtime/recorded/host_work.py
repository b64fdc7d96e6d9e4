"""Work of the CPU in a program, which a CUDA graph does not record."""

from __future__ import annotations

import torch

from ...errors import ShardError
from ...ops.loops import Branch, While, inner_nodes
from ...ops.nodes import origin_of
from ...ops.ragged import READS_COUNTS
from ...source_text import located
from ...types import LocalProgram
from ..arguments import Placed

DECIDES = "the CPU reads a value to decide what runs next"
COUNTS = "the CPU reads how many rows go to each rank"
SHOWN = 4  # lines of an error


def refuse_host_work(name: str, placed: Placed, program: LocalProgram) -> None:
    """Refuse to record a program that does more than launch kernels of CUDA.

    Args:
        name: of the function.
        placed: its arguments.
        program: the local program.

    Raises:
        ShardError: names what runs on the processor.
    """
    if not placed.device.startswith("cuda"):
        raise ShardError.of(
            name,
            f"cuda_graphs=True, but the program runs on {placed.device}",
            needed="tensors on a CUDA device",
            fix='cuda_graphs=mesh.device_type == "cuda"',
        )
    lines = [*_inputs(placed, program), *_ops(program)]
    if lines:
        more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
        raise ShardError.of(
            name,
            "cuda_graphs=True, but a part of the program runs on the CPU",
            *lines[:SHOWN],
            *more,
            needed="a program that runs only on the GPU",
            fix="cuda_graphs=False; or call x.to('cuda') outside of the function, and use "
            "torch.where in place of cond",
        )


def _inputs(placed: Placed, program: LocalProgram) -> list[str]:
    """List the program's inputs on the CPU."""
    holders = program.graph.find_nodes(op="placeholder")
    own = holders[len(placed.axes.names) :]
    rows = zip(program.in_paths, own, strict=True)
    return [f"{path} lives on the CPU" for path, node in rows if _is_on_cpu(node)]


def _ops(program: LocalProgram) -> list[str]:
    """List the ops that run on the CPU, and the loops and branches that the CPU decides."""
    found = []
    for node in inner_nodes(program.graph, once=True):
        if node.op != "call_function":
            continue
        reason = _reason(node)
        if reason:
            place = located(**origin_of(node))
            at = f", {place}" if place else ""
            found.append(f"%{node.name}: {reason}{at}")
    return found


def _reason(node: torch.fx.Node) -> str | None:
    if isinstance(node.target, (Branch, While)):
        return DECIDES
    if node.target in READS_COUNTS:
        return COUNTS
    return "it runs on the CPU" if _is_on_cpu(node) else None


def _is_on_cpu(node: torch.fx.Node) -> bool:
    x = node.meta.get("val")
    return isinstance(x, torch.Tensor) and x.device.type == "cpu"
