"""torch.autograd.grad and requires_grad_ inside of a captured function.

They are read as the derivative that they mean. The replay of Dynamo's graph opens a level of
torch.func where the first tensor begins to be followed, and closes it after the last gradient. So
they work inside of every transform.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from ... import _compat
from ...errors import CaptureError
from ...ops.nodes import args_of
from .. import transform_levels
from ..dynamo_nodes import name_of

UNUSED = (
    "One of the differentiated Tensors appears to not have been used in the graph. Set "
    "allow_unused=True if this is the desired behavior."
)


@_compat.read_by_dynamo
def grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,  # torch ignores it
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> Any:
    """torch.autograd.grad inside of a captured function, as Dynamo reads it."""
    if is_grads_batched:
        _refuse(
            "is_grads_batched is True",
            "sf.vmap of a function that calls torch.autograd.grad for one gradient",
        )
    is_dict = isinstance(inputs, dict)
    values = list(inputs.values()) if is_dict else _listed(inputs)
    results = _listed(outputs)
    cotangents = [None] * len(results) if grad_outputs is None else _listed(grad_outputs)
    if materialize_grads:
        reached: Any = None
    elif allow_unused:
        reached = _compat.reached(results, values)
    else:
        reached = -1, (True,) * len(values)
    found = gradients(results, values, cotangents, create_graph, reached)
    if is_dict:
        return dict(zip(inputs, found, strict=True))
    return tuple(found)


@_compat.read_by_dynamo
def _listed(tree: Any) -> list[Any]:
    return [tree] if isinstance(tree, torch.Tensor) else list(tree)


@_compat.constant_in_graph
def _refuse(got: str, fix: str) -> None:
    raise CaptureError.of("torch.autograd.grad", got, fix=fix)


@_compat.keep_in_graph
def gradients(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor | None],
    is_followed: bool,
    reached: tuple[int, Sequence[bool]] | None,
) -> list[torch.Tensor | None]:
    """Gradients of outputs with respect to inputs, as Dynamo sees them: zeros.

    Args:
        outputs: the tensors to differentiate.
        inputs: the tensors to differentiate with respect to.
        cotangents: of the outputs. None for ones.
        is_followed: whether the gradients have derivatives.
        reached: what `reached` says. An input that no output depends on has None. If it is None
            itself, such an input has zeros.
    """
    flags = [True] * len(inputs) if reached is None else reached[1]
    # transforms around see what the gradients depend on
    total = sum((x * 0).sum() for x in (*outputs, *cotangents) if x is not None)
    found = [
        x * 0 + total.to(x.dtype) if flag else None for x, flag in zip(inputs, flags, strict=True)
    ]
    return [g if g is None or is_followed else g.detach() for g in found]


TABLE = {torch.autograd.grad: grad}


@attrs.define(eq=False)
class _Span:
    """A part of a graph at one level of torch.func, in which gradients are taken.

    Args:
        first: the number of the node with which the level opens.
        last: the number of the last gradients.
        followed: for the number of a node, the nodes whose values are followed from there on.
        has_derivative: whether some of the gradients have derivatives.
        level: the number of the level while it is open.
    """

    first: int
    last: int
    followed: dict[int, list[torch.fx.Node]]
    has_derivative: bool
    level: int = 0


class Spans:
    """The levels that the replay of a graph opens for the gradients inside of it."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.number = {node: n for n, node in enumerate(graph.nodes)}
        self.opening: dict[int, list[_Span]] = {}
        self.closing: dict[int, list[_Span]] = {}
        self.open: list[_Span] = []
        if not graph.find_nodes(op="call_function", target=gradients):
            return
        for span in self._found(graph):
            self.opening.setdefault(span.first, []).append(span)
            self.closing.setdefault(span.last, []).append(span)

    def _found(self, graph: torch.fx.Graph) -> list[_Span]:
        starts = [-1]  # of the levels around a node
        taken: dict[int, list[torch.fx.Node]] = {}  # gradients, by the start of their level
        followed_from: dict[torch.fx.Node, int] = {}  # where a tensor begins to be followed
        for number, node in enumerate(graph.nodes):
            name = name_of(node)
            if name in transform_levels.ENTERS:
                starts.append(number)
            elif name in transform_levels.LEAVES:
                starts.pop()
            elif node.target is gradients:
                taken.setdefault(starts[-1], []).append(node)
            elif node.target is _compat.followed_from_here:
                followed_from.setdefault(node.args[0], number)
        return [self._span(start, nodes, followed_from) for start, nodes in taken.items()]

    def _span(
        self, start: int, nodes: list[torch.fx.Node], followed_from: dict[torch.fx.Node, int]
    ) -> _Span:
        followed: dict[int, list[torch.fx.Node]] = {}
        for x in dict.fromkeys(x for node in nodes for x in args_of(node)[1]):
            at = followed_from[x] if x in followed_from else self._before_use(x, start)
            followed.setdefault(max(at, start), []).append(x)
        has_derivative = any(args_of(node)[3] for node in nodes)
        return _Span(min(followed), self.number[nodes[-1]], followed, has_derivative)

    def _before_use(self, x: torch.fx.Node, start: int) -> int:
        """The number of the node before the first that reads a value at a level."""
        names = (*transform_levels.NAMES, *transform_levels.SAME)
        readers = [n for n in x.users if name_of(n) not in names]
        numbers = [self.number[n] for n in readers]
        return min(n for n in numbers if n > start) - 1

    @property
    def are_differentiated(self) -> bool:
        """Whether gradients of what is computed here have derivatives that a level asks for."""
        return any(x.has_derivative for x in self.open) and _compat.derivative_levels() > 1

    def after(self, node: torch.fx.Node, env: dict[torch.fx.Node, Any]) -> None:
        """Open and close levels, and follow values, after a node has run."""
        if not self.opening:
            return
        number = self.number[node]
        for span in self.opening.get(number, ()):
            span.level = _compat.enter_gradient()
            self.open.append(span)
        for span in self.open:
            for x in span.followed.get(number, ()):
                env[x] = _compat.wrapped_at_gradient(env[x], span.level)
        for span in self.closing.get(number, ()):
            self.open.remove(span)
            for x, value in env.items():
                env[x] = _unwrapped(value, span.level)
            _compat.leave_gradient()


def _unwrapped(value: Any, level: int) -> Any:
    """A value, or a list of values, without the wrapper of a level."""
    if isinstance(value, (list, tuple)):
        return type(value)([_unwrapped(x, level) for x in value])
    return _compat.below_gradient(value, level) if isinstance(value, torch.Tensor) else value


def take_gradients(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor | None],
    is_followed: bool,
    reached: tuple[int, Sequence[bool]] | None,
) -> list[torch.Tensor | None]:
    """When Dynamo's graph is replayed: take the gradients that `gradients` stands for.

    Raises:
        RuntimeError: an output does not depend on an input, as in torch.
        Unlike: Dynamo has taken others for inputs that no output depends on.
    """
    rows = [(y, g) for y, g in zip(outputs, cotangents, strict=True) if y.requires_grad]
    found: Sequence[torch.Tensor | None] = [None] * len(inputs)
    if rows:
        ys, gs = zip(*rows, strict=True)
        found = torch.autograd.grad(ys, inputs, gs, create_graph=True, allow_unused=True)
    if reached is None:
        pairs = zip(inputs, found, strict=True)
        found = [torch.zeros_like(x) if g is None else g for x, g in pairs]
    elif (flags := tuple(g is not None for g in found)) != tuple(reached[1]):
        if reached[0] < 0:
            raise RuntimeError(UNUSED)
        raise _compat.Unlike(reached[0], flags)
    return [g if g is None or is_followed else g.detach() for g in found]
