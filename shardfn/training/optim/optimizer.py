"""`optim`: an optimizer of torch as pure functions over pytrees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ... import _compat, _tree
from ...accepted import accept
from . import checks
from .placed import placed_like
from .recipe import Recipe
from .schedule import Schedule
from .step import Step
from .trees import as_shapes, beside, described, dotted_paths, has_shapes, without_values

State = dict[str, dict[str, torch.Tensor]]
BESIDE = ("the gradients", "the parameters")


class Optim:
    """An optimizer as pure functions `init` and `update`."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.name = recipe, recipe.name
        self.step = Step(recipe)

        def check(
            method: str, paths: Any, shapes: Any, of_grads: Any, wrong: Any, options: Any
        ) -> Any:
            checks.check_options(recipe, options)
            checks.check_params(f"{recipe.name}.{method}", paths)
            checks.check_trees(recipe.name, paths, shapes, of_grads, wrong)
            return self.step.names(paths, shapes)

        self.checked = _compat.constant_in_graph(check)

    def __repr__(self) -> str:
        texts = [self.recipe.cls.__name__]
        for name, x in self.recipe.options.items():
            texts.append(f"{name}={x!r}")
        return f"optim({', '.join(texts)})"

    def __getstate__(self) -> dict[str, Any]:
        return {"recipe": self.recipe}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    @_compat.read_by_dynamo
    def init(self, params: Any, **options: Any) -> State:
        """Return the state before the first step.

        Args:
            params: a pytree of tensors. A pytree of ShapeDtypes gives the state as ShapeDtypes.
            options: the options of the first step, if the first state depends on them, such as the
                `lr` of Rprop and ASGD.

        Returns:
            A dict from the dotted path of each parameter to a dict of tensors, such as `{"w":
            {"step": ..., "exp_avg": ...}}`. The structure of the state never changes.

        Raises:
            TreeError: an option is unknown, or a pattern matches no parameter.
            CaptureError: the state of the optimizer contains something besides tensors and numbers.

        Source: optax.GradientTransformation.init.

        Example:
            >>> import torch, shardfn as sf
            >>> opt = sf.optim(torch.optim.Adagrad, lr=0.1)
            >>> opt.init({"w": torch.ones(2)})
            {'w': {'step': tensor(0.), 'sum': tensor([0., 0.])}}
        """
        if not is_captured() and has_shapes(params):
            return self._shapes(without_values(params), options)
        leaves = _tree.tensors(params)
        paths = dotted_paths(params)
        shapes = described(leaves)
        names = self.checked("init", paths, shapes, shapes, [], list(options))
        if not is_captured():
            return self.step.first(paths, leaves, options)
        feed = iter(self.step.first_in_graph(paths, leaves, options))
        state: State = {}
        for path, own in zip(paths, names, strict=True):
            state[path] = {name: next(feed) for name in own}
        return state

    def _shapes(self, params: Any, options: Mapping[str, Any]) -> Any:
        """The shapes of the state before the first step."""
        paths, shapes = dotted_paths(params), described(_tree.tensors(params))
        self.checked("init", paths, shapes, shapes, [], list(options))
        return as_shapes(self.step.shapes(paths, shapes))

    @_compat.read_by_dynamo
    def update(self, params: Any, grads: Any, state: State, **options: Any) -> tuple[Any, State]:
        """Run one optimizer step: `params, state = opt.update(params, grads, state, lr=lr)`.

        Args:
            params: a pytree of tensors.
            grads: the gradients, a tree with the structure of `params`, with None for parameters
                that the step does not change.
            state: the state from `init` or from the previous step.
            options: numbers or 0-d tensors that replace options of the constructor, such as `lr`,
                in all groups that do not set the option. A list has one value for each group. A new
                value in a tensor causes no retrace.

        Returns:
            A tuple of the new parameters and the new state. `update` does not write to its
            arguments.

        Raises:
            TreeError: the gradients, the state or the options do not fit the parameters.
            PlacementError: a gradient is on another mesh than its parameter.
            CaptureError: inside a captured function, the optimizer reads the value of a tensor.

        Source: torch.optim.Optimizer.step; optax.GradientTransformation.update with
            optax.apply_updates.

        Example:
            >>> import torch, shardfn as sf
            >>> opt = sf.optim(torch.optim.SGD, lr=0.5)
            >>> params = {"w": torch.ones(2)}
            >>> state = opt.init(params)
            >>> params, state = opt.update(params, {"w": torch.ones(2)}, state)
            >>> params
            {'w': tensor([0.5000, 0.5000])}
        """
        if not is_captured():
            accept("Optim.update", state=state)
        leaves = _tree.tensors(params)
        paths = dotted_paths(params)
        paired, wrong = beside(params, grads, BESIDE)
        shapes = described(leaves)
        self.checked("update", paths, shapes, described(paired), wrong, list(options))
        if not isinstance(state, dict):
            checks.refuse_state(self.recipe.name, type(state).__name__)
        run = self.step.updated
        if not is_captured():
            checks.check_meshes(self.recipe.name, paths, leaves, paired)
            run = self.step.eager
        found = run(paths, leaves, paired, state, options)
        count = len(leaves)
        return (
            _tree.with_tensors(params, list(found[:count])),
            _tree.with_tensors(state, list(found[count:])),
        )

    def state_placements(self, placements: Any, params: Any) -> dict[str, Any]:
        """Return the placements of the optimizer state, for `in_placements` and `sf.distribute`. A
        dim of a state tensor is sharded like the dim of the parameter if both have the same size.

        Args:
            placements: the placements of the parameters, a prefix tree of `P`s.
            params: the parameters, or their `ShapeDtype`s.

        Returns:
            A tree with the structure of the state, with a `P` for each tensor.

        Raises:
            TreeError: placements is not a prefix tree of the parameters.

        Source: optax's `optax.tree.map_params`, with which JAX users place a state.

        Example:
            >>> import torch, shardfn as sf
            >>> opt = sf.optim(torch.optim.Adagrad)
            >>> opt.state_placements({"w": sf.P("dp")}, {"w": torch.ones(2)})
            {'w': {'step': P(), 'sum': P('dp')}}
        """
        return placed_like(self.recipe.name, self.step, placements, params)

    def schedule(self, make: Callable[..., Any], *args: Any, **options: Any) -> Schedule:
        """Create a learning rate scheduler of torch for the optimizer, whose values are tensors.

        Args:
            make: a class of torch.optim.lr_scheduler, or any function of a torch optimizer that
                returns a scheduler.
            args: more positional arguments of `make`.
            options: the keyword arguments of `make`.

        Returns:
            A `Schedule`, whose fields `.lr` and `.options` are the values for the next `update`,
            and whose method `.step()` advances the scheduler by one step.

        Source: torch.optim.lr_scheduler.

        Example:
            >>> import torch, shardfn as sf
            >>> opt = sf.optim(torch.optim.SGD, lr=0.5)
            >>> rates = opt.schedule(torch.optim.lr_scheduler.StepLR, 1)
            >>> rates.step()
            >>> rates.lr
            tensor(0.0500, dtype=torch.float64)
        """
        accept("Optim.schedule", make=make)
        return Schedule(self.recipe, make, args, options)


@_compat.read_by_dynamo
def is_captured() -> bool:
    """Whether a call is part of a graph, or of a transform of torch.func."""
    return _compat.is_tracing() or _compat.inside_transform()


@_compat.read_by_dynamo
def optim(
    cls: type[torch.optim.Optimizer],
    *,
    groups: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Any,
) -> Optim:
    """Turn an optimizer of torch into pure functions over pytrees: `opt = optim(torch.optim.AdamW,
    lr=1e-3)`, `state = opt.init(params)`, `params, state = opt.update(params, grads, state)`.

    `optim` uses the optimizer class unchanged. Outside of a captured function, `opt.update` runs
    the `step` of the class, so results equal those of torch to the last bit. Inside a captured
    function, the optimizer step becomes part of the captured program, which is partitioned,
    differentiated and compiled as a whole.

    Args:
        cls: a class of torch.optim, or any subclass of torch.optim.Optimizer whose step computes
            new parameters and `self.state[p]` from the old ones.
        groups: a dict from patterns to options of the matching parameters, such as `{"**.bias":
            dict(weight_decay=0.0)}`. Patterns have the same form as in `sf.placements`, and a
            parameter gets the options of the first pattern that matches.
        options: the arguments of the optimizer class, except the parameters. An option of the
            optimizer must not be a tensor. `foreach`, `fused` and `capturable` have an effect only
            outside of captured functions.

    Returns:
        An object with the methods `init`, `update`, `state_placements` and `schedule`.

    Raises:
        TreeError: cls is not an optimizer class, or its constructor does not accept the options.
        CaptureError: the step is not a function of parameters, gradients and state (LBFGS,
            SparseAdam, a step that needs a closure), or `optim` is called inside a captured
            function.

    Source: torch.optim; optax's pair of init and update.

    Example:
        >>> import torch, shardfn as sf
        >>> opt = sf.optim(torch.optim.AdamW, lr=0.1, groups={"b": dict(weight_decay=0.0)})
        >>> params = {"w": torch.ones(2), "b": torch.ones(2)}
        >>> params, state = opt.update(params, params, opt.init(params))
        >>> params["b"], state["b"]["step"]
        (tensor([0.9000, 0.9000]), tensor(1.))
    """
    if _compat.is_tracing():
        checks.refuse_inside()
    checks.check_class(cls)
    checks.check_groups(cls.__name__, groups)
    given = groups or {}
    own = tuple((pattern, dict(x)) for pattern, x in given.items())
    recipe = Recipe(f"optim({cls.__name__})", cls, options, own)
    checks.check_numbers(recipe)
    return Optim(recipe)
