"""One step of an optimizer as a function of flat lists: torch's own step outside of a capture, and
one call of the graph inside of one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from ... import _compat
from ...errors import TreeError
from ..modules.call import running
from .graph import Row, after_step
from .layout import STARTED, Layout, State, first_state, layout_of
from .recipe import Options, Recipe

Tensors = Sequence[torch.Tensor]
Grads = Sequence[torch.Tensor | None]
States = dict[str, State]


class Step:
    """The step of an optimizer.

    Args:
        recipe: of the optimizer.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.layouts: dict[Any, Layout] = {}

        def updated(
            paths: Sequence[str],
            params: Tensors,
            grads: Grads,
            state: States,
            options: Options,
        ) -> tuple[torch.Tensor, ...]:
            with _compat.staging(), running(recipe.name) as is_for_shapes:
                if is_for_shapes:
                    self.check_state(paths, params, state)
                    own = [x for names in state.values() for x in names.values()]
                    return tuple(x.clone() for x in (*params, *own))
                return self.in_graph(paths, params, grads, state, options)

        def first(
            paths: Sequence[str], params: Tensors, options: Options
        ) -> tuple[torch.Tensor, ...]:
            with _compat.staging(), running(recipe.name):
                found = self.first(paths, params, options)
            return tuple(x for own in found.values() for x in own.values())

        self.updated = _compat.keep_in_graph(updated)
        self.first_in_graph = _compat.keep_in_graph(first)

    def layout(self, path: str, shape: Sequence[int], dtype: torch.dtype) -> Layout:
        """The layout of a parameter's state, found once for each kind of parameter."""
        small = tuple(max(1, min(size, 3)) for size in shape)
        key = self.recipe.group_of(path), small, dtype
        if key not in self.layouts:
            self.layouts[key] = layout_of(self.recipe, path, small, dtype)
        return self.layouts[key]

    def names(
        self, paths: Sequence[str], shapes: Sequence[tuple[Any, torch.dtype]]
    ) -> tuple[tuple[str, ...], ...]:
        """The entries in the state of each parameter. It looks at every group, so that errors
        are found before a step runs.
        """
        self.recipe.members(paths)
        return tuple(
            tuple(self.layout(path, shape, dtype).names)
            for path, (shape, dtype) in zip(paths, shapes, strict=True)
        )

    def laid_out(self, paths: Sequence[str], params: Tensors) -> list[Layout]:
        """The layouts of the states of parameters."""
        return [
            self.layout(path, x.shape, x.dtype)
            for path, x in zip(paths, params, strict=True)
        ]

    def first(
        self, paths: Sequence[str], params: Tensors, options: Options
    ) -> States:
        """The state before the first step."""
        is_graph = _compat.is_tracing()
        given = options if is_graph else as_numbers(options)
        layouts = self.laid_out(paths, params)
        return {
            path: first_state(self.recipe, layout, path, x, given)
            for path, layout, x in zip(paths, layouts, params, strict=True)
        }

    def shapes(
        self, paths: Sequence[str], params: Sequence[tuple[Any, torch.dtype]]
    ) -> States:
        """The state before the first step without values: fake tensors."""
        with (
            _compat.staging(),
            _compat.fake_mode(),
            running(self.recipe.name),
        ):
            stand_ins = [torch.empty(shape, dtype=dtype) for shape, dtype in params]
            return self.first(paths, stand_ins, {})

    def eager(
        self,
        paths: Sequence[str],
        params: Tensors,
        grads: Grads,
        state: States,
        options: Options,
    ) -> tuple[torch.Tensor, ...]:
        """The new parameters, and the new state as a flat list, by torch's own step."""
        self.check_state(paths, params, state)
        new = [x.detach().clone() for x in params]
        optimizer = self.recipe.over(self.recipe.members(paths), new)
        self.recipe.set_options(optimizer, as_numbers(options))
        layouts = self.laid_out(paths, params)
        states = [
            _loaded(layout, state[path])
            for path, layout in zip(paths, layouts, strict=True)
        ]
        optimizer.state = defaultdict(dict, zip(new, states, strict=True))
        for p, g in zip(new, grads, strict=True):
            p.grad = self.own(g)
        optimizer.step()
        after = {
            path: _written(
                layout, optimizer.state[p], state[path], p.grad is not None
            )
            for path, layout, p in zip(paths, layouts, new, strict=True)
        }
        for p in new:
            p.grad = None
        return (*new, *_flat(state, after))

    def own(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """A gradient that the step may keep, and write to if it is not torch's."""
        if grad is None or self.recipe.is_torchs:
            return None if grad is None else grad.detach()
        return grad.detach().clone()

    def in_graph(
        self,
        paths: Sequence[str],
        params: Tensors,
        grads: Grads,
        state: States,
        options: Options,
    ) -> tuple[torch.Tensor, ...]:
        """As `eager`, by pure functions of tensors."""
        self.check_state(paths, params, state)
        plain = {path: _without_mark(own) for path, own in state.items()}
        rows = [
            Row(path, p, g, plain[path])
            for path, p, g in zip(paths, params, grads, strict=True)
        ]
        found = dict(
            zip(paths, after_step(self.recipe, rows, options), strict=True)
        )
        late = [
            attrs.evolve(row, state={})
            for row in rows
            if STARTED in state[row.path] and row.grad is not None
        ]
        first = after_step(self.recipe, late, options) if late else []
        for row, (param, own) in zip(late, first, strict=True):
            has = state[row.path][STARTED]
            later, later_own = found[row.path]
            chosen = {
                name: torch.where(has, x, own[name])
                for name, x in later_own.items()
            }
            chosen[STARTED] = torch.ones_like(has)
            found[row.path] = torch.where(has, later, param), chosen
        after = {
            row.path: state[row.path] if row.grad is None else found[row.path][1]
            for row in rows
        }
        return (*(found[path][0] for path in paths), *_flat(state, after))

    def check_state(
        self, paths: Sequence[str], params: Tensors, state: States
    ) -> None:
        """Check that a state has an entry for each parameter, as `init` makes it.

        Raises:
            TreeError: lists the differences.
        """
        layouts = self.laid_out(paths, params)
        wanted = {
            path: layout.names for path, layout in zip(paths, layouts, strict=True)
        }
        wrong = [
            f"state[{path!r}] has {', '.join(state[path]) or 'nothing'}, not {', '.join(names)}"
            for path, names in wanted.items()
            if path in state and set(state[path]) != set(names)
        ]
        wrong += [
            f"the state lacks {path!r}" for path in wanted if path not in state
        ]
        wrong += [
            f"the state has also {path!r}" for path in state if path not in wanted
        ]
        if wrong:
            raise TreeError.of(
                f"{self.recipe.name}.update, argument state",
                *wrong,
                needed="the state that init or update returned for these parameters",
                fix="state = opt.init(params)",
                arg_path="state",
            )


def as_numbers(options: Options) -> dict[str, Any]:
    """Options for torch's own step: numbers in place of tensors."""
    return {name: _number(x) for name, x in options.items()}


def _number(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.item()
    return type(x)(map(_number, x)) if type(x) in (list, tuple) else x


def _loaded(layout: Layout, state: State) -> State:
    """The state as torch's step keeps it; nothing before a first step that is unlike the others."""
    if layout.is_late and not state[STARTED].item():
        return {}
    return {
        name: state[name].detach().clone()
        if kind is torch.Tensor
        else state[name].item()
        for name, kind in layout.kinds.items()
    }


def _without_mark(state: State) -> State:
    """The entries of a state that the optimizer itself keeps."""
    return {name: x for name, x in state.items() if name != STARTED}


def _written(layout: Layout, after: State, before: State, is_done: bool) -> State:
    """The state as a dict of tensors, as it was if there was no gradient."""
    if not is_done:
        return before
    found = {
        name: x
        if isinstance(x, torch.Tensor)
        else torch.tensor(x, dtype=before[name].dtype, device=before[name].device)
        for name, x in after.items()
    }
    if layout.is_late:
        found[STARTED] = torch.ones_like(before[STARTED])
    return found


def _flat(like: States, state: States) -> list[torch.Tensor]:
    """The tensors of a state in the order of another."""
    return [state[path][name] for path, own in like.items() for name in own]
