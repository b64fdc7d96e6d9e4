"""One step of an optimizer as a function of flat lists: torch's own step outside of a capture, and
one call of the graph inside of one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _compat, _tree
from ...capture.modules.module_call import running
from ...errors import CaptureError, TreeError, call_site
from .graph import after_step
from .layout import (
    STARTED,
    Layout,
    State,
    check_entries,
    entries_of_constructor,
    first_state,
    layout_of,
)
from .recipe import Options, Recipe
from .rows import Row

Tensors = Sequence[torch.Tensor]
Grads = Sequence[torch.Tensor | None]
States = dict[str, State]
LARGEST = 3  # size of a dim of the stand-in that tells a layout


class Step:
    """The step of an optimizer.

    Args:
        recipe: of the optimizer.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.layouts: dict[Any, Layout] = {}

        def updated(
            paths: Sequence[str], params: Tensors, grads: Grads, state: States, options: Options
        ) -> tuple[torch.Tensor, ...]:
            with _compat.staging(), running(recipe.name) as is_for_shapes:
                if is_for_shapes:
                    with _compat.without_torch_functions():
                        self.rows(paths, params, grads, state)
                    copies = list(map(_copied, (*params, *_flat(state, state))))
                    of_states = [x for own in state.values() for x in own.values()]
                    given = *params, *grads, *of_states, *options.values()
                    return tuple(_with_tangents(copies, given))
                return self.in_graph(paths, params, grads, state, options)

        def first(
            paths: Sequence[str], params: Tensors, options: Options
        ) -> tuple[torch.Tensor, ...]:
            with _compat.staging(), running(recipe.name):
                found = self.first(paths, params, options)
            return tuple(_flat(found, found))

        self.updated = _compat.keep_in_graph(_compat.located(updated))
        self.first_in_graph = _compat.keep_in_graph(_compat.located(first))
        self.eager = _compat.located(self.step_of_torch)

    def layout(self, path: str, shape: Sequence[int], dtype: torch.dtype) -> Layout:
        """The layout of a parameter's state, found once for each kind of parameter."""
        small = tuple(min(max(1, size), LARGEST) for size in shape)
        key = self.recipe.group_of(path), small, dtype
        if key not in self.layouts:
            try:
                self.layouts[key] = layout_of(self.recipe, path, small, dtype)
            except RuntimeError as error:
                if dtype.is_floating_point or dtype.is_complex:
                    raise
                got, needed = f"{path!r} is {dtype}: {error}", "floating parameters"
                raise TreeError.of(self.recipe.name, got, needed=needed) from error
        return self.layouts[key]

    def names(
        self, paths: Sequence[str], shapes: Sequence[tuple[Any, torch.dtype]]
    ) -> tuple[tuple[str, ...], ...]:
        """The entries in the state of each parameter. It looks at every group, so that errors
        are found before a step runs.
        """
        self.recipe.check_patterns(paths)
        found = []
        for path, (shape, dtype) in zip(paths, shapes, strict=True):
            layout = self.layout(path, shape, dtype)
            found.append(tuple(layout.names))
        return tuple(found)

    def first(self, paths: Sequence[str], params: Tensors, options: Options) -> States:
        """The state before the first step."""
        is_graph = _compat.is_tracing()
        given = options if is_graph else as_numbers(options)
        found: States = {}
        for path, x in zip(paths, params, strict=True):
            layout = self.layout(path, x.shape, x.dtype)
            found[path] = first_state(self.recipe, layout, path, x, given)
        return found

    def shapes(self, paths: Sequence[str], params: Sequence[tuple[Any, torch.dtype]]) -> States:
        """The state before the first step without values: fake tensors."""
        with _compat.staging(), _compat.fake_mode(), running(self.recipe.name):
            stand_ins = [torch.empty(shape, dtype=dtype) for shape, dtype in params]
            return self.first(paths, stand_ins, {})

    def rows(self, paths: Sequence[str], params: Tensors, grads: Grads, state: States) -> list[Row]:
        """A row for each parameter."""
        layouts = []
        for path, x in zip(paths, params, strict=True):
            layouts.append(self.layout(path, x.shape, x.dtype))
        self.check_state(paths, params, layouts, state)
        states = [state[path] for path in paths]
        return list(map(Row, paths, params, grads, states, layouts))

    def step_of_torch(
        self, paths: Sequence[str], params: Tensors, grads: Grads, state: States, options: Options
    ) -> tuple[torch.Tensor, ...]:
        """The new parameters, and the new state as a flat list, by torch's own step."""
        rows = self.rows(paths, params, grads, state)
        new = [x.detach().clone() for x in params]
        optimizer = self.recipe.over(paths, new)
        self.recipe.set_options(optimizer, as_numbers(options))
        optimizer.state = defaultdict(dict)
        for p, row in zip(new, rows, strict=True):
            optimizer.state[p] = _loaded(row)
            p.grad = self.own(row.grad)
        try:
            with entries_of_constructor(self.recipe, options):
                optimizer.step()
        except Exception as error:
            if any(isinstance(x, DTensor) for x in params):
                raise self.not_for_dtensors(error) from error
            raise
        after: States = {}
        for p, row in zip(new, rows, strict=True):
            own = optimizer.state[p]
            if row.grad is not None:
                check_entries(self.recipe, row.layout, row.path, own, options)
            after[row.path] = _written(row, own)
            p.grad = None
        return (*new, *_flat(state, after))

    def not_for_dtensors(self, error: Exception) -> CaptureError:
        """The error for a step that torch cannot run on DTensors."""
        lines = str(error).splitlines() or [type(error).__name__]
        got = f"torch's step() fails on DTensors: {lines[0]}"
        fix = "call the update inside a captured function: sf.shard(opt.update, mesh, ...)"
        where = f"{self.recipe.name}.update"
        return CaptureError.of(where, got, fix=fix, source=call_site())

    def own(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """A gradient that the step may keep, and write to if it is not torch's."""
        if grad is None:
            return None
        return grad.detach() if self.recipe.is_torchs else grad.detach().clone()

    def in_graph(
        self, paths: Sequence[str], params: Tensors, grads: Grads, state: States, options: Options
    ) -> tuple[torch.Tensor, ...]:
        """As `eager`, by pure functions of tensors."""
        with _compat.without_torch_functions():
            rows = self.rows(paths, params, grads, state)
        found = after_step(self.recipe, rows, options)
        late = [row.fresh() for row in rows if row.is_late]
        first = iter(after_step(self.recipe, late, options) if late else ())
        new: list[torch.Tensor] = []
        after: States = {}
        for row, (param, own) in zip(rows, found, strict=True):
            if row.is_late:
                param, own = _chosen(row.state[STARTED], (param, own), next(first))
            new.append(param)
            after[row.path] = row.state if row.grad is None else own
        return (*new, *_flat(state, after))

    def check_state(
        self, paths: Sequence[str], params: Tensors, layouts: Sequence[Layout], state: States
    ) -> None:
        """Check that a state has an entry for each parameter, as `init` makes it.

        Raises:
            TreeError: lists the differences.
        """
        wrong = []
        for path, x, layout in zip(paths, params, layouts, strict=True):
            if path not in state:
                wrong.append(f"the state lacks {path!r}")
                continue
            got = list(state[path])
            if set(got) != set(layout.names):
                has = ", ".join(got) or "nothing"
                needed = ", ".join(layout.names)
                wrong.append(f"state[{path!r}] has {has}, not {needed}")
                continue
            for name, own in state[path].items():
                if not isinstance(own, torch.Tensor):
                    wrong.append(f"state[{path!r}][{name!r}] is {own!r}, and no tensor")
                elif name in layout.of_param and own.shape != x.shape:
                    shapes = list(own.shape), list(x.shape)
                    wrong.append(
                        f"state[{path!r}][{name!r}] has shape {shapes[0]}, but the parameter has "
                        f"{shapes[1]}"
                    )
        for path in state:
            if path not in paths:
                wrong.append(f"the state has also {path!r}")
        if wrong:
            raise TreeError.of(
                f"{self.recipe.name}.update, argument state",
                *wrong,
                needed="the state that init or update returned for these parameters",
                fix="state = opt.init(params)",
                arg_path="state",
            )


def _copied(x: torch.Tensor) -> torch.Tensor:
    """A tensor like this one. A tensor with values becomes a fake one of the capture."""
    if not _compat.is_fake(x):
        return x.clone()
    with _compat.without_torch_functions():
        return x.clone()


def _with_tangents(results: Sequence[torch.Tensor], inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Tensors like these that have tangents if an input has one, as the results of a step do."""
    if not _compat.is_forward_mode():
        return [*results]
    read = [x for x in _tree.tensors(inputs) if x.is_floating_point()]
    every = torch.stack([x.sum().double() for x in read]).sum()
    return [x + every.to(x.dtype) if x.is_floating_point() else x for x in results]


def _chosen(
    has_started: torch.Tensor, later: tuple[torch.Tensor, State], first: tuple[torch.Tensor, State]
) -> tuple[torch.Tensor, State]:
    """(the parameter, its state) of a first or of a later step."""
    state: State = {}
    for name, x in later[1].items():
        state[name] = torch.where(has_started, x, first[1][name])
    state[STARTED] = torch.ones_like(has_started)
    return torch.where(has_started, later[0], first[0]), state


def as_numbers(options: Options) -> dict[str, Any]:
    """Options for torch's own step: numbers in place of tensors."""
    return {name: _number(x) for name, x in options.items()}


def _number(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x if x.dim() else x.item()
    if type(x) in (list, tuple):
        return type(x)(map(_number, x))
    return x


def _loaded(row: Row) -> State:
    """The state as torch's step keeps it; nothing before a first step that is unlike the others."""
    found: State = {}
    if row.layout.is_late and not row.state[STARTED].item():
        return found
    for name, kind in row.layout.kinds.items():
        x = row.state[name].detach()
        found[name] = x.clone() if kind is torch.Tensor else x.item()
    return found


def _written(row: Row, after: State) -> State:
    """The state as a dict of tensors, as it was if there was no gradient."""
    if row.grad is None:
        return row.state
    found: State = {}
    for name, x in after.items():
        like = row.state[name]
        found[name] = torch.as_tensor(x, dtype=like.dtype, device=like.device)
    if row.layout.is_late:
        found[STARTED] = torch.ones_like(row.state[STARTED])
    return found


def _flat(like: States, state: States) -> list[torch.Tensor]:
    """The tensors of a state in the order of another."""
    found = []
    for path, names in like.items():
        own = state[path]
        found += [own[name] for name in names]
    return found
