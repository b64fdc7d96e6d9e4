"""Loops without what nobody reads, and with what a transposed loop needs kept rather than
computed again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch

from ...ops.loops import Branch, Scan, results


def simplify(graph: torch.fx.Graph) -> None:
    """Trim the loops of a graph, have scans keep what their transposes read, and trim again."""
    trim(graph)
    if keep_residuals(graph):
        trim(graph)


def trim(graph: torch.fx.Graph) -> None:
    """Take away results of loops that nobody reads, and what only they need."""
    graph.eliminate_dead_code()
    for node in reversed(
        list(graph.nodes)
    ):  # a loop that is trimmed may leave another's results unread
        if isinstance(node.target, (Scan, Branch)):
            used = {user.args[1] for user in node.users}
            TRIM[type(node.target)](graph, node, node.target, used)
            graph.eliminate_dead_code()


def _trim_scan(
    graph: torch.fx.Graph, node: torch.fx.Node, scan: Scan, used: set[int]
) -> None:
    body = scan.graphs[0]
    holders, (output,) = (
        body.find_nodes(op="placeholder"),
        body.find_nodes(op="output"),
    )
    live = set(used)
    while True:  # a carry lives if it is read in a run that makes something live
        reached = _reached(output.args[0][k] for k in live)
        more = {
            k for k in range(scan.carries) if holders[scan.consts + k] in reached
        } - live
        if not more:
            break
        live |= more
    ins = [
        i
        for i, h in enumerate(holders)
        if (i - scan.consts in live if _is_carry(scan, i) else h in reached)
    ]
    if scan.transposes and len(ins) < len(
        holders
    ):  # what it transposes is told by position: all of it stays
        ins = sorted({*ins, *range(scan.consts), *_rows_of_primal(scan)})
    count = lambda low, high: sum(low <= i < high for i in ins)
    made = attrs.evolve(
        scan,
        graphs=(_cut(body, ins, sorted(live)),),
        consts=count(0, scan.consts),
        carries=count(scan.consts, scan.consts + scan.carries),
    )
    _swap(graph, node, made, [node.args[i] for i in ins], sorted(live))


def _rows_of_primal(scan: Scan) -> range:
    start = scan.consts + scan.carries
    assert scan.transposes is not None
    return range(start, start + sum(scan.transposes[1:]))


def _is_carry(scan: Scan, i: int) -> bool:
    return scan.consts <= i < scan.consts + scan.carries


def _trim_branch(
    graph: torch.fx.Graph, node: torch.fx.Node, branch: Branch, used: set[int]
) -> None:
    reached = [
        _reached(g.find_nodes(op="output")[0].args[0][k] for k in used)
        for g in branch.graphs
    ]
    ins = [
        i
        for i in range(branch.consts)
        if any(
            g.find_nodes(op="placeholder")[i] in seen
            for g, seen in zip(branch.graphs, reached, strict=True)
        )
    ]
    made = attrs.evolve(
        branch,
        graphs=tuple(_cut(g, ins, sorted(used)) for g in branch.graphs),
        consts=len(ins),
    )
    _swap(
        graph,
        node,
        made,
        [*(node.args[i] for i in ins), node.args[-1]],
        sorted(used),
    )


TRIM: dict[type, Callable[..., None]] = {Scan: _trim_scan, Branch: _trim_branch}


def _reached(roots: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
    """Every node that some result depends on."""
    seen, queue = set(), list(roots)
    while queue:
        node = queue.pop()
        if node not in seen:
            seen.add(node)
            queue += node.all_input_nodes
    return seen


def _cut(body: torch.fx.Graph, ins: list[int], outs: list[int]) -> torch.fx.Graph:
    """A copy of a graph with some of its inputs and results."""
    fresh, env = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
    (output,) = body.find_nodes(op="output")
    wanted = [output.args[0][k] for k in outs]
    reached, holders = _reached(wanted), body.find_nodes(op="placeholder")
    kept = {holders[i] for i in ins}
    for node in body.nodes:
        if node in kept or (node in reached and node.op != "placeholder"):
            env[node] = copy_node(fresh, node, env)
    fresh.output([env[x] for x in wanted])
    return fresh


def copy_node(
    graph: torch.fx.Graph,
    node: torch.fx.Node,
    env: dict[torch.fx.Node, torch.fx.Node],
) -> torch.fx.Node:
    """A node in another graph, with its metadata."""
    made = graph.node_copy(node, env.__getitem__)
    made.meta = dict(node.meta)
    return made


def _swap(
    graph: torch.fx.Graph,
    node: torch.fx.Node,
    loop: Any,
    args: list[torch.fx.Node],
    outs: list[int],
) -> None:
    """Put a loop in the place of another; `outs` says which of the old one's results each of
    its results is.
    """
    node.target, node.args = loop, tuple(args)
    node.meta["val"] = [node.meta["val"][k] for k in outs]
    at = {old: new for new, old in enumerate(outs)}
    for user in list(node.users):
        if user.target is operator.getitem:
            user.args = (node, at[user.args[1]])


def keep_residuals(graph: torch.fx.Graph) -> bool:
    """Have each scan keep what its transpose would compute again, row by row; whether any does.

    The transpose's graph starts with the scan's own, on the carries that entered each run. What
    of it the rest reads becomes another result of the scan and another row of the transpose.
    Views do not, nor what a checkpoint has computed again, which is of the backward.
    """
    found = False
    for node in list(graph.nodes):
        if (
            isinstance(node.target, Scan)
            and node.target.transposes
            and (primal := _primal_of(node, node.target))
        ):
            found = _keep(graph, primal, node, node.target) or found
    return found


def _primal_of(node: torch.fx.Node, scan: Scan) -> torch.fx.Node | None:
    """The scan that a transposed one belongs to, if it runs on the very same values."""
    assert scan.transposes is not None
    consts, carries, count = scan.transposes
    rows = node.args[scan.consts + scan.carries :]
    if carries:
        sources = {
            x.all_input_nodes[0]
            for x in rows[:carries]
            if x.target is operator.getitem
        }
    else:
        sources = {user for x in (*node.args[:consts], *rows) for user in x.users}
    for source in sources:
        loop = source.target
        if (
            not isinstance(loop, Scan)
            or loop.transposes
            or source is node
            or loop.length != scan.length
            or loop.reverse == scan.reverse
        ):
            continue
        own = source.args[loop.consts + loop.carries :]
        if (loop.consts, loop.carries) != (consts, carries):
            continue
        if source.args[:consts] != node.args[:consts]:
            continue
        outs = loop.graphs[0].find_nodes(op="output")[0].args[0]
        entered = loop.graphs[0].find_nodes(op="placeholder")[
            loop.consts : loop.consts + loop.carries
        ]
        stacked = all(
            x.target is operator.getitem and outs[x.args[1]] is h
            for x, h in zip(rows[:carries], entered, strict=True)
        )
        if stacked and rows[carries : carries + count] == own:
            return source
    return None


def _keep(
    graph: torch.fx.Graph, primal: torch.fx.Node, node: torch.fx.Node, scan: Scan
) -> bool:
    forward, body = primal.target, scan.graphs[0]
    assert scan.transposes is not None
    consts, carries, rows = scan.transposes
    holders = body.find_nodes(op="placeholder")
    start = scan.consts + scan.carries
    mine = [
        *holders[:consts],
        *holders[start : start + carries + rows],
    ]  # the scan's own inputs, in its order
    known = {
        h: i >= consts for i, h in enumerate(mine)
    }  # what the scan itself computes -> whether a row or a carry is in it
    for n in body.nodes:
        if (
            n.op == "call_function"
            and n.meta["phase"] == "forward"
            and all(x in known for x in n.all_input_nodes)
        ):
            known[n] = any(known[x] for x in n.all_input_nodes)
    residuals = [n for n in known if _is_kept(n, known)]
    if not residuals:
        return False
    wider, places = _widened(
        forward.graphs[0],
        dict(
            zip(mine, forward.graphs[0].find_nodes(op="placeholder"), strict=True)
        ),
        residuals,
    )
    first = len(results(forward.graphs[0]))
    primal.target = attrs.evolve(forward, graphs=(wider,))
    stacked = [x.new_empty((forward.length, *x.shape)) for x in places]
    primal.meta["val"] = [*primal.meta["val"], *stacked]
    with graph.inserting_before(node):
        for k, value in enumerate(stacked):
            made = graph.call_function(operator.getitem, (primal, first + k))
            made.meta = {**primal.meta, "val": value}
            node.args = (*node.args, made)
    node.target = attrs.evolve(
        scan, graphs=(_reading(body, residuals),), transposes=None
    )
    return True


def _is_kept(n: torch.fx.Node, known: dict[torch.fx.Node, bool]) -> bool:
    if (
        n.op == "placeholder"
        or not known[n]
        or not isinstance(n.meta.get("val"), torch.Tensor)
    ):
        return False
    return not (
        all(user in known and user.op != "output" for user in n.users)
        or _is_view_of_input(n)
    )


def _is_view_of_input(n: torch.fx.Node) -> bool:
    """Whether a value costs nothing to make again."""
    while getattr(n.target, "is_view", False):
        n = n.all_input_nodes[0]
    return n.op == "placeholder"


def _widened(
    graph: torch.fx.Graph,
    env: dict[torch.fx.Node, torch.fx.Node],
    wanted: list[torch.fx.Node],
) -> tuple[torch.fx.Graph, list[torch.Tensor]]:
    """A graph with more results, and those: values of another graph whose inputs are some of
    its own; what it has, it computes once.

    They are turned so that their memory is in order: rows are stacked, and kernels read strides
    blindly.
    """
    fresh, inner = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
    have: dict[Any, torch.fx.Node] = {}
    for n in graph.nodes:
        if n.op == "output":
            break
        inner[n] = copy_node(fresh, n, inner)
        have.setdefault(_key(inner[n]), inner[n])
    env = {theirs: inner[mine] for theirs, mine in env.items()}
    needed = _reached(wanted)
    for n in next(iter(needed)).graph.nodes:
        if n in needed and n not in env:
            made = copy_node(fresh, n, env)
            env[n] = have.setdefault(_key(made), made)
            if env[n] is not made:
                fresh.erase_node(made)
    places = [_turned(fresh, env[n], _order(n.meta["val"])) for n in wanted]
    (output,) = graph.find_nodes(op="output")
    fresh.output([*(inner[x] for x in output.args[0]), *places])
    return fresh, [x.meta["val"] for x in places]


def _order(x: torch.Tensor) -> list[int]:
    """The dims of a tensor from the slowest to the fastest in memory."""
    return sorted(range(x.dim()), key=lambda d: (-x.stride(d), d))


def _turned(
    graph: torch.fx.Graph, node: torch.fx.Node, order: list[int]
) -> torch.fx.Node:
    """A value with its dims in another order; itself, if that is the one it has."""
    if order == sorted(order):
        return node
    made = graph.call_function(torch.ops.aten.permute.default, (node, order))
    made.meta = {**node.meta, "val": node.meta["val"].permute(order)}
    return made


def _key(node: torch.fx.Node) -> Any:
    """What two nodes share that compute the same."""
    return (
        (node.op, node.target, str(node.args), str(node.kwargs))
        if node.op == "call_function"
        else node
    )


def _reading(
    body: torch.fx.Graph, residuals: list[torch.fx.Node]
) -> torch.fx.Graph:
    """A copy of a graph that is given some of its values, after its other inputs."""
    fresh, env = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
    for h in body.find_nodes(op="placeholder"):
        env[h] = copy_node(fresh, h, env)
    held = {}
    for n in residuals:
        held[n] = fresh.placeholder(f"kept_{n.name}")
        x = n.meta["val"]
        held[n].meta = {
            **n.meta,
            "val": x.new_empty([x.shape[d] for d in _order(x)]),
        }
    for n, holder in held.items():
        order = _order(n.meta["val"])
        env[n] = _turned(fresh, holder, [order.index(d) for d in range(len(order))])
    for n in body.nodes:
        if n.op == "output":
            fresh.output([env[x] for x in n.args[0]])
        elif n not in env:
            env[n] = copy_node(fresh, n, env)
    fresh.eliminate_dead_code()
    return fresh
