"""Two programs side by side: which op of one is which of the other, and what one of them computes
of the values of the other.
"""

from __future__ import annotations

import difflib
from typing import Any

import attrs
import torch

from ...ops.loops import Loop
from ...ops.nodes import returned_by
from ...types import Program
from .op_results import UNKNOWN, OfRanks, OpError, again_of, length_of, result_of
from .rounding import exceeding
from .values_of_ranks import Values

Node = torch.fx.Node


@attrs.frozen(eq=False)
class Alignment:
    """The ops of two programs that correspond.

    Args:
        of_second: of a node of the second program, that of the first.
        of_first: of a node of the first program, that of the second.
        is_same: whether both programs are the same.
    """

    of_second: dict[Node, Node]
    of_first: dict[Node, Node]
    is_same: bool


def aligned(first: Program, second: Program, *, same_dtypes: bool = True) -> Alignment:
    """Align two programs by the order of their ops, their shapes and, where they have the same
    ones, their dtypes.
    """
    one, two = (list(p.graph.graph.nodes) for p in (first, second))
    keys = [[_key(x, same_dtypes=same_dtypes) for x in nodes] for nodes in (one, two)]
    pairs: dict[Node, Node] = {}
    if keys[0] == keys[1]:
        pairs = dict(zip(two, one, strict=True))
    else:
        matcher = difflib.SequenceMatcher(None, *keys, autojunk=False)
        for tag, i, j, k, m in matcher.get_opcodes():
            is_swap = tag == "replace" and j - i == m - k
            if tag == "equal" or is_swap:
                for x, y in zip(one[i:j], two[k:m], strict=True):
                    if tag == "equal" or _may_stand_for(x, y):
                        pairs[y] = x
    is_same = same_dtypes and len(pairs) == len(one) == len(two)
    is_same = is_same and all(is_same_op(x, y, pairs) for y, x in pairs.items())
    return Alignment(pairs, {x: y for y, x in pairs.items()}, is_same)


def _key(node: Node, *, same_dtypes: bool) -> tuple[Any, ...]:
    value = node.meta.get("val")
    tensors = [value] if isinstance(value, torch.Tensor) else value
    shapes = [
        (tuple(x.shape), x.dtype if same_dtypes else None)
        for x in (tensors if isinstance(tensors, list | tuple) else ())
        if isinstance(x, torch.Tensor)
    ]
    return node.op, str(node.target) if node.op == "call_function" else "", tuple(shapes)


def _may_stand_for(x: Node, y: Node) -> bool:
    """Whether one op may take the place of another: their results have the same shape."""
    one, two = x.meta.get("val"), y.meta.get("val")
    if x.op != y.op or not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
        return False
    return one.shape == two.shape


def is_same_op(x: Node, y: Node, pairs: dict[Node, Node]) -> bool:
    """Whether two nodes run the same op on constants and values that correspond."""
    if x.op != y.op:
        return False
    if x.op == "placeholder":
        return True
    if isinstance(x.target, Loop) or isinstance(y.target, Loop):
        if not is_same_loop(x.target, y.target):
            return False
    elif x.op == "call_function" and x.target != y.target:
        return False
    arguments = torch.fx.node.map_arg((y.args, y.kwargs), lambda n: _Named(pairs.get(n, n)))
    return arguments == torch.fx.node.map_arg((x.args, x.kwargs), _Named)


@attrs.frozen
class _Named:
    """A node among the arguments of another, equal to itself alone."""

    node: Node | None = attrs.field(eq=id)


def is_same_loop(x: Any, y: Any) -> bool:
    """Whether two loops run equal graphs equally often."""
    if type(x) is not type(y) or not isinstance(x, Loop) or len(x.graphs) != len(y.graphs):
        return False
    fields = [a.name for a in attrs.fields(type(x)) if a.name != "graphs"]
    if any(_differ(getattr(x, name), getattr(y, name)) for name in fields):
        return False
    return all(first_other_node(a, b) is None for a, b in zip(x.graphs, y.graphs, strict=True))


def _differ(x: Any, y: Any) -> bool:
    return isinstance(x, int | tuple | bool | str | type(None)) and x != y


def first_other_node(x: torch.fx.Graph, y: torch.fx.Graph) -> Node | None:
    """Return the first node of the second graph that is not that of the first; None if they are
    equal.
    """
    pairs: dict[Node, Node] = {}
    one, two = list(x.nodes), list(y.nodes)
    for a, b in zip(one, two, strict=False):
        pairs[b] = a
        if not is_same_op(a, b, pairs):
            return b
    return two[-1] if len(one) != len(two) else None


def errors_between(values: Values, second: Program, how: Alignment, coarse: Any) -> list[OpError]:
    """Run the ops of the second program on the values of the first one's run, and list the values
    of the second that differ from those of the first by more than rounding, in order.

    Args:
        values: of the run of the first program.
        second: the second program. The nodes of errors are its own, or those of the first
            which it lacks.
        how: which ops correspond.
        coarse: the dtype with the most rounding, where the programs have other dtypes; else None.
    """
    return _Between(values, how, coarse).errors(second)


class _Between:
    def __init__(self, values: Values, how: Alignment, coarse: Any) -> None:
        self.values, self.how, self.coarse = values, how, coarse
        self.first_env: dict[Node, Any] = {}
        self.env: dict[Node, Any] = {}
        self.several: set[Node] = set()  # other ops, of several results
        self.extra: dict[Node, Node] = {}  # of a node: one that only one program has, before it
        for node in values.program.graph.graph.nodes:
            if node in values.read:
                self.first_env[node] = values.read[node]
            elif node in values.locals:
                self.first_env[node] = OfRanks(values.locals[node])
            elif node.op == "call_function":
                self.first_env[node] = result_of(node, self.first_env)

    def errors(self, second: Program) -> list[OpError]:
        errors = []
        for node in second.graph.graph.nodes:
            partner = self.how.of_second.get(node)
            if node.op == "output":
                break
            known = UNKNOWN if partner is None else self.first_env.get(partner, UNKNOWN)
            if node.op == "placeholder":
                self.env[node] = known
                continue
            if partner is not None and known is not UNKNOWN and self._is_same(partner, node):
                self.env[node] = known
                continue
            computed = result_of(node, self.env, self._read)
            if partner is not None and not isinstance(node.meta.get("val"), torch.Tensor):
                self.env[node] = computed  # its results are compared
                self.several.add(node)
                self._note_extra(node)
                continue
            if partner is None or known is UNKNOWN:
                self.env[node] = computed
                self.extra[node] = self._extra_of(node) or node
                continue
            error = self._error(partner, node, computed, known)
            if error is not None:
                errors.append(error)
            self.env[node] = known
        return [*errors, *self._results(second)]

    def _is_same(self, partner: Node, node: Node) -> bool:
        if self.coarse is not None or any(x in self.several for x in node.all_input_nodes):
            return False
        return is_same_op(partner, node, self.how.of_second)

    def _read(self, node: Node, value: Any) -> Any:
        """Round a value of the first program to the dtype that the second one has for it."""
        dtype = getattr(node.meta.get("val"), "dtype", None)
        if not isinstance(value, torch.Tensor) or not _is_rounded(value, dtype):
            return value
        return _rounded(value, self.coarse).to(dtype)

    def _read_as_first(self, node: Node, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not _is_rounded(value, value.dtype):
            return value
        return _rounded(value, self.coarse).to(value.dtype)

    def _note_extra(self, node: Node) -> None:
        extra = self._extra_of(node)
        if extra is not None:
            self.extra[node] = extra

    def _extra_of(self, node: Node) -> Node | None:
        """Return the first node that only the second program has, of those that a node reads."""
        reads = [self.extra[x] for x in node.all_input_nodes if x in self.extra]
        return reads[0] if reads else None

    def _error(self, partner: Node, node: Node, computed: Any, known: Any) -> OpError | None:
        rows = [(computed, known)]
        if isinstance(computed, OfRanks) and isinstance(known, OfRanks):
            rows = list(zip(computed.locals, known.locals, strict=True))
        wrong_ranks = []
        error = None
        for rank, (got, wanted) in enumerate(rows):
            if not isinstance(got, torch.Tensor) or not isinstance(wanted, torch.Tensor):
                continue
            found = self._one_error(partner, node, got, wanted)
            if found is not None:
                error = error or found
                wrong_ranks.append(rank)
        if error is not None and isinstance(computed, OfRanks):
            return attrs.evolve(error, ranks=tuple(wrong_ranks))
        return error

    def _one_error(
        self, partner: Node, node: Node, got: torch.Tensor, wanted: torch.Tensor
    ) -> OpError | None:
        if self.coarse is not None:
            # both ops on the same inputs, those that the coarser dtype can hold
            again = again_of(partner, self.first_env, None, self._read_as_first)(None)
            wanted = again if isinstance(again, torch.Tensor) else wanted
        if got.shape != wanted.shape:
            return None
        is_exact = not wanted.dtype.is_floating_point and not wanted.dtype.is_complex
        mask = exceeding(
            wanted,
            got if is_exact else got.to(wanted.dtype),
            length=length_of(node, wanted),
            coarse=self.coarse,
            again=again_of(partner, self.first_env, self.coarse, self._read_as_first)
            if self.coarse is not None
            else again_of(node, self.env),
        )
        if mask is None:
            return None
        culprit = self._extra_of(node) or self._lost(partner, node) or node
        ranks = self.values.ranks_of(mask, self._marks(partner)) if self._marks(partner) else ()
        return OpError(culprit, "program", wanted, got, mask, ranks, self._marks(partner))

    def _marks(self, partner: Node) -> Any:
        first = self.values.first.get(partner)
        return () if first is None else first.slot.placements

    def _lost(self, partner: Node, node: Node) -> Node | None:
        """Return an argument of the first program's op that only the first program has, where the
        op itself is the same.
        """
        if partner.target != node.target:
            return None
        lost = [x for x in partner.all_input_nodes if x not in self.how.of_first]
        while lost:
            before = [x for x in lost[0].all_input_nodes if x not in self.how.of_first]
            if not before:
                return lost[0]
            lost = before
        return None

    def _results(self, second: Program) -> list[OpError]:
        """Compare the results of the programs where other ops make them."""
        first = returned_by(self.values.program.graph.graph)
        errors = []
        for x, y in zip(first, returned_by(second.graph.graph), strict=False):
            if self.how.of_second.get(y) is x:
                continue
            got, wanted = self.env.get(y, UNKNOWN), self.first_env.get(x, UNKNOWN)
            if not isinstance(got, torch.Tensor) or not isinstance(wanted, torch.Tensor):
                continue
            if got.shape != wanted.shape:
                continue
            mask = exceeding(
                wanted,
                got.to(wanted.dtype),
                length=length_of(y, wanted),
                coarse=self.coarse,
                again=again_of(y, self.env),
            )
            if mask is not None:
                culprit = self.extra.get(y) or x
                errors.append(OpError(culprit, "program", wanted, got, mask, (), self._marks(x)))
        return errors


def _is_rounded(value: torch.Tensor, dtype: Any) -> bool:
    return value.is_floating_point() and dtype is not None and dtype.is_floating_point


def _rounded(value: torch.Tensor, coarse: Any) -> torch.Tensor:
    return value if coarse is None else value.to(coarse)
