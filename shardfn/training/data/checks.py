"""Checks of the arguments of `loader`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DistributedSampler

from ... import _tree
from ...accepted import described
from ...errors import CheckpointError, PlacementError, ShardError
from ...mesh import axes_of
from ...placement import P, is_spec, names_of, stages_in
from .sources import is_indexed

STATE = {"epoch": int, "batch": int, "sample": int, "seed": int, "generators": list}


def check_data(data: Any) -> None:
    """Check that data are global batches.

    Raises:
        ShardError: a sampler shards them already.
    """
    batches = getattr(data, "batch_sampler", None)
    samplers = getattr(data, "sampler", None), getattr(batches, "sampler", None)
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise ShardError.of(
            "loader, data",
            "the sampler is a DistributedSampler, which already shards the samples",
            needed="global batches, which are the same on every rank",
            fix="DataLoader(dataset, batch_size=the size of the global batch, shuffle=True)",
            arg_path="data",
        )


def check_axes(placements: Any, mesh: Any) -> None:
    """Check that placements are placements on this mesh.

    Raises:
        PlacementError: lists those that are not.
    """
    axes = axes_of(mesh)
    wrong = []
    for spec in _tree.flatten(placements, is_spec)[0]:
        if not is_spec(spec):
            wrong.append(f"{described(spec)}, is not a placement")
        elif isinstance(spec, P):
            named = [name for names in names_of(spec) for name in names]
            unknown = [repr(name) for name in named if name not in axes.names]
            if unknown:
                got = f"{spec} names axis {', '.join(unknown)}; the mesh has {axes}"
                wrong.append(got)
        try:
            stages_in(spec, axes)
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise PlacementError.of(
            "loader, placements",
            *wrong,
            fix=f"P({axes.names[0]!r})",
            mesh=mesh,
            arg_path="placements",
        )


def check_rows(data: Any, placements: Any, rows: P | None) -> None:
    """Check that a rank can read its rows only.

    Raises:
        PlacementError: the data have no indices, or the placements no common rows.
    """
    wrong = []
    if not is_indexed(data):
        wrong.append(f"data is {described(data)}, which cannot be indexed by row number")
    if rows is None:
        wrong.append(
            f"placements is {placements}, which does not shard dim 0 of every tensor in the same "
            "way"
        )
    if wrong:
        raise PlacementError.of(
            "loader, rows=True",
            *wrong,
            needed="a DataLoader with a batch size over an indexed dataset, and placements that "
            "shard dim 0 of every tensor in the same way",
            fix="rows=None",
            arg_path="rows",
        )


def check_state(state: Any, generators: int, is_stateful: bool) -> None:
    """Check that a state is one of a loader like this.

    Raises:
        CheckpointError: it is not.
    """
    where = "loader.load_state_dict"
    needed = "a state of an sf.loader over the same data"
    lines = []
    if not isinstance(state, Mapping):
        lines.append(f"it is {described(state)}")
    else:
        lines += [
            f"{key} is {described(state.get(key))}, not a {kind.__name__}"
            for key, kind in STATE.items()
            if not isinstance(state.get(key), kind)
        ]
    if not lines and len(state["generators"]) != generators:
        count = len(state["generators"])
        lines.append(f"the state has {count} generators, but the data have {generators}")
    if not lines and state.get("data") is not None and not is_stateful:
        lines.append(
            "the state includes a state of the data, but the loader's data have no state to restore"
        )
    if lines:
        raise CheckpointError.of(where, *lines, needed=needed)
