"""A step of an optimizer inside a graph: torch's own step on copies of tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from ... import _compat, _tree
from ...capture import aten_trace
from ...capture.modules.module_call import is_unbatched, spread
from ...ops.elementwise import Elementwise, is_elementwise
from ...ops.nodes import remove_unread
from .layout import State, check_entries, entries_of_constructor, unhooked
from .mode import Stepping
from .recipe import Options, Recipe, captured, set_present
from .rows import Row

# ops that copy -> the position of the value
COPIES: dict[Any, int] = {torch.ops.aten.clone.default: 0, torch.ops.aten.copy.default: 1}


Stepped = list[tuple[torch.Tensor, State]]  # of each row: the parameter, its state


def after_step(recipe: Recipe, rows: Sequence[Row], options: Options) -> Stepped:
    """The parameters and their states after a step.

    In a capture, torch's step is traced once for each kind of parameter. That of a user's class
    may combine parameters, and is traced for all of them together; so is a step inside a
    derivative or a `vmap`.
    """
    is_plain = aten_trace.is_recording() and not _compat.inside_transform()
    if not (recipe.is_torchs and is_plain):
        return _batched(recipe, rows, options)
    known: dict[Any, Program] = {}
    found: Stepped = []
    with _compat.without_torch_functions():
        programs = [Program.of(recipe, row, options) for row in rows]
    for program, row in zip(programs, rows, strict=True):
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
        block: the graph as one op, if it works element by element.
        names: the entries of the state after the step.
        constants: further inputs of the graph.
    """

    recipe: Recipe
    kind: Any
    graph: torch.fx.GraphModule | None = None
    block: Elementwise | None = None
    names: tuple[str, ...] = ()
    constants: list[torch.Tensor] = attrs.field(factory=list)

    @classmethod
    def of(cls, recipe: Recipe, row: Row, options: Options) -> Program:
        """The program of a row, which is not traced yet."""
        kind: list[Any] = [recipe.group_of(row.path)]
        for name, x in row.tensors.items():
            kind += name, x.shape, x.dtype, x.device
        for x in _tree.leaves(options):
            kind.append(None if _tree.is_tensor(x) else x)
        return cls(recipe, tuple(kind))

    def run(self, row: Row, options: Options) -> tuple[torch.Tensor, State]:
        """(the parameter, its state) after the step."""
        given = _tree.tensors(dict(options))
        inputs = [*row.tensors.values(), *given]
        if self.graph is None:
            self.trace(row, options, inputs)
        assert self.graph is not None
        inputs += self.constants
        with _compat.without_torch_functions():
            if self.block is not None and _compat.are_traced(inputs):
                param, *values = self.block.traced(inputs)
            else:
                param, *values = _compat.traced_again(self.graph, inputs)
        return param, dict(zip(self.names, values, strict=True))

    def trace(self, row: Row, options: Options, inputs: Sequence[torch.Tensor]) -> None:
        """Trace the step of a row, as a function of these inputs."""
        names = list(row.tensors)

        def step(*xs: torch.Tensor) -> list[torch.Tensor]:
            feed = iter(xs)
            own = {name: next(feed) for name in names}
            given = _tree.with_tensors(dict(options), feed)
            mine = row.like(own)
            ((param, state),) = stepped(self.recipe, [mine], given)
            self.names = tuple(state)
            return [param, *state.values()]

        graph, self.constants = aten_trace.traced(step, inputs, self.recipe.name)
        without_copies(graph)
        self.graph = torch.fx.GraphModule(torch.nn.Module(), graph)
        if is_elementwise(graph):
            self.block = Elementwise(graph, f"{self.recipe.cls.__name__}_step")


def without_copies(graph: torch.fx.Graph) -> None:
    """Drop the copies of a graph without in-place writes: each is the value that it copies."""
    for node in [*graph.nodes]:
        if node.target not in COPIES:
            continue
        source = node.args[COPIES[node.target]]
        if _is_alike(source, node):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    remove_unread(graph)


def _is_alike(a: Any, b: torch.fx.Node) -> bool:
    """Whether two nodes have values of one layout."""
    if not isinstance(a, torch.fx.Node):
        return False
    x = a.meta["val"]
    y = b.meta["val"]
    same_dtype = x.dtype == y.dtype
    same_strides = x.stride() == y.stride()
    return same_dtype and same_strides and x.shape == y.shape


def _batched(recipe: Recipe, rows: Sequence[Row], options: Options) -> Stepped:
    """`stepped`, where each sample of a `vmap` has its own parameters and state."""
    try:
        return stepped(recipe, rows, options)
    except RuntimeError as error:
        if not is_unbatched(error):
            raise
    every = [row.tensors for row in rows]
    values = every, dict(options)
    batched = []
    for row in rows:
        own = spread(row.tensors, frozenset(), values)
        batched.append(row.like(own))
    return stepped(recipe, batched, options)


def stepped(recipe: Recipe, rows: Sequence[Row], options: Options) -> Stepped:
    """One run of torch's step on copies."""
    return captured(lambda pure: _stepped(recipe, rows, options, pure))


def _stepped(recipe: Recipe, rows: Sequence[Row], options: Options, pure: Options) -> Stepped:
    params = [row.param.clone() for row in rows]
    optimizer = recipe.over([row.path for row in rows], params)
    mode = Stepping.with_options(recipe, optimizer, options)
    is_derived = _compat.derivative_levels() > 0
    set_present(optimizer, {**pure, "differentiable": is_derived})
    optimizer.state = defaultdict(dict)
    for p, row in zip(params, rows, strict=True):
        optimizer.state[p] = _copied(row.own)
        p.grad = None if row.grad is None else row.grad.clone()
    states = [(row.layout, optimizer.state[p]) for p, row in zip(params, rows, strict=True)]
    mode.reads(own[name] for layout, own in states for name in layout.numbers if name in own)
    with mode, entries_of_constructor(recipe, options):
        unhooked(optimizer)()
    found = []
    for p, row in zip(params, rows, strict=True):
        own = optimizer.state[p]
        if row.grad is not None:
            check_entries(recipe, row.layout, row.path, own, options)
        after = _kept({name: mode.meant(x) for name, x in own.items()}, row.state)
        found.append((p, after))
    return found


def _copied(state: State) -> State:
    """A state that a step in a graph may write to. Whole numbers are in float64: a number to their
    power is then as exact as it is in Python.
    """
    found: State = {}
    for name, x in state.items():
        is_whole = x.dtype == torch.int64 and x.dim() == 0
        found[name] = x.double() if is_whole else x.clone()
    return found


def _kept(after: State, before: State) -> State:
    """The state after a step, in the dtypes of the one before it."""
    found: State = {}
    for name, x in after.items():
        like = before.get(name, x)
        found[name] = x.to(like.dtype)
    return found
