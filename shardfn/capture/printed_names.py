"""The names of a printed program: inputs by their paths, ops without overloads, each name
once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch

from ..ops.loops import Loop, Scan, loop_of
from ..ops.nodes import args_of

Names = dict[torch.fx.Node, str]
QUOTED_KEY = re.compile(r"""\[(['"])(.*?)\1\]""")
INDEX = re.compile(r"\[(\w+)\]")
PLAIN_PATH = re.compile(r"\w+(\.\w+|\[\d+\]|\['\w+'\])*")


def dotted(path: str) -> str:
    """A path as a name: `params['w1']` is `params.w1`, `args[0][2]` is `args.0.2`.

    Example:
        >>> dotted("params['layer 1'][0].w")
        'params.layer_1.0.w'
    """
    name = QUOTED_KEY.sub(lambda m: "." + re.sub(r"\W", "_", m[2]), path)
    name = INDEX.sub(r".\1", name)
    name = re.sub(r"[^\w.]+", "_", name).strip("_.")
    return name or "x"


def is_name_of_path(name: str, path: str) -> bool:
    """Whether a printed name says its path in full."""
    return name == dotted(path) and PLAIN_PATH.fullmatch(path) is not None


def unique_name(name: str, taken: set[str]) -> str:
    """The name, or the first of name_1, name_2, ... that is not taken. Marks it as taken."""
    number = 0
    unique = name
    while unique in taken:
        number += 1
        unique = f"{name}_{number}"
    taken.add(unique)
    return unique


def dotted_names(paths: Iterable[str]) -> list[str]:
    """A name for each path, no two alike."""
    taken: set[str] = set()
    return [unique_name(dotted(path), taken) for path in paths]


def printed_names(graph: torch.fx.Graph, inputs: Mapping[torch.fx.Node, str]) -> Names:
    """A name for each node of a graph and of the graphs of its loops.

    Args:
        graph: of a program.
        inputs: the name of each placeholder; no two alike.
    """
    names = dict(inputs)
    _add_ops(graph, names, set(names.values()))
    return names


def op_name(node: torch.fx.Node) -> str:
    """The printed name of a node's op: the kind of a collective, or an op without its overload."""
    if record := node.meta.get("collective"):
        return record.kind
    target = node.target
    return getattr(target, "_opname", None) or getattr(target, "__name__", str(target))


def _add_ops(graph: torch.fx.Graph, names: Names, taken: set[str]) -> None:
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        names[node] = unique_name(_wanted(node), taken)
        if isinstance(node.target, Loop):
            for inner in node.target.graphs:
                _add_loop_inputs(node, inner, names, taken)
                _add_ops(inner, names, taken)


def _wanted(node: torch.fx.Node) -> str:
    """The name that a node would have if it were free: its own if it contains its op's, else its
    op's. Otherwise the op's name.
    """
    op = op_name(node)
    numbered = re.fullmatch(re.escape(op) + r"(_\d+)?", node.name)
    return node.name if numbered else op


def _add_loop_inputs(
    node: torch.fx.Node, inner: torch.fx.Graph, names: Names, taken: set[str]
) -> None:
    """Name the inputs of a loop's graph: constants as outside of it, other inputs by their
    role.
    """
    holders = inner.find_nodes(op="placeholder")
    consts = loop_of(node).consts
    for holder, operand in zip(holders[:consts], args_of(node), strict=False):
        names[holder] = names[operand]
    for number, holder in enumerate(holders[consts:]):
        carried = not isinstance(node.target, Scan) or number < node.target.carries
        names[holder] = unique_name("carry" if carried else "step_input", taken)
