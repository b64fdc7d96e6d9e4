"""The layouts of a sweep: strategies by name, and placements of the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from .. import _tree
from ..accepted import described
from ..errors import PlacementError
from ..patterns import near
from ..pipelines import Schedule
from ..placement import AUTO, P, is_spec
from ..training.optim.placed import like_parameter
from ..training.plans import Strategy, strategy
from ..training.plans.strategies import STRATEGIES
from ..types import ShapeDtype
from .variants import is_list

AUTO_NAME = "auto"
PIPELINE = "pipeline"
TENSORS = (torch.Tensor, ShapeDtype)


@attrs.frozen
class Placed:
    """The placements of a step's arguments, and what `shard` takes beside them.

    Args:
        in_placements: as `shard` takes them.
        options: its keywords, such as attention.
    """

    in_placements: Any
    options: Mapping[str, Any]


@attrs.frozen(eq=False)
class Layout:
    """A way to place the arguments of a step on any mesh.

    Args:
        name: in the table.
        of: a function of the mesh and the schedule of a pipeline, or None.
    """

    name: str
    of: Callable[[Any, Schedule | None], Placed]


def layouts_of(
    where: str, strategies: Any, args: tuple[Any, ...], options: Mapping[str, Any], axis: str
) -> list[Layout]:
    """Return the layouts of names, or of placements by name.

    Args:
        where: the function, for errors.
        strategies: a list of names, or a dict of names and placements, or functions of the mesh.
        args: of the step.
        options: keywords of `shard` for all of them.
        axis: of the stages of a pipeline.

    Raises:
        PlacementError: it is neither, or there is no strategy of a name.
    """
    if isinstance(strategies, Mapping) and strategies:
        return [given(str(name), x, args, options) for name, x in strategies.items()]
    if not is_list(strategies) or not all(isinstance(x, str) for x in strategies):
        raise PlacementError.of(
            f"{where}, strategies",
            f"it is {described(strategies)}",
            needed="a list of names of strategies, or a dict from names to placements",
            fix="strategies=['ddp', 'zero3', 'auto']",
            arg_path="strategies",
        )
    known = [AUTO_NAME, *STRATEGIES]
    parts = [part for name in strategies for part in name.split("+")]
    unknown = [name for name in parts if name not in known]
    if unknown:
        raise PlacementError.of(
            f"{where}, strategies",
            *[f"there is no strategy {name!r}" for name in unknown],
            needed=f"{', '.join(map(repr, known))}, or several joined by +",
            fix=repr(near(unknown[0], known)[0]),
            arg_path="strategies",
        )
    return [_named(name, args, options, axis) for name in strategies]


def given(name: str, places: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Layout:
    """Return the layout of placements, or of a function that returns them or a `Strategy`.

    Args:
        name: in the table.
        places: as `shard` takes them; a Strategy; or a function of the mesh, and of the schedule
            where there is one.
        args: of the step.
        options: keywords of `shard`.
    """

    def of(mesh: Any, schedule: Schedule | None) -> Placed:
        found = places
        if callable(places):
            found = places(mesh) if schedule is None else places(mesh, schedule)
        is_strategy = isinstance(found, Strategy)
        return _of_strategy(found, args, options) if is_strategy else Placed(found, options)

    return Layout(name, of)


def _named(name: str, args: tuple[Any, ...], options: Mapping[str, Any], axis: str) -> Layout:
    """Return the layout of a strategy, or of several: each is the base of the next."""
    if name == AUTO_NAME:
        return Layout(name, lambda mesh, schedule: Placed(AUTO, options))

    def of(mesh: Any, schedule: Schedule | None) -> Placed:
        found = None
        for part in name.split("+"):
            stages = _stages(axis, schedule) if part == PIPELINE else {}
            found = strategy(part, args[0] if args else None, mesh, base=found, **stages)
        return _of_strategy(found, args, options)

    return Layout(name, of)


def _stages(axis: str, schedule: Schedule | None) -> dict[str, Any]:
    """Return the options of the strategy of a pipeline, which runs by a schedule."""
    if schedule is None:
        return {"axis": axis}
    chunks = schedule.stages // schedule.coordinates
    return {"axis": axis, "chunks": chunks, "order": schedule.order}


def _of_strategy(found: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Placed:
    """Place the arguments by a strategy: the parameters first; the state of an optimizer and
    other trees like the parameters as its state; all others as its batch.
    """
    params, *others = args
    places = [found.params, *(_argument(found, params, x) for x in others)]
    own = {"attention": found.attention, "rows": found.rows}
    return Placed(tuple(places), {**options, **{k: x for k, x in own.items() if x is not None}})


def _argument(found: Strategy, params: Any, x: Any) -> Any:
    """Return the placements of an argument after the parameters."""
    leaves, treedef = _tree.flatten(x)
    if isinstance(x, Mapping) and treedef == _tree.flatten(params)[1]:
        return dict(found.state)
    by_path = dict(_tree.named_leaves(params))
    if isinstance(x, Mapping) and by_path and x.keys() == by_path.keys():
        specs = dict(_tree.named_leaves(dict(found.state), is_spec))
        return {
            path: _tree.tree_map(lambda leaf, k=path: _of_state(specs[k], by_path[k], leaf), state)
            for path, state in x.items()
        }
    return _tree.unflatten(treedef, [_of_batch(found.batch, leaf) for leaf in leaves])


def _of_state(spec: P, param: Any, leaf: Any) -> Any:
    """Return the placement of a value that an optimizer keeps of a parameter."""
    return like_parameter(spec, param, leaf) if isinstance(leaf, TENSORS) else None


def _of_batch(batch: P, leaf: Any) -> P | None:
    """Return the placement of an input: of a batch, as many dims as it has."""
    if not isinstance(leaf, TENSORS):
        return None
    return P(*batch.parts[: len(leaf.shape)])
