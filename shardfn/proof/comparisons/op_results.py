"""The result of one op of a program on global values, and the errors of a run: values that are not
what their op makes of the values that it read.

An error of an op is its own. What it carries on from earlier ones is in both results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any

import attrs
import torch

from ...compile.op_by_op import run_as
from ...errors import ShardError
from ...ops import debug
from ...ops.loops import Loop, drive_loop
from ...ops.nodes import args_of, returned_by
from ...ops.placement import ALIGN, COTANGENT, REDISTRIBUTE
from ...ops.prims import PRIMS
from ...types import MeshPlacements
from .rounding import ALONE, Again, Terms, exceeding, length_of_sums, rounded_anew
from .values_of_ranks import Values

ADD = torch.ops.aten.add.Tensor
IDENTITIES = (REDISTRIBUTE, ALIGN, COTANGENT)
# memory as it is
EMPTY = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_permuted.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)
UNKNOWN = type("Unknown", (), {"__repr__": lambda self: "<unknown>"})()
Environment = Mapping[torch.fx.Node, Any]
Read = Callable[[torch.fx.Node, Any], Any]  # a node and its value -> the value that an op reads


@attrs.frozen(eq=False)
class OfRanks:
    """A value of each rank, inside of a shard_map."""

    locals: Sequence[torch.Tensor]


@attrs.frozen(eq=False)
class OpError:
    """A value that is not what its op makes of the values that it read.

    Args:
        node: of the program.
        kind: "op"; "replicas", where ranks have other replicas; "redistribute", where a collective
            changed it; "argument"; "program", where another program computes something else.
        wanted: the value, as the op makes it of what it read; None where only replicas differ.
        got: the value.
        wrong: the elements that differ, as a mask.
        ranks: that have other replicas, or hold such elements.
        marks: the placements of the value, and those before a redistribution.
        before: the placements before a redistribution.
        step: of the plan, for a redistribution.
    """

    node: torch.fx.Node
    kind: str
    wanted: torch.Tensor | None
    got: torch.Tensor
    wrong: torch.Tensor
    ranks: tuple[int, ...]
    marks: MeshPlacements
    before: MeshPlacements = ()
    step: Any = None


def result_of(node: torch.fx.Node, env: Environment, read: Read | None = None) -> Any:
    """Run the op of a node on global values.

    Args:
        node: of a program.
        env: the value of each node before it.
        read: changes a value before the op reads it.

    Returns:
        Its result; `OfRanks` inside of a shard_map; UNKNOWN where the op runs on ranks alone, or
        reads an unknown value.
    """
    reads = node.all_input_nodes
    if any(env.get(x, UNKNOWN) is UNKNOWN for x in reads) or node.target in PRIMS:
        return UNKNOWN
    if node.target in EMPTY or (debug.has_effect(node) and not isinstance(node.target, Loop)):
        return UNKNOWN
    values = {x: env[x] if read is None else read(x, env[x]) for x in reads}
    counts = {len(x.locals) for x in values.values() if isinstance(x, OfRanks)}
    if not counts:
        return _run(node, values)
    (count,) = counts
    rows = [_run(node, {k: _of_rank(x, r) for k, x in values.items()}) for r in range(count)]
    return UNKNOWN if any(x is UNKNOWN for x in rows) else OfRanks(rows)


def _of_rank(x: Any, rank: int) -> Any:
    return x.locals[rank] if isinstance(x, OfRanks) else x


def _run(node: torch.fx.Node, values: Environment) -> Any:
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    if node.target in IDENTITIES:
        return args[0]
    try:
        with torch.no_grad():
            if isinstance(node.target, Loop):
                return _looped(node.target, args)
            return run_as(node.target)(*args, **kwargs)
    except (RuntimeError, NotImplementedError, ShardError):
        return UNKNOWN  # an op that only a rank's program has a kernel for


def _looped(loop: Loop, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return drive_loop(loop, tensors, lambda which, ins: run_graph(loop.graphs[which], ins))


def run_graph(graph: torch.fx.Graph, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a graph of global values, the body of a loop.

    Raises:
        RuntimeError: an op of it runs on ranks alone.
    """
    env: dict[torch.fx.Node, Any] = dict(
        zip(graph.find_nodes(op="placeholder"), inputs, strict=True)
    )
    for node in graph.nodes:
        if node.op == "call_function":
            env[node] = result_of(node, env)
    results = [env[x] for x in returned_by(graph)]
    if any(x is UNKNOWN for x in results):
        raise RuntimeError("the body of a loop contains an op that only ranks can run")
    return results


def op_of(node: torch.fx.Node) -> torch.fx.Node:
    """Return the node of the op of whose results a node is one."""
    return args_of(node)[0] if node.target is getitem else node


def again_of(
    node: torch.fx.Node,
    env: Environment,
    coarse: torch.dtype | None = None,
    read: Read | None = None,
) -> Again:
    """Build the function that runs the op of a node on inputs that are rounded anew by a seed, or
    as they are without one.
    """
    op = op_of(node)

    def moved(seed: int | None, x: torch.fx.Node, value: Any) -> Any:
        value = value if read is None else read(x, value)
        if isinstance(value, torch.Tensor) and seed is not None:
            return rounded_anew(value, seed, coarse)
        return value

    def again(seed: int | None) -> Any:
        result = result_of(op, env, functools.partial(moved, seed))
        if op is node or result is UNKNOWN:
            return result
        return result[args_of(node)[1]]

    return again


def length_of(node: torch.fx.Node, out: torch.Tensor) -> int:
    """Estimate the number of terms in the sums of the op of a node."""
    op = op_of(node)
    ins = [x.meta["val"] for x in op.all_input_nodes]
    tensors = [x for x in ins if isinstance(x, torch.Tensor)]
    return length_of_sums(op.target, tensors, out)


def ops_in(node: torch.fx.Node) -> int:
    """Count the ops that a node runs: those of a loop, as often as it runs them."""
    if node.op != "call_function" or node.target is getitem:
        return 0
    if not isinstance(node.target, Loop):
        return 1
    times = getattr(node.target, "length", 1)
    inner = (x for graph in node.target.graphs for x in graph.nodes)
    return times * sum(ops_in(x) for x in inner)


def errors_of(values: Values) -> list[OpError]:
    """Run each op of a program on the values that a run had, and list the values of the run that
    differ from its results by more than rounding, in order.
    """
    errors: list[OpError] = []
    env: dict[torch.fx.Node, Any] = {}
    sums: dict[torch.fx.Node, Terms] = {}  # that the run left to a later one
    hidden: dict[torch.fx.Node, int] = {}  # how many ops since values that the run has
    changed = {x.node: x for x in reversed(values.redistributed)}
    alone = not values.axes.names
    for node in values.program.graph.graph.nodes:
        if node.op == "output":
            break
        hidden[node] = ops_in(node) + sum(hidden[x] for x in node.all_input_nodes)
        first = values.first.get(node)
        is_judged = first is not None and not alone
        computed = UNKNOWN
        if node.op == "call_function" and (is_judged or first is None):
            computed = result_of(node, env)
        if first is None:
            own = values.locals.get(node)
            env[node] = computed if own is None else OfRanks(own)
            if node.target is ADD and isinstance(computed, torch.Tensor):
                sums[node] = _terms_of(node, env, sums, values)
            continue
        if is_judged:
            is_longer = any(x in sums for x in node.all_input_nodes)
            terms = _terms_of(node, env, sums, values) if is_longer else ALONE
            unseen = hidden[node] - 1 if hidden[node] > 1 else 0
            error = _own_error(values, node, computed, env, terms, unseen)
            if error is not None:
                errors.append(error)
            elif node in changed:
                errors.append(_changed(values, node, changed[node]))
        env[node] = values.read[node]
        hidden[node] = 0
    return errors


def _terms_of(
    node: torch.fx.Node, env: Environment, sums: Mapping[torch.fx.Node, Terms], values: Values
) -> Terms:
    """The terms of a sum of sums, which a run may add in another order."""
    magnitude: Any = 0
    count = 0
    for x in node.all_input_nodes:
        known, value = sums.get(x), env[x]
        if known is None and x in values.first and values.first[x].magnitude is not None:
            known = values.first[x].terms
        if known is not None:
            magnitude, count = magnitude + known.magnitude, count + known.count
        elif isinstance(value, torch.Tensor):
            magnitude, count = magnitude + value.abs(), count + 1
    return Terms(magnitude, count)


def _own_error(
    values: Values, node: torch.fx.Node, computed: Any, env: Environment, sums: Terms, unseen: int
) -> Any:
    first = values.first[node]
    marks = first.slot.placements
    got = first.value
    if first.unequal:
        kind = "argument" if node.op == "placeholder" else "replicas"
        wanted = computed if isinstance(computed, torch.Tensor) else None
        wrong = torch.zeros(got.shape, dtype=torch.bool)
        return OpError(node, kind, wanted, got, wrong, first.unequal, marks)
    if not isinstance(computed, torch.Tensor):
        return None
    if computed.shape != got.shape or computed.is_floating_point() != got.is_floating_point():
        return None
    got = got.to(computed.dtype)  # a Partial sum may be kept in a wider dtype
    mask = exceeding(
        computed,
        got,
        length=length_of(node, got),
        terms=first.terms.with_more(sums),
        unseen=unseen,
        again=again_of(node, env),
    )
    if mask is None:
        return None
    ranks = values.ranks_of(mask, marks)
    return OpError(node, "op", computed, got, mask, ranks, marks)


def _changed(values: Values, node: torch.fx.Node, changed: Any) -> OpError:
    marks = changed.after.slot.placements
    ranks = changed.after.unequal or values.ranks_of(changed.wrong, marks)
    before, after = changed.before, changed.after
    return OpError(
        node,
        "redistribute",
        before.value,
        after.value,
        changed.wrong,
        ranks,
        marks,
        before.slot.placements,
        changed.step,
    )
