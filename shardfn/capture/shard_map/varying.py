"""Which values of per-rank code vary over a mesh axis, and which are invariant.

This reads Dynamo's graph once, before any derivative is taken. If an op mixes varying and
invariant values, the invariant ones pass through the prim `vary`, once for each value. Its
transpose is the sum over the ranks. So the gradient of an invariant value is summed over the
ranks, and the transpose of a sum sends nothing. (JAX's varying manual axes.)

A carry of a loop varies over the same axes in every step, and so does a result in both branches.
A closed-over value that must vary is made varying outside of the body, so that its gradient is
summed once, after the loop.

A function with a rule of the user's (custom_vjp, custom_jvp, an autograd.Function that
communicates) is an op if it has no collective inside: if any of its values varies over an axis, all
do. With collectives, its code says itself what ranks add up. So an argument stays invariant where
the backward gives an invariant cotangent. And a result varies where the backward reduces its
cotangent over ranks: each has a term of it then. In the code of one rank under `jit` every result
varies, so the backward takes each rank's own cotangent, as in eager torch.

The file goes from the pass over one graph to the rules: of prims, of loops and branches, of
functions with rules. Each rule is entered in its table right after its functions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch

from ...errors import CaptureError, PlacementError
from ...mesh import axes_of
from ...ops import placement, shard_map
from ...ops.nodes import args_of, returned_by
from ...ops.prims import CALLS, Axes, constants_of, implement
from ...ops.text_formats import parse_axes, parse_shards, print_axes
from .. import annotations as sources
from ..control_flow import bodies, control_flow_ops
from ..dtensors.mixed_ops import refuse_varying
from ..dtensors.uneven_shards import DIFFERS, differs_error
from ..dynamo_nodes import (
    BACKWARD,
    PLUMBING,
    REQUIRES_GRAD,
    VIEWS,
    children_of,
    graphs_of,
    is_size,
    is_wrap,
    name_of,
    nodes_in,
    root_of,
    statistics_of,
    written_by,
)
from . import per_sample_gradients
from .axis_names import current_scope
from .overwritten_tensors import refuse_overwritten
from .varying_facts import (
    CERTAIN,
    CONTRADICTED,
    DIFFERENTIABLE,
    EQUAL,
    NONE,
    SUMMED,
    UNDECIDED,
    Fact,
    Facts,
    axes_in,
    facts_after_meeting,
    facts_over,
    joint_facts,
    local_tensor_facts,
    needed_facts,
    prim_needs,
    prim_result_facts,
    reasons_to_vary,
)

# what torch.func calls of a value of which it takes a derivative
DIFFERENTIATED = ("_wrap_for_grad", REQUIRES_GRAD)


def make_varying(python: torch.fx.GraphModule, name: str) -> None:
    """Have all arguments of each op of Dynamo's graph vary over the same axes. Changes the
    graph in place.

    Args:
        python: Dynamo's graph.
        name: of the function, for errors.

    Raises:
        PlacementError: a varying result is declared invariant.
        CaptureError: a collective inside a branch or a loop.
    """
    if any(node.target in CALLS for graph in graphs_of(python) for node in graph.nodes):
        _refuse_in_higher_order_ops(python, name)
        VaryingAxes(python).rewrite_graph([])


def _refuse_in_higher_order_ops(module: torch.fx.GraphModule, name: str) -> None:
    """Refuse collectives in a higher-order op of torch: ranks may call them unequally often."""
    for node in module.graph.nodes:
        for child in children_of(module, node):
            if is_wrap(node):
                _refuse_in_higher_order_ops(child, name)
                continue
            inside = [n for graph in graphs_of(child) for n in graph.nodes if n.target in CALLS]
            if inside:
                raise CaptureError.of(
                    name,
                    f"the function calls {inside[0].target.__name__} inside the op {node.target}",
                    fix="call the collective before or after the op, or use a Python loop",
                    source=sources.user_line(inside[0]),
                )


class VaryingAxes:
    """The facts of each value of one graph. A node of several values has a list of them.

    Args:
        module: Dynamo's graph of the function, or of a body.
        results: in a body, the facts that its control-flow op wants of its results.
    """

    def __init__(self, module: torch.fx.GraphModule, results: Sequence[Facts] = ()) -> None:
        self.module, self.graph, self.results = module, module.graph, results
        self.known: dict[torch.fx.Node, Any] = {}
        self.written = {root_of(x) for node in self.graph.nodes for x in written_by(node)}
        # for values written in place: the facts that they must have from their creation on
        self.at_creation: dict[torch.fx.Node, Facts] = {}
        # the values that some op needs as varying
        self.needed: set[torch.fx.Node] = set()
        self.varied: dict[Any, torch.fx.Node] = {}
        # for each control-flow op, before any body is changed
        self.agreements: dict[torch.fx.Node, Agreement] = {}

    def rewrite_graph(self, inputs: Sequence[Facts]) -> None:
        """Infer the facts of all values, then make values vary where ops need it."""
        self.infer(inputs)
        refuse_varying(self.graph, self.axes)
        refuse_overwritten(self.graph, self.axes)
        for node in self.record_needs():
            self.rewrite(node)
        for node, facts in self.at_creation.items():
            self.vary_at_creation(node, facts)

    def record_needs(self) -> list[torch.fx.Node]:
        """Record the values that some op needs as varying. Returns the ops."""
        calls = [node for node in self.graph.nodes if node.op in ("call_function", "call_method")]
        for node in calls:
            needs = self.needs(node)
            inputs = nodes_in((node.args, node.kwargs))
            self.needed.update(x for x in inputs if reasons_to_vary(self.facts(x), needs))
        return calls

    def infer(self, inputs: Sequence[Facts]) -> Any:
        """Infer the facts of all values from those of the inputs. Returns those of the results."""
        while self.infer_once(inputs):
            pass
        returned = returned_by(self.graph)
        if isinstance(returned, (list, tuple)):
            return [self.facts(x) for x in returned]
        return self.facts(returned)

    def infer_once(self, inputs: Sequence[Facts]) -> bool:
        """Go over the graph once. Returns whether a value that is written in place needs more
        facts at its creation than before.
        """
        feed = iter(inputs)
        before = dict(self.at_creation)
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self.known[node] = facts_after_meeting(
                    next(feed, NONE), self.at_creation.get(node, NONE)
                )
            elif node.op in ("call_function", "call_method"):
                result = self.result_facts(node)
                if node in self.at_creation and isinstance(result, frozenset):
                    result = facts_after_meeting(result, self.at_creation[node])
                self.known[node] = result
                self._note_writes(node)
        return before != self.at_creation

    def _note_writes(self, node: torch.fx.Node) -> None:
        """Note what an op needs of values that are written in place."""
        needs = self.needs(node)
        for x in nodes_in((node.args, node.kwargs)) if needs else ():
            root = root_of(x)
            missing = reasons_to_vary(self.facts(x), needs)
            if root in self.written and missing:
                is_written = root in map(root_of, written_by(node))
                is_for_certain = is_written or CONTRADICTED in missing
                more = needs if is_for_certain else axes_in(needs)
                self.at_creation[root] = self.at_creation.get(root, NONE) | more

    def axes(self, x: Any) -> Axes:
        """All axes over which any part of an argument varies."""
        return axes_in(self.facts(x))

    def facts(self, x: Any) -> Facts:
        """The facts of all parts of an argument, the axes over which it varies among them."""
        nodes = [x] if isinstance(x, torch.fx.Node) else nodes_in(x)
        return NONE.union(*(_union(self.known.get(n, NONE)) for n in nodes))

    def result_facts(self, node: torch.fx.Node) -> Any:
        """The facts of a node's result."""
        target = node.target
        args = args_of(node)
        if is_size(node):
            return NONE
        if control_flow_ops.is_control_flow(node):
            return _control_flow_facts(self, node)
        if target in CALLS:
            return _prim_facts(self, node)
        if target is placement.align:
            return [self.facts(pair) for pair in zip(args[0], args[1], strict=True)]
        if name_of(node) in BACKWARD:
            every = [self.axes(x) for x in args[1]]
            return [axes | facts_over(CERTAIN, axes) | {DIFFERENTIABLE} for axes in every]
        if target is placement.forbid_writes:
            return local_tensor_facts(node, self.facts(args))
        if name_of(node) in DIFFERENTIATED:
            return self.facts(args) | {DIFFERENTIABLE}
        if self.is_one_of_several(node) and isinstance(args[1], int):
            return self.known[args[0]][args[1]]
        if self.passes_values_on(node):
            return self.facts((args, node.kwargs))
        return joint_facts(*map(self.facts, nodes_in((args, node.kwargs))), _differing(node))

    def needs(self, node: torch.fx.Node) -> Facts:
        """The facts that all inputs of a node must have."""
        if node.target in CALLS:
            return prim_needs(node)
        if control_flow_ops.is_control_flow(node) or self.passes_values_on(node):
            return NONE
        return needed_facts(self.facts((node.args, node.kwargs)) | _differing(node))

    def passes_values_on(self, node: torch.fx.Node) -> bool:
        """Whether a node computes nothing, so that its inputs need not vary over the same axes."""
        if node.target is placement.align or name_of(node) in (*BACKWARD, *PLUMBING):
            return True
        return self.is_one_of_several(node)

    def is_one_of_several(self, node: torch.fx.Node) -> bool:
        """Whether a node selects one of the values of a node that has several."""
        is_item = node.target is operator.getitem
        return is_item and isinstance(self.known.get(args_of(node)[0]), list)

    def rewrite(self, node: torch.fx.Node) -> None:
        """Make the inputs of a node vary over the axes that it needs."""
        if control_flow_ops.is_control_flow(node):
            _rewrite_control_flow(self, node)
        elif name_of(node) in BACKWARD:
            self.match_cotangents(node)
        elif node.target is shard_map.as_invariant:
            self.narrow_as_invariant(node)
        elif needs := self.needs(node):
            self.refuse_statistics(node, axes_in(needs))
            self.refuse_write(node)
            before = self.facts((node.args, node.kwargs))
            is_result = node.kwargs.get("where") == shard_map.RESULT
            node.args, node.kwargs = torch.fx.node.map_arg(
                (node.args, node.kwargs), lambda x: self.vary(x, needs, is_result=is_result)
            )
            if missing := node.meta.get(DIFFERS, NONE) - before:
                self.vary_in_value(node, missing)

    def refuse_statistics(self, node: torch.fx.Node, axes: Axes) -> None:
        """Refuse running statistics of a rank that would be lost in a value of all ranks.

        Raises:
            CaptureError: naming the op.
        """
        if any(axes - self.facts(x) for x in statistics_of(node)):
            raise CaptureError.of(
                "shard_map",
                f"{name_of(node)} writes one rank's statistics to a buffer that all ranks share",
                fix="use sf.shard, which computes statistics over all ranks, or call module.eval()",
                source=sources.user_line(node),
            )

    def refuse_write(self, node: torch.fx.Node) -> None:
        """Refuse a write in place that would make an invariant value differ between ranks.

        Raises:
            CaptureError: naming the op.
        """
        axes = node.meta.get(DIFFERS, NONE)
        roots = [root_of(x) for x in written_by(node)]
        others = [x for x in node.all_input_nodes if root_of(x) not in roots]
        created = [self.result_facts(x) for x in roots if x.op != "placeholder"]
        if roots and axes - self.facts(others) - NONE.union(*map(_union, created)):
            raise differs_error("jit", node, "a write to a value that is equal on all ranks")

    def vary_in_value(self, node: torch.fx.Node, axes: Axes) -> None:
        """Insert `vary_in_value` after a node whose constants differ between ranks."""
        is_one = isinstance(node.meta.get("example_value"), torch.Tensor)
        text = print_axes(sorted(axes))
        for x in [node] if is_one else list(node.users):
            readers = list(x.users)
            varied = self.insert_after(x, shard_map.vary_in_value, (x, text))
            self.known[varied] = self.facts(x)
            for reader in readers:
                reader.replace_input_with(x, varied)

    def narrow_as_invariant(self, node: torch.fx.Node) -> None:
        """Restrict `as_invariant` to the axes over which its argument varies: its derivative
        differs for the others.
        """
        x, text = args_of(node)
        facts = self.facts(x)
        varying = [a for a in parse_axes(text) if a in facts]
        summed = [a for a in varying if Fact(SUMMED, a) in facts]
        if summed:
            with self.graph.inserting_before(node):  # x may have been written to
                x = self.graph.call_function(shard_map.undecided, _undecided(x, summed, SUMMED))
            x.meta = dict(node.meta)
        if varying:
            node.args = x, print_axes(varying)
        else:
            node.replace_all_uses_with(x)

    def match_cotangents(self, node: torch.fx.Node) -> None:
        """Give each differentiated value and its cotangent the same varying axes."""
        outs, ins, *rest = args_of(node)
        per_sample_gradients.warn_of_sums(node, self.axes(list(outs)), self.axes)
        cotangents = rest[0] if rest and rest[0] is not None else [None] * len(outs)
        needs = [self.facts(pair) for pair in zip(outs, cotangents, strict=True)]
        varied = type(outs)(map(self.vary, outs, needs))
        if rest and rest[0]:
            pairs = zip(cotangents, needs, strict=True)
            rest[0] = [g if g is None else self.vary(g, axes) for g, axes in pairs]
        node.args = (varied, ins, *rest)

    def vary(self, x: torch.fx.Node, needs: Facts, *, is_result: bool = False) -> torch.fx.Node:
        """The value, made to vary as the others of an op. It is made once, right after the value.

        Args:
            x: the value.
            needs: the facts that the op needs of it.
            is_result: whether it enters no op, and only leaves the function.
        """
        facts = self.facts(x)
        if is_result:  # whoever gives its cotangent gives that of each rank
            unsaid = facts & facts_over(UNDECIDED, axes_in(needs))
            facts = facts - unsaid | facts_over(EQUAL, frozenset(fact.axis for fact in unsaid))
        reasons = reasons_to_vary(facts, needs)
        is_constant = x.op == "get_attr" or is_size(x)
        if not reasons or isinstance(self.known.get(x), list) or is_constant:
            return x
        key = x, tuple(reasons.items())
        if key not in self.varied:
            base = x.args[0] if x.args else None
            is_of_one = isinstance(base, torch.fx.Node) and (
                reasons_to_vary(self.facts(base), needs) == reasons
            )
            if is_of_one and not is_result and self.is_view_of_needed(x):
                args = (self.vary(args_of(x)[0], needs), *x.args[1:])
                varied = self.insert_after(x, x.target, args, dict(x.kwargs), x.op)
            else:
                varied = self.insert_prims(x, reasons)
            self.varied[key] = varied
            self.known[varied] = facts_after_meeting(facts, needs)
        return self.varied[key]

    def insert_prims(self, x: torch.fx.Node, reasons: dict[str, Axes]) -> torch.fx.Node:
        """Insert the prims that make a value vary, for each reason (`reasons_to_vary`)."""
        for why, axes in reasons.items():
            if why != CONTRADICTED:
                prim = shard_map.vary_equal if why == EQUAL else shard_map.vary
                x = self.insert_after(x, prim, (x, print_axes(sorted(axes))))
            if why in (UNDECIDED, CONTRADICTED):
                x = self.insert_after(x, shard_map.undecided, _undecided(x, sorted(axes), why))
        return x

    def is_view_of_needed(self, x: torch.fx.Node) -> bool:
        """Whether a value is a view of a value that is itself needed as varying, or contains
        all of one. Then one sum suffices.
        """
        if name_of(x) not in VIEWS or root_of(x) in self.written or not x.args:
            return False
        base = x.args[0]
        if not isinstance(base, torch.fx.Node) or isinstance(self.known.get(base), list):
            return False
        view, whole = (n.meta.get("example_value") for n in (x, base))
        if not isinstance(view, torch.Tensor) or not isinstance(whole, torch.Tensor):
            return False
        return base in self.needed or view.numel() == whole.numel()

    def insert_after(
        self,
        x: torch.fx.Node,
        target: Any,
        args: Any,
        kwargs: Any = None,
        op: str = "call_function",
    ) -> torch.fx.Node:
        """Insert a call right after the creation of a value, inside the same transforms."""
        place = next((user for user in x.users if name_of(user) == REQUIRES_GRAD), x)
        if x.op == "placeholder":
            place = self.graph.find_nodes(op="placeholder")[-1]
        with self.graph.inserting_after(place):
            node = self.graph.create_node(op, target, args, kwargs or {})
        node.meta = dict(x.meta)
        return node

    def vary_at_creation(self, node: torch.fx.Node, needs: Facts) -> None:
        """Make a value that is written in place vary from its creation on, if it ever does."""
        facts = NONE
        if node.op != "placeholder":
            is_prim = node.target in CALLS
            facts = _prim_facts(self, node) if is_prim else self.facts(node.args)
        reasons = reasons_to_vary(facts, needs)
        if not reasons:
            return
        is_one = not isinstance(self.known.get(node), list)
        for x in [node] if is_one else list(node.users):
            readers = list(x.users)
            varied = self.insert_prims(x, reasons)
            for reader in readers:
                if name_of(reader) != REQUIRES_GRAD:
                    reader.replace_input_with(x, varied)


def _undecided(x: torch.fx.Node, axes: Sequence[str], why: str) -> tuple[Any, ...]:
    """The arguments of the prim `undecided`, of a value whose gradient is refused."""
    return x, print_axes(axes), why, sources.user_line(x) or ""


def _differing(node: torch.fx.Node) -> Facts:
    """The facts of a node whose constants differ between ranks."""
    axes = node.meta.get(DIFFERS, NONE)
    return axes | facts_over(CERTAIN, axes)


def _union(facts: Any) -> Facts:
    """The facts of a node, of all its values if it has several."""
    return NONE.union(*facts) if isinstance(facts, list) else facts


# prims


def _prim_facts(values: VaryingAxes, node: torch.fx.Node) -> Facts:
    """The facts of the result of a prim, whose arguments are checked."""
    before = values.facts(node.args)
    check = CALLS[node.target].check
    if check is not None:
        check(before, node)
    return prim_result_facts(node, before)


def _check_result_is_invariant(before: Axes, node: torch.fx.Node) -> None:
    """Check that a result of a shard_map is the same on all ranks of the axes that do not shard
    it.
    """
    x, (text, *_) = node.args[0], constants_of(node)
    assert isinstance(x, torch.fx.Node)
    every = frozenset(name for name, _, _ in parse_shards(text))
    wrong = sorted((every - CALLS[node.target].axes_of(node)) & before)
    if wrong:
        over = " and ".join(wrong)
        head, path = str(node.kwargs["where"]).split(": ")
        raise PlacementError.of(
            head,
            f"{path} varies over {over}, but its out_placements require the same value on all "
            f"ranks of {'this axis' if len(wrong) == 1 else 'these axes'}",
            fix=f"apply sf.psum or sf.pmean over {over} to {path}, or name {over} in its "
            "out_placements",
            source=sources.user_line(x) or sources.user_line(node),
            arg_path=path,
        )


implement(shard_map.from_local, check=_check_result_is_invariant)


RANK_NUMBERS = (
    "src or dst varies over {}, so ranks of one group would name different ranks",
    "the same src or dst on all ranks of the group",
    "dist.get_global_rank(group, 0); or group_src= or group_dst= with a Python number",
)
# by `where` of the call: what is wrong, what is needed, what to write
DISAGREEMENTS = {
    shard_map.COUNTS_OF_ALL: (
        "the matrix of all counts varies over {}",
        "one matrix that is equal on all ranks",
        "sf.all_gather of each rank's counts over the axis; or pass only this rank's counts",
    )
}


def _check_ranks_agree(before: Axes, node: torch.fx.Node) -> None:
    """Check that all ranks of a group give the same value to a collective."""
    got, needed, fix = DISAGREEMENTS.get(str(node.kwargs.get("where")), RANK_NUMBERS)
    _refuse_varying_argument(before, node, got, needed=needed, fix=fix)


implement(shard_map.as_invariant, check=_check_ranks_agree)


def _check_argument_is_invariant(before: Axes, node: torch.fx.Node) -> None:
    """Check that the argument of a user's `pvary` is invariant: the transpose of `vary` would sum
    values that are each rank's own.
    """
    where = node.kwargs.get("where", "")
    _refuse_varying_argument(
        before,
        node,
        "x varies over {} already",
        needed="a value that is equal on all ranks",
        fix=f"remove {where}, and use x itself",
    )


implement(shard_map.vary, check=_check_argument_is_invariant)


def _refuse_varying_argument(
    before: Axes, node: torch.fx.Node, got: str, *, needed: str, fix: str
) -> None:
    """Refuse an argument of a user's call that varies over the axes of the call.

    Raises:
        CaptureError: naming the axes.
    """
    where = str(node.kwargs.get("where", ""))
    wrong = sorted(CALLS[node.target].axes_of(node) & before)
    if where and wrong:
        got = got.format(" and ".join(wrong))
        raise CaptureError.of(where, got, needed=needed, fix=fix, source=sources.user_line(node))


# loops and branches


@attrs.frozen(eq=False)
class Body:
    """A body in Dynamo's graph: its own graph, and the node that runs it."""

    node: torch.fx.Node
    module: torch.fx.GraphModule

    @classmethod
    def run_by(cls, values: VaryingAxes, node: torch.fx.Node) -> Body:
        """The body that a node of a graph runs."""
        return cls(node, getattr(values.module, args_of(node)[0].target))

    @classmethod
    def with_results(cls, values: VaryingAxes, results: list[torch.fx.Node]) -> Body:
        """The body of which these nodes are results."""
        return cls.run_by(values, args_of(results[0])[0])

    @property
    def arguments(self) -> list[torch.fx.Node]:
        """The values that enter the body, and those that it closes over."""
        return list(args_of(self.node)[1:])

    def number(self, k: int) -> int | None:
        """The number of an argument among the entering values. None if it is closed over."""
        x = self.arguments[k]
        if x.target is operator.getitem and args_of(x)[0].target is bodies.mark_entering:
            return args_of(x)[1]
        return None

    @property
    def closed_over(self) -> list[int]:
        """The positions of the arguments that the body closes over."""
        return [k for k in range(len(self.arguments)) if self.number(k) is None]

    @property
    def calls(self) -> list[torch.fx.Node]:
        """The calls of prims in the body."""
        return [n for n in self.module.graph.nodes if n.target in CALLS]

    def inputs(
        self, values: VaryingAxes, entering: Sequence[Facts], free: dict[int, Facts]
    ) -> list[Facts]:
        """The facts of the body's inputs.

        Args:
            values: of the graph around it.
            entering: the facts of the entering values.
            free: by position, the facts that it needs of closed-over values.
        """
        facts: list[Facts] = []
        for k, x in enumerate(self.arguments):
            n = self.number(k)
            is_free = n is None
            facts.append(facts_after_meeting(values.facts(x), free[k]) if is_free else entering[n])
        return facts

    def infer(
        self, values: VaryingAxes, entering: Sequence[Facts], free: dict[int, Facts]
    ) -> tuple[VaryingAxes, Any]:
        """Infer the facts in the body. Returns them, and those of its results; takes what `inputs`
        takes.
        """
        inner = VaryingAxes(self.module)
        return inner, inner.infer(self.inputs(values, entering, free))


@attrs.define(eq=False)
class Agreement:
    """The facts on which a control-flow op and its bodies agree."""

    result: list[Facts]
    entering: dict[torch.fx.Node, list[Facts]]  # by the node of a body: of the entering values
    # by the node of a body and a position: of the closed-over value
    free: dict[tuple[torch.fx.Node, int], Facts]
    arguments: dict[int, list[Facts]]  # by position: of the op's lists of arguments
    leaving: list[Facts]  # of the results of any body
    # by the node of a body: of its results, where bodies differ
    leaving_by_body: dict[torch.fx.Node, list[Facts]] = attrs.field(factory=dict)

    def leaving_body(self, node: torch.fx.Node) -> list[Facts]:
        """The facts of the results of the body that a node runs."""
        return self.leaving_by_body.get(node, self.leaving)


def _op_of(node: torch.fx.Node) -> torch.fx.Node | None:
    """The control-flow op of a body or of a value that enters one, or the op itself."""
    queue = [node]
    while queue:
        x = queue.pop()
        if x.target in AGREEMENTS:
            return x
        queue += [
            u
            for u in x.users
            if u.target is operator.getitem or is_wrap(u) or u.target in AGREEMENTS
        ]
    return None


def _control_flow_facts(values: VaryingAxes, node: torch.fx.Node) -> list[Facts]:
    """The facts of the results of a node of control flow."""
    op = _op_of(node)
    if node.target in (bodies.mark_inputs, bodies.mark_results) or (
        op is None and not is_wrap(node)
    ):
        return [values.facts(x) for x in args_of(node)[0]]
    if op is None:
        return [values.facts(args_of(node))] * len(node.users)
    agreement = AGREEMENTS[op.target](values, op)
    if node is op:
        return agreement.result
    if node.target is bodies.mark_entering:
        runs = [w for item in node.users for w in item.users if is_wrap(w)]
        every = [agreement.entering[w] for w in runs if w in agreement.entering]
        return every[0] if every else [NONE] * len(args_of(node)[0])
    leaving = dict(enumerate(agreement.leaving_body(node)))
    returned = returned_by(Body.run_by(values, node).module.graph)
    return [leaving.get(args_of(x)[1], NONE) for x in returned]


def _rewrite_control_flow(values: VaryingAxes, node: torch.fx.Node) -> None:
    """Make the inputs of a node of control flow vary as its op and the bodies agree."""
    if node.target is bodies.mark_results:
        results = args_of(node)[0]
        wanted = values.results or map(values.facts, results)
        node.args = ([*map(values.vary, results, wanted)],)
    op = (
        None
        if node.target in (bodies.mark_inputs, bodies.mark_entering, bodies.mark_results)
        else _op_of(node)
    )
    if op is None:
        return
    if op not in values.agreements:
        values.agreements[op] = AGREEMENTS[op.target](values, op)
    agreement = values.agreements[op]
    if node is not op:
        _rewrite_body(values, Body.run_by(values, node), agreement)
        return
    args = list(args_of(op))
    for k, needs in agreement.arguments.items():
        args[k] = [values.vary(x, axes) for x, axes in zip(args[k], needs, strict=True)]
    op.args = tuple(args)


def _rewrite_body(values: VaryingAxes, body: Body, agreement: Agreement) -> None:
    """Make the closed-over and the inner values of a body vary as it and its op agree."""
    node = body.node
    arguments: list[torch.fx.Node] = []
    inputs: list[Facts] = []
    for k, x in enumerate(body.arguments):
        n = body.number(k)
        is_free = n is None
        inputs.append(agreement.free[node, k] if is_free else agreement.entering[node][n])
        arguments.append(values.vary(x, inputs[-1]) if is_free else x)
    VaryingAxes(body.module, agreement.leaving_body(node)).rewrite_graph(inputs)
    node.args = (args_of(node)[0], *arguments)


def fixed_point(
    values: VaryingAxes,
    body: Body,
    carry: list[Facts],
    rows: list[Facts],
    floor: Facts,
    *,
    is_loop: bool = True,
) -> tuple[list[Facts], list[Facts], dict[int, Facts]]:
    """The fixed point of the facts of carries, results and closed-over values.

    Args:
        values: of the graph around the body.
        body: of a loop or a branch.
        carry: the facts of the carries at first.
        rows: those of the per-step inputs.
        floor: facts that all of them have.
        is_loop: whether its first results are the next carries; those of a condition are not.
    """
    free = dict.fromkeys(body.closed_over, floor)
    carry = [facts_after_meeting(c, floor) for c in carry]
    while True:
        outs, more = _run_once(values, body, [*carry, *rows], free)
        next_carries = zip(carry, outs, strict=False) if is_loop else ()
        wider = [joint_facts(c, o) for c, o in next_carries]
        wider += carry[len(outs) if is_loop else 0 :]
        spread = {k: axes | more.get(k, NONE) for k, axes in free.items()}
        if (wider, spread) == (carry, free):
            return carry, outs, free
        carry = wider
        free = spread


def _run_once(
    values: VaryingAxes, body: Body, entering: list[Facts], free: dict[int, Facts]
) -> tuple[list[Facts], dict[int, Facts]]:
    """The facts of a body's results, in the order of `mark_results`, and those that it needs of
    closed-over values.
    """
    inner, outs = body.infer(values, entering, free)
    inner.record_needs()
    graph = body.module.graph
    more = {
        k: NONE.union(*map(inner.needs, x.users))
        for k, x in enumerate(graph.find_nodes(op="placeholder"))
        if k in free and x in inner.needed
    }
    order = [args_of(x)[1] for x in returned_by(graph)]
    rows = sorted(zip(order, outs, strict=True), key=lambda row: row[0])
    return [facts for _, facts in rows], more


def _free(
    values: VaryingAxes, body: Body, free: dict[int, Facts]
) -> dict[tuple[torch.fx.Node, int], Facts]:
    """The facts of the values that a body closes over, by its node and their positions."""
    given = {k: values.facts(body.arguments[k]) for k in free}
    return {(body.node, k): facts_after_meeting(given[k], needs) for k, needs in free.items()}


def _scan(values: VaryingAxes, node: torch.fx.Node) -> Agreement:
    """The agreement of a scan and its body."""
    outs, init, columns, *_ = args_of(node)
    body = Body.with_results(values, outs)
    rows = [values.facts(x) for x in columns]
    carry, left, free = fixed_point(values, body, [*map(values.facts, init)], rows, NONE)
    result = [*carry, *left[len(carry) :]]
    return Agreement(
        result=result,
        entering={body.node: [*carry, *rows]},
        free=_free(values, body, free),
        arguments={1: carry},
        leaving=result,
    )


def _cond(values: VaryingAxes, node: torch.fx.Node) -> Agreement:
    """The agreement of a cond and its two bodies."""
    truth, *results = args_of(node)
    floor = needed_facts(values.facts(truth))
    branches = [Body.with_results(values, outs) for outs in results]
    points = [fixed_point(values, body, [], [], floor) for body in branches]
    _refuse_unequal_calls(branches, floor, "cond")
    left = [joint_facts(a, b, floor) for a, b in zip(*(outs for _, outs, _ in points), strict=True)]
    free = {}
    for body, (_, _, of_body) in zip(branches, points, strict=True):
        free |= _free(values, body, of_body)
    return Agreement(result=left, entering={}, free=free, arguments={}, leaving=left)


def _while(values: VaryingAxes, node: torch.fx.Node) -> Agreement:
    """The agreement of a while loop, its condition and its body."""
    go_on, outs, init = args_of(node)
    test = Body.with_results(values, go_on)
    body = Body.with_results(values, outs)
    floor = NONE
    carry = [*map(values.facts, init)]
    while True:
        carry, _, free = fixed_point(values, body, carry, [], floor)
        _, (truth, *_), of_test = fixed_point(values, test, carry, [], floor, is_loop=False)
        if needed_facts(truth) <= floor:
            break
        floor |= needed_facts(truth)
    _refuse_unequal_calls([test, body], floor, "while_loop")
    return Agreement(
        result=carry,
        entering={body.node: carry, test.node: carry},
        free=_free(values, body, free) | _free(values, test, of_test),
        arguments={2: carry},
        leaving=carry,
        leaving_by_body={test.node: [floor]},
    )


def _refuse_unequal_calls(every: list[Body], floor: Facts, what: str) -> None:
    """Refuse collectives in bodies that some ranks may not run, or not equally often."""
    axes = axes_in(floor)
    graphs = [graph for body in every for graph in graphs_of(body.module)] if axes else []
    for node in [n for graph in graphs for n in graph.nodes if n.target in CALLS]:
        if CALLS[node.target].communicates:
            over = " and ".join(sorted(axes))
            raise CaptureError.of(
                what,
                f"the body calls {node.target.__name__}, and the condition varies over {over}",
                fix="call the collective before or after the branch or loop, or make the "
                f"condition equal on all ranks of {over} by psum or pmax",
                source=sources.user_line(node),
            )


# functions with a rule of the user's


def _forward_rule(values: VaryingAxes, node: torch.fx.Node) -> Agreement:
    """The agreement of a function with a rule that does not communicate: if any of its values
    varies over an axis, all do.
    """
    args = args_of(node)
    lists = [k for k, x in enumerate(args) if isinstance(x, (list, tuple))]
    results = [k for k in lists if args[k] and _is_result(args[k][0])]
    inputs = next(k for k in lists if k > 1 and k not in results)
    every = [Body.with_results(values, args[k]) for k in results]
    for body in every:
        _refuse_collectives(body)
    free = [(body.node, k, body.arguments[k]) for body in every for k in body.closed_over]
    joint = joint_facts(*map(values.facts, [*args[inputs], *(x for _, _, x in free)]))
    return Agreement(
        result=[joint] * len(args[1]),
        entering={body.node: [joint] * len(body.arguments) for body in every},
        free={(run, k): joint for run, k, _ in free},
        arguments={inputs: [joint] * len(args[inputs])},
        leaving=[joint] * max(len(args[k]) for k in lists),
    )


def _is_result(x: object) -> bool:
    """Whether a value is a result of a body."""
    return isinstance(x, torch.fx.Node) and x.target is operator.getitem and is_wrap(args_of(x)[0])


def _refuse_collectives(body: Body) -> None:
    """Refuse collectives in a rule for forward mode."""
    for node in body.calls:
        raise CaptureError.of(
            "a function with a custom rule",
            f"the function calls {node.target.__name__}",
            fix="call the collective before or after the function",
            source=sources.user_line(node),
        )


def _reverse_rule(values: VaryingAxes, node: torch.fx.Node) -> Agreement:
    """The agreement of a function with a rule for reverse mode, its forward and its backward."""
    _, outs, forward, back, xs, has_cotangent = args_of(node)
    plain, saving, *backward = every = [
        Body.with_results(values, results) for results in (outs, forward, back) if results
    ]
    if not any(body.calls for body in every):
        return _forward_rule(values, node)
    agreement = Agreement(result=[], entering={}, free={}, arguments={}, leaving=[])
    inputs = [values.facts(x) for x in xs]
    terms = [_axes_of_one_rank()] * len(outs)  # over which a result's cotangent is a term
    before = None
    while before != (inputs, terms):
        before = inputs, terms
        alone, _ = _rule_body(values, plain, inputs, agreement)
        saved, _ = _rule_body(values, saving, inputs, agreement)
        results = [joint_facts(*row) for row in zip(alone, saved, terms, strict=False)]
        residuals = saved[len(terms) :]
        agreement.result = results
        agreement.leaving_by_body |= {plain.node: results, saving.node: [*results, *residuals]}
        for body in backward:
            entering = [*residuals, *results]
            cotangents, free = _rule_body(values, body, entering, agreement)
            reduced = _reduced(values, body, entering, free)[len(residuals) :]
            terms = [a | b for a, b in zip(terms, reduced, strict=True)]
            wider = _with_cotangents(inputs, cotangents, has_cotangent)
            if more := axes_in(NONE.union(*wider) - NONE.union(*inputs)):
                _refuse_partial_write(values, body, entering, free, more)
            inputs = wider
            agreement.leaving_by_body[body.node] = [
                facts for facts, has in zip(inputs, has_cotangent, strict=True) if has
            ]
    agreement.arguments[4] = inputs
    return agreement


def _rule_body(
    values: VaryingAxes, body: Body, entering: list[Facts], agreement: Agreement
) -> tuple[list[Facts], dict[int, Facts]]:
    """The facts of the results of a body, and those that it needs of closed-over values. Enters
    both into an agreement.
    """
    _, results, free = fixed_point(values, body, entering, [], NONE, is_loop=False)
    agreement.entering[body.node] = entering
    agreement.free |= _free(values, body, free)
    return results, free


def _with_cotangents(
    inputs: list[Facts], cotangents: list[Facts], has_cotangent: Sequence[bool]
) -> list[Facts]:
    """The facts of the arguments of a function, made to vary as their cotangents."""
    feed = iter(cotangents)
    pairs = zip(inputs, has_cotangent, strict=True)
    return [facts_after_meeting(facts, next(feed)) if has else facts for facts, has in pairs]


def _axes_of_one_rank() -> Axes:
    """The axes of the mesh, in the code of one rank under `jit`."""
    scope = current_scope()
    is_of_one = scope.rank is not None and scope.mesh is not None
    return frozenset(axes_of(scope.mesh).names) if is_of_one else NONE


def _refuse_partial_write(
    values: VaryingAxes, body: Body, entering: list[Facts], free: dict[int, Facts], axes: Axes
) -> None:
    """Refuse a backward that writes what a collective gives to all ranks into a part of a tensor of
    each: its gradient may be summed already, or not.

    Raises:
        CaptureError: naming the line.
    """
    inner, _ = body.infer(values, entering, free)
    for node in body.module.graph.nodes:
        written = written_by(node)
        others = [x for x in node.all_input_nodes if x not in written]
        lost = axes & inner.facts(written) - inner.facts(others)
        if lost and any(_is_reduced(x, lost) for x in _origins(others, lost)):
            raise CaptureError.of(
                "a function with a custom rule",
                "the backward writes the result of a collective into a part of a tensor",
                fix="call the collective on a separate tensor: g = g.clone(); dist.all_reduce(g)",
                source=sources.user_line(node),
            )


def _is_reduced(node: torch.fx.Node, axes: Axes) -> bool:
    """Whether a value is the invariant result of a collective over some axes."""
    row = CALLS.get(node.target)
    return row is not None and not row.gives_varying and bool(row.axes_of(node) & axes)


def _reduced(
    values: VaryingAxes, body: Body, entering: list[Facts], free: dict[int, Facts]
) -> list[Axes]:
    """For each entering value, the axes over which it is invariant and a collective reduces it."""
    inner, _ = body.infer(values, entering, free)
    inputs = body.module.graph.find_nodes(op="placeholder")
    numbers = {x: body.number(k) for k, x in enumerate(inputs)}
    reduced = [NONE] * len(entering)
    for node in body.calls:
        missing = axes_in(prim_needs(node) - inner.facts(node.args))
        for x in _origins([node], missing) if missing else ():
            k = numbers.get(x)
            if k is not None:
                reduced[k] |= missing
    return reduced


def _origins(nodes: Iterable[torch.fx.Node], axes: Axes) -> Iterator[torch.fx.Node]:
    """The values that the inputs of nodes are computed from, up to other collectives over these
    axes.
    """
    queue = [x for node in nodes for x in node.all_input_nodes]
    seen = set(queue)
    while queue:
        x = queue.pop()
        yield x
        if x.target in CALLS and CALLS[x.target].axes_of(x) & axes:
            continue
        inputs = x.all_input_nodes
        if x.target is operator.getitem:
            every, k = args_of(x)
            is_entering = every.target is bodies.mark_inputs
            inputs = [args_of(every)[0][k]] if is_entering else inputs
        queue += [y for y in inputs if y not in seen]
        seen.update(inputs)


AGREEMENTS: dict[Any, Callable[[VaryingAxes, torch.fx.Node], Agreement]] = {
    control_flow_ops.scan: _scan,
    control_flow_ops.cond: _cond,
    control_flow_ops.while_loop: _while,
    control_flow_ops.custom_jvp: _forward_rule,
    control_flow_ops.custom_vjp: _reverse_rule,
}
