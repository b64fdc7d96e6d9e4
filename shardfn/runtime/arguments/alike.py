"""Arguments that a gradient takes for the same on all ranks: each call of a simulated world checks
that they are, and the first call of real ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from ... import _compat
from ...capture import Captured
from ...errors import DivergenceError
from ...ops import shard_map
from ...ops.loops import inner_nodes
from ...ops.prims import CALLS, constants_of
from ...ops.text_formats import parse_axes, parse_paths
from ...simulated import SimulatedTensor
from ..agreement import digest_of, gathered, has_others
from ..options import Request
from ..store import Compared
from .placed import Placed


@attrs.frozen
class Alike:
    """An argument that is taken for the same on all ranks of some axes."""

    path: str
    position: int  # among the leaves of the arguments
    axes: tuple[str, ...]
    source: str | None  # the user's line


@attrs.frozen(eq=False)
class Check:
    """The arguments of a program that must be the same on all ranks, and whether they are."""

    request: Request
    placed: Placed
    rows: tuple[Alike, ...]
    compared: Compared = attrs.field(factory=Compared)

    def run(self, leaves: list[Any]) -> None:
        """Compare the arguments of a call.

        Raises:
            DivergenceError: one differs. Names it.
        """
        if self.compared.is_done:
            return
        _check(self.request, self.placed, self.rows, leaves)
        is_real = self.placed.world.kind == "real"
        is_once = os.environ.get("SHARDFN_CHECK") != "1"
        self.compared.is_done = is_real and is_once


def check_of(request: Request, placed: Placed, captured: Captured) -> Check | None:
    """The check of a program's arguments. Nothing if none must be the same on all ranks."""
    rows = _rows(captured.program.graph.graph, placed)
    is_simulated = placed.world.kind == "simulated"
    if not rows or not (has_others(placed) or is_simulated):
        return None
    return Check(request, placed, tuple(rows))


def _rows(graph: torch.fx.Graph, placed: Placed) -> list[Alike]:
    """The arguments that the gradients of a program take for the same, each once."""
    op = CALLS[shard_map.as_alike].op
    found: dict[Any, Alike] = {}
    for node in inner_nodes(graph):
        if node.target is not op:
            continue
        axes, paths = constants_of(node)
        known = [path for path in parse_paths(paths) if path in placed.paths]
        for path in known:
            row = Alike(path, placed.paths.index(path), parse_axes(axes), node.meta.get("source"))
            found.setdefault((row.path, row.axes), row)
    return [*found.values()]


def _check(request: Request, placed: Placed, rows: Sequence[Alike], leaves: list[Any]) -> None:
    """Compare the arguments of all ranks."""
    locals_ = [_compat.local_tensor(leaves[row.position]) for row in rows]
    if placed.world.kind == "real":
        mine = [digest_of(x) for x in locals_]
        everyone = gathered(request.name, "arguments that are the same", mine)
        columns = list(zip(*everyone, strict=True))
    else:
        columns = [_simulated(x) for x in locals_]
    for row, values in zip(rows, columns, strict=True):
        for group in _groups(placed.mesh, row.axes):
            _compare(request, row, group, values)


def _simulated(x: Any) -> Sequence[Any]:
    """The tensors of all ranks, or their one tensor."""
    return x.shards if isinstance(x, SimulatedTensor) else ()


def _groups(mesh: Any, axes: tuple[str, ...]) -> list[list[int]]:
    """The places in a mesh of the ranks of each group of some axes."""
    names = list(mesh.mesh_dim_names)
    inner = [names.index(axis) for axis in axes]
    outer = [k for k in range(len(names)) if k not in inner]
    places = torch.arange(mesh.size()).view(mesh.shape).permute(*outer, *inner)
    count = places[(0,) * len(outer)].numel()
    return places.reshape(-1, count).tolist()


def _compare(request: Request, row: Alike, group: Sequence[int], values: Sequence[Any]) -> None:
    """Compare an argument of the ranks of a group.

    Raises:
        DivergenceError: it differs.
    """
    first, *others = group
    wrong = [k for k in others if values and not _same(values[first], values[k])]
    if not wrong:
        return
    over = ", ".join(row.axes)
    raise DivergenceError.of(
        f"{request.name}, argument {row.path}",
        f"it differs between rank {first} and rank {wrong[0]}, and meets DTensor.to_local of a "
        "replicated DTensor, whose gradient is then taken for the same on all ranks",
        needed=f"the same on all ranks of {over}",
        fix="to_local(grad_placements=[Partial()]) for the sum of the gradients of all ranks, or "
        f"full_tensor with it; or DTensor.from_local({row.path}, mesh, placements)",
        source=row.source,
        arg_path=row.path,
    )


def _same(a: Any, b: Any) -> bool:
    """Whether two ranks have the same: tensors, where nan equals nan, or digests."""
    if isinstance(a, torch.Tensor):
        return a is b or (a.shape == b.shape and digest_of(a) == digest_of(b))
    return a == b
