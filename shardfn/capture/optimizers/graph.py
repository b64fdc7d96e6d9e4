"""A step of an optimizer inside a graph: torch's own step on copies of tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from ... import _compat, _tree
from .. import trace
from ..modules.call import is_unbatched, spread
from .layout import State, unhooked
from .mode import Stepping
from .recipe import PURE, Options, Recipe, set_present

# ops that copy -> the position of the value
COPIES: dict[Any, int] = {
    torch.ops.aten.clone.default: 0,
    torch.ops.aten.copy.default: 1,
}


@attrs.frozen(eq=False)
class Row:
    """A parameter, its gradient and its state; an empty state before a first step that is unlike
    the others.
    """

    path: str
    param: torch.Tensor
    grad: torch.Tensor | None
    state: State

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them by name."""
        found = {"param": self.param}
        if self.grad is not None:
            found["grad"] = self.grad
        return found | {f"state.{name}": x for name, x in self.state.items()}

    def like(self, tensors: dict[str, torch.Tensor]) -> Row:
        """A row of other tensors."""
        state = {name: tensors[f"state.{name}"] for name in self.state}
        return Row(self.path, tensors["param"], tensors.get("grad"), state)


Stepped = list[tuple[torch.Tensor, State]]  # of each row: the parameter, its state


def after_step(recipe: Recipe, rows: Sequence[Row], options: Options) -> Stepped:
    """The parameters and their states after a step.

    In a capture, torch's step is traced once for each kind of parameter. That of a user's class
    may combine parameters, and is traced for all of them together; so is a step inside a
    derivative or a `vmap`.
    """
    is_plain = trace.is_recording() and not _compat.inside_transform()
    if not (recipe.is_torchs and is_plain):
        return _batched(recipe, rows, options)
    known: dict[Any, Program] = {}
    found: Stepped = []
    for row in rows:
        program = Program.of(recipe, row, options)
        program = known.setdefault(program.kind, program)
        found.append(program.run(row, options))
    return found


@attrs.define(eq=False)
class Program:
    """The step of one kind of parameter.

    Args:
        recipe: of the optimizer.
        kind: two rows of one kind have one program.
        graph: made when it is first needed.
        names: the entries of the state after the step.
        constants: further inputs of the graph.
    """

    recipe: Recipe
    kind: Any
    graph: torch.fx.GraphModule | None = None
    names: tuple[str, ...] = ()
    constants: list[torch.Tensor] = attrs.field(factory=list)

    @classmethod
    def of(cls, recipe: Recipe, row: Row, options: Options) -> Program:
        """The program of a row, which is not traced yet."""
        shapes = [
            (name, x.shape, x.dtype, x.device) for name, x in row.tensors.items()
        ]
        fixed = [
            None if isinstance(x, torch.Tensor) else x
            for x in _tree.leaves(options)
        ]
        return cls(recipe, (recipe.group_of(row.path), tuple(shapes), tuple(fixed)))

    def run(self, row: Row, options: Options) -> tuple[torch.Tensor, State]:
        """(the parameter, its state) after the step."""
        leaves, treedef = _tree.flatten(dict(options))
        given = [x for x in leaves if isinstance(x, torch.Tensor)]
        own = row.tensors
        inputs = [*own.values(), *given]

        def step(*xs: torch.Tensor) -> list[torch.Tensor]:
            feed = iter(xs[len(own) :])
            filled = [
                next(feed) if isinstance(x, torch.Tensor) else x for x in leaves
            ]
            mine = row.like(dict(zip(own, xs, strict=False)))
            known = _tree.unflatten(treedef, filled)
            ((param, state),) = stepped(self.recipe, [mine], known)
            self.names = tuple(state)
            return [param, *state.values()]

        if self.graph is None:
            graph, self.constants = trace.traced(step, inputs, self.recipe.name)
            without_copies(graph)
            self.graph = torch.fx.GraphModule(torch.nn.Module(), graph)
        run = torch.fx.Interpreter(self.graph).run
        with _compat.without_torch_functions():
            param, *values = run(*inputs, *self.constants)
        return param, dict(zip(self.names, values, strict=True))


def without_copies(graph: torch.fx.Graph) -> None:
    """Drop the copies of a graph without in-place writes: each is the value that it copies."""
    for node in [*graph.nodes]:
        source = COPIES.get(node.target)
        if source is not None and _is_alike(node.args[source], node):
            node.replace_all_uses_with(node.args[source])
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _is_alike(a: Any, b: torch.fx.Node) -> bool:
    """Whether two nodes have values of one layout."""
    if not isinstance(a, torch.fx.Node):
        return False
    x, y = (node.meta["val"] for node in (a, b))
    return (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())


def _batched(recipe: Recipe, rows: Sequence[Row], options: Options) -> Stepped:
    """`stepped`, where each sample of a `vmap` has its own parameters and state."""
    try:
        return stepped(recipe, rows, options)
    except RuntimeError as error:
        if not is_unbatched(error):
            raise
    every = [row.tensors for row in rows]
    values = every, dict(options)
    spread_rows = [
        row.like(spread(own, frozenset(), values))
        for row, own in zip(rows, every, strict=True)
    ]
    return stepped(recipe, spread_rows, options)


def stepped(recipe: Recipe, rows: Sequence[Row], options: Options) -> Stepped:
    """One run of torch's step on copies."""
    params = [row.param.clone() for row in rows]
    groups: list[list[int]] = [[] for _ in range(len(recipe.groups) + 1)]
    for i, row in enumerate(rows):
        groups[recipe.group_of(row.path)].append(i)
    optimizer = recipe.over(groups, params)
    recipe.set_options(optimizer, options)
    is_derived = _compat.derivative_levels() > 0
    set_present(optimizer, {**PURE, "differentiable": is_derived})
    states = [_copied(row.state) for row in rows]
    optimizer.state = defaultdict(dict, zip(params, states, strict=True))
    for p, row in zip(params, rows, strict=True):
        p.grad = None if row.grad is None else row.grad.clone()
    first = recipe.options if recipe.is_torchs else None
    with Stepping(_numbers(recipe, states), first, options):
        unhooked(optimizer)()
    return [
        (p, _kept(optimizer.state[p], row.state))
        for p, row in zip(params, rows, strict=True)
    ]


def _copied(state: State) -> State:
    """A state that a step in a graph may write to. Whole numbers are in float64: a number to their
    power is then as exact as it is in Python.
    """
    return {
        name: x.double() if x.dtype == torch.int64 and x.dim() == 0 else x.clone()
        for name, x in state.items()
    }


def _numbers(recipe: Recipe, states: Sequence[State]) -> list[torch.Tensor]:
    """The numbers in states that torch's step reads by `.item()` outside of a graph."""
    every = [x for own in states for x in own.values()]
    is_number = recipe.is_torchs and torch.float32
    return [x for x in every if x.dim() == 0 and x.dtype == is_number]


def _kept(after: State, before: State) -> State:
    """The state after a step, in the dtypes of the one before it."""
    return {
        name: x.to(before[name].dtype) if name in before else x
        for name, x in after.items()
    }
