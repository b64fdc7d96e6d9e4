"""Residuals of scans: a scan saves the values that its transpose would otherwise recompute."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch.fx import Graph, Node

from ...ops.loops import Scan, graph_outputs
from ...ops.nodes import args_of, remove_unread, returned_by
from .trim_loops import copy_node, dependencies_of, trim


def simplify(graph: Graph) -> None:
    """Trim the loops of a graph, have scans save residuals for their transposes, and trim
    again.
    """
    trim(graph)
    if save_residuals(graph):
        trim(graph)


def save_residuals(graph: Graph) -> bool:
    """Have each scan save, step by step, the values that its transpose would recompute. Returns
    whether any scan does.

    The transpose's graph starts with that of the scan, on the carries that entered each step.
    Values of that part that the rest reads become per-step outputs of the scan and per-step
    inputs of the transpose. In place of a view the value that it views is saved. Views of
    inputs are not saved, nor are values that a checkpoint recomputes, which belong to the backward.
    """
    found = False
    for node in list(graph.nodes):
        if (
            isinstance(node.target, Scan)
            and node.target.transposes
            and (primal := _primal_of(node, node.target))
        ):
            found = _save_residuals(graph, primal, node, node.target) or found
    return found


def _primal_of(node: Node, scan: Scan) -> Node | None:
    """The scan that a transposed scan belongs to, if it runs on the same values."""
    assert scan.transposes is not None
    consts, carries, _ = scan.transposes
    args = args_of(node)
    rows = args[scan.consts + scan.carries :]
    if carries:
        candidates = {x.all_input_nodes[0] for x in rows[:carries] if x.target is operator.getitem}
    else:
        inputs = (*args[:consts], *rows)
        candidates = {user for x in inputs for user in x.users}
    return next((c for c in candidates if _is_primal(c, node, scan)), None)


def _is_primal(candidate: Node, node: Node, scan: Scan) -> bool:
    """Whether a node is the scan with the constants, stacked carries and per-step inputs of a
    transposed scan.
    """
    primal = candidate.target
    if (
        not isinstance(primal, Scan)
        or primal.transposes
        or candidate is node
        or primal.length != scan.length
        or primal.reverse == scan.reverse
    ):
        return False
    assert scan.transposes is not None
    consts, carries, count = scan.transposes
    if (primal.consts, primal.carries) != (consts, carries):
        return False
    if candidate.args[:consts] != node.args[:consts]:
        return False
    rows = args_of(node)[scan.consts + scan.carries :]
    own_rows = candidate.args[consts + carries :]
    return (
        _are_stacked_carries(rows[:carries], primal) and rows[carries : carries + count] == own_rows
    )


def _are_stacked_carries(rows: Sequence[Node], primal: Scan) -> bool:
    """Whether per-step inputs are the carries that entered each step of a scan, in order."""
    graph = primal.graphs[0]
    outs = returned_by(graph)
    holders = graph.find_nodes(op="placeholder")
    entered = holders[primal.consts : primal.consts + primal.carries]
    return all(
        row.target is operator.getitem and outs[args_of(row)[1]] is holder
        for row, holder in zip(rows, entered, strict=True)
    )


def _save_residuals(graph: Graph, primal: Node, node: Node, scan: Scan) -> bool:
    """Have a scan save the residuals of its transpose. Returns whether there are any."""
    body = scan.graphs[0]
    own_inputs = _inputs_of_primal(scan)
    computed = _computed_by_primal(scan, own_inputs)
    residuals = [
        *dict.fromkeys(_base_with_all_elements(n) for n in computed if _is_residual(n, computed))
    ]
    if not residuals:
        return False
    forward = primal.target.graphs[0]
    holders = forward.find_nodes(op="placeholder")
    env = dict(zip(own_inputs, holders, strict=True))
    wider, values = _with_added_results(forward, env, residuals)
    node.args = (*node.args, *_stacked_residuals(graph, primal, node, wider, values))
    node.target = attrs.evolve(
        scan, graphs=(_with_residual_inputs(body, residuals),), transposes=None
    )
    return True


def _inputs_of_primal(scan: Scan) -> list[Node]:
    """The inputs that the body of a transposed scan shares with its scan, in the scan's order."""
    assert scan.transposes is not None
    consts, carries, rows = scan.transposes
    holders = scan.graphs[0].find_nodes(op="placeholder")
    start = scan.consts + scan.carries
    return [*holders[:consts], *holders[start : start + carries + rows]]


def _computed_by_primal(scan: Scan, own_inputs: list[Node]) -> dict[Node, bool]:
    """For the nodes of a transposed scan's body that its scan computes too: whether they depend on
    a per-step input or a carry.
    """
    assert scan.transposes is not None
    consts = scan.transposes[0]
    computed = {x: i >= consts for i, x in enumerate(own_inputs)}
    for n in scan.graphs[0].nodes:
        if (
            n.op == "call_function"
            and n.meta["phase"] == "forward"
            and all(x in computed for x in n.all_input_nodes)
        ):
            computed[n] = any(computed[x] for x in n.all_input_nodes)
    return computed


def _stacked_residuals(
    graph: Graph, primal: Node, node: Node, wider: Graph, values: list[torch.Tensor]
) -> list[Node]:
    """Add outputs to a scan, and read them, stacked, before its transpose.

    Args:
        graph: the graph of the scan and its transpose.
        primal: the scan.
        node: its transpose.
        wider: the scan's body with the added outputs.
        values: the values of the added outputs in one step.
    """
    forward = primal.target
    first = len(graph_outputs(forward.graphs[0]))
    primal.target = attrs.evolve(forward, graphs=(wider,))
    stacked = [x.new_empty((forward.length, *x.shape)) for x in values]
    primal.meta["val"] = [*primal.meta["val"], *stacked]
    items = []
    with graph.inserting_before(node):
        for k, value in enumerate(stacked):
            item = graph.call_function(operator.getitem, (primal, first + k))
            item.meta = {**primal.meta, "val": value}
            items.append(item)
    return items


def _is_residual(n: Node, computed: dict[Node, bool]) -> bool:
    if n.op == "placeholder" or not computed[n] or not isinstance(n.meta.get("val"), torch.Tensor):
        return False
    return not (
        all(user in computed and user.op != "output" for user in n.users) or _is_view_of_input(n)
    )


def _is_view_of_input(n: Node) -> bool:
    """Whether a value costs nothing to recompute."""
    while getattr(n.target, "is_view", False):
        n = n.all_input_nodes[0]
    return n.op == "placeholder"


def _base_with_all_elements(n: Node) -> Node:
    """The value whose elements a value views, all of them, or the value itself. Several views of
    one are saved as one.
    """
    while getattr(n.target, "is_view", False):
        (source,) = n.all_input_nodes
        before, after = source.meta["val"], n.meta["val"]
        if before.numel() != after.numel() or before.dtype != after.dtype:
            return n
        n = source
    return n


def _with_added_results(
    graph: Graph, env: dict[Node, Node], nodes: list[Node]
) -> tuple[Graph, list[torch.Tensor]]:
    """A graph with added results, and their values. They are nodes of another graph on a subset
    of its inputs. Nodes that both graphs have are computed once.

    The dims of added results are permuted so that they are contiguous, since steps are stacked
    and kernels do not check strides.
    """
    fresh = Graph()
    copies = dict[Node, Node]()
    for n in graph.nodes:
        if n.op != "output":
            copies[n] = copy_node(fresh, n, copies)
    added = _copied_once(fresh, {theirs: copies[mine] for theirs, mine in env.items()}, nodes)
    residuals = [_permuted(fresh, added[n], _dims_by_stride(n.meta["val"])) for n in nodes]
    fresh.output([*(copies[x] for x in returned_by(graph)), *residuals])
    return fresh, [x.meta["val"] for x in residuals]


def _copied_once(graph: Graph, env: dict[Node, Node], nodes: list[Node]) -> dict[Node, Node]:
    """Copy some nodes of another graph, with the nodes that they need, unless the graph
    computes them already.

    Args:
        graph: the graph to extend.
        env: inputs of the other graph -> nodes of this one.
        nodes: the nodes of the other graph to copy.

    Returns:
        Nodes of the other graph -> the equal nodes of this one.
    """
    env, available = dict(env), dict[Any, Node]()
    first = dict[Node, Node]()  # of equal nodes, for each
    for n in graph.nodes:
        first[n] = available.setdefault(_equality_key(n, first), n)
    needed = dependencies_of(nodes)
    for n in next(iter(needed)).graph.nodes:
        if n in needed and n not in env:
            copy = copy_node(graph, n, env)
            env[n] = available.setdefault(_equality_key(copy, first), copy)
            if env[n] is not copy:
                graph.erase_node(copy)
    return env


def _dims_by_stride(x: torch.Tensor) -> list[int]:
    """The dims of a tensor from the slowest to the fastest in memory."""
    return sorted(range(x.dim()), key=lambda d: (-x.stride(d), d))


def _permuted(graph: Graph, node: Node, order: list[int]) -> Node:
    """The value with its dims in this order. The value itself if the order is the same."""
    if order == sorted(order):
        return node
    made = graph.call_function(torch.ops.aten.permute.default, (node, order))
    made.meta = {**node.meta, "val": node.meta["val"].permute(order)}
    return made


def _equality_key(node: Node, first: dict[Node, Node]) -> Any:
    """A key that is equal for nodes that compute the same.

    Args:
        node: of a graph.
        first: for its inputs the first nodes that compute the same.
    """
    if node.op != "call_function":
        return node
    given = torch.fx.node.map_arg((node.args, node.kwargs), lambda x: first.get(x, x))
    return node.op, node.target, str(given)


def _with_residual_inputs(body: Graph, residuals: list[Node]) -> Graph:
    """A copy of a transposed body that takes residuals as further inputs, in place of computing
    them.
    """
    fresh = Graph()
    env = dict[Node, Node]()
    for h in body.find_nodes(op="placeholder"):
        env[h] = copy_node(fresh, h, env)
    held = {}
    for n in residuals:
        held[n] = fresh.placeholder(f"kept_{n.name}")
        x = n.meta["val"]
        held[n].meta = {**n.meta, "val": x.new_empty([x.shape[d] for d in _dims_by_stride(x)])}
    for n, holder in held.items():
        order = _dims_by_stride(n.meta["val"])
        env[n] = _permuted(fresh, holder, [order.index(d) for d in range(len(order))])
    for n in body.nodes:
        if n.op == "output":
            fresh.output([env[x] for x in n.args[0]])
        elif n not in env:
            env[n] = copy_node(fresh, n, env)
    remove_unread(fresh)
    return fresh
