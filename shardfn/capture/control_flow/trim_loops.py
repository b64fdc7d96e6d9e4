"""Trim loops and branches: remove unread results, and the nodes that only they need."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch

from ...ops.debug import has_effect
from ...ops.loops import Branch, Scan, While
from ...ops.nodes import args_of, remove_unread, returned_by


def trim(graph: torch.fx.Graph) -> None:
    """Remove unread results of loops, and the nodes that only they need."""
    remove_unread(graph)
    nodes = list(graph.nodes)
    # trimming a loop may leave another loop's results unread
    for node in reversed(nodes):
        if type(node.target) in TRIM:
            used = {user.args[1] for user in node.users}
            trim_loop = TRIM[type(node.target)]
            trim_loop(graph, node, node.target, used)
            remove_unread(graph)


def _trim_scan(graph: torch.fx.Graph, node: torch.fx.Node, scan: Scan, used: set[int]) -> None:
    body = scan.graphs[0]
    holders = body.find_nodes(op="placeholder")
    live, needed = _live_results(scan, used)
    outs = sorted(live)
    ins: list[int] = []
    for i, h in enumerate(holders):
        is_read = i - scan.consts in live if _is_carry(scan, i) else h in needed
        if is_read:
            ins.append(i)
    # all inputs stay, since those of the primal scan are identified by position
    if scan.transposes and len(ins) < len(holders):
        ins = sorted({*ins, *range(scan.consts), *_rows_of_primal(scan)})
    kept = {*needed, *(holders[i] for i in ins)}
    if len(outs) == len(returned_by(body)) and len(kept) == len(body.nodes) - 1:
        return  # nothing is unread; the output is the last node
    count = lambda low, high: sum(low <= i < high for i in ins)
    trimmed = attrs.evolve(
        scan,
        graphs=(_restricted_graph(body, ins, outs),),
        consts=count(0, scan.consts),
        carries=count(scan.consts, scan.consts + scan.carries),
    )
    args = args_of(node)
    inputs = [args[i] for i in ins]
    _replace_loop(graph, node, trimmed, inputs, outs)


def _live_results(scan: Scan, used: set[int]) -> tuple[set[int], set[torch.fx.Node]]:
    """The results of a scan that are used, with the carries that they depend on, and the nodes
    of its body that these need.
    """
    body = scan.graphs[0]
    holders = body.find_nodes(op="placeholder")
    live = set(used)
    entering = holders[scan.consts :][: scan.carries]
    while True:
        needed = _needed(body, [returned_by(body)[k] for k in live])
        carries = {k for k, holder in enumerate(entering) if holder in needed}
        if carries <= live:
            return live, needed
        live |= carries


def _rows_of_primal(scan: Scan) -> range:
    start = scan.consts + scan.carries
    assert scan.transposes is not None
    _, *counts = scan.transposes
    return range(start, start + sum(counts))


def _is_carry(scan: Scan, i: int) -> bool:
    return scan.consts <= i < scan.consts + scan.carries


def _trim_branch(
    graph: torch.fx.Graph, node: torch.fx.Node, branch: Branch, used: set[int]
) -> None:
    ins = sorted({i for g in branch.graphs for i in _needed_inputs(g, used)})
    outs = sorted(used)
    trimmed = attrs.evolve(
        branch,
        graphs=tuple(_restricted_graph(g, ins, outs) for g in branch.graphs),
        consts=len(ins),
    )
    args = args_of(node)
    truth = args[-1]
    consts = [args[i] for i in ins]
    _replace_loop(graph, node, trimmed, [*consts, truth], outs)


def _needed_inputs(body: torch.fx.Graph, used: set[int]) -> list[int]:
    """The inputs of a graph that some of its results depend on."""
    needed = _needed(body, [returned_by(body)[k] for k in used])
    holders = body.find_nodes(op="placeholder")
    return [i for i, h in enumerate(holders) if h in needed]


def _trim_while(graph: torch.fx.Graph, node: torch.fx.Node, loop: While, used: set[int]) -> None:
    test, body = loop.graphs
    carries = range(loop.consts, loop.consts + loop.carries)
    of_test = {*_needed_inputs(test, {0})}
    live = used | {i - loop.consts for i in of_test if i in carries}
    while True:
        of_body = {*_needed_inputs(body, live)}
        entering = {i - loop.consts for i in of_body if i in carries}
        if entering <= live:
            break
        live |= entering
    outs = sorted(live)
    consts = sorted(i for i in of_test | of_body if i < loop.consts)
    ins = [*consts, *(loop.consts + k for k in outs)]
    trimmed = While(
        (_restricted_graph(test, ins, [0]), _restricted_graph(body, ins, outs)),
        len(consts),
        len(outs),
    )
    args = args_of(node)
    _replace_loop(graph, node, trimmed, [args[i] for i in ins], outs)


TRIM: dict[type, Callable[..., None]] = {Scan: _trim_scan, Branch: _trim_branch, While: _trim_while}


def dependencies_of(roots: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
    """All nodes that these results depend on."""
    seen = set()
    queue = list(roots)
    while queue:
        node = queue.pop()
        if node not in seen:
            seen.add(node)
            queue += node.all_input_nodes
    return seen


def _needed(body: torch.fx.Graph, results: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
    """All nodes that these results, or effects such as prints, depend on."""
    return dependencies_of([*results, *filter(has_effect, body.nodes)])


def _restricted_graph(body: torch.fx.Graph, ins: list[int], outs: list[int]) -> torch.fx.Graph:
    """A copy of a graph with only some of its inputs and results."""
    fresh = torch.fx.Graph()
    env = dict[torch.fx.Node, torch.fx.Node]()
    wanted = [returned_by(body)[k] for k in outs]
    needed = _needed(body, wanted)
    holders = body.find_nodes(op="placeholder")
    inputs = {holders[i] for i in ins}
    for node in body.nodes:
        if node in inputs or (node in needed and node.op != "placeholder"):
            env[node] = copy_node(fresh, node, env)
    fresh.output([env[x] for x in wanted])
    return fresh


def copy_node(
    graph: torch.fx.Graph, node: torch.fx.Node, env: dict[torch.fx.Node, torch.fx.Node]
) -> torch.fx.Node:
    """Copy a node into another graph, with its metadata."""
    made = graph.node_copy(node, env.__getitem__)
    made.meta = dict(node.meta)
    return made


def _replace_loop(
    graph: torch.fx.Graph,
    node: torch.fx.Node,
    loop: Any,
    args: list[torch.fx.Node],
    outs: list[int],
) -> None:
    """Replace a loop by another. `outs` gives the old result of each new result."""
    values = node.meta["val"]
    node.target = loop
    node.args = tuple(args)
    node.meta["val"] = [values[k] for k in outs]
    places = {old: new for new, old in enumerate(outs)}
    for user in list(node.users):
        if user.target is operator.getitem:
            _, k = args_of(user)
            user.args = (node, places[k])
