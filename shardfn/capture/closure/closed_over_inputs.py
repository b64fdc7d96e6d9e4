"""Closed-over tensors as inputs of the graph: which they are, their fakes, what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _compat, _tree
from ...errors import CaptureError
from .. import annotations as sources
from ..dtensors import dtensor_values
from ..refusals import leaked_values
from ..shard_map import axis_names as named
from . import closed_over_tensors


def refuse_closed_over_classes(tensors: Sequence[torch.Tensor], name: str) -> None:
    if any(isinstance(x, leaked_values.LeakedTensor) for x in tensors):
        raise leaked_values.leaked(f"{name}, a closed-over tensor")
    wrong = [
        x
        for x in tensors
        if (type(x) not in (torch.Tensor, torch.nn.Parameter) and not isinstance(x, DTensor))
        or _is_around_others(x)
    ]
    if wrong:
        raise CaptureError.of(
            name,
            f"the function closes over a {_compat.class_name(wrong[0])}",
            needed="plain tensors",
            fix="pass this tensor as an argument, which carries its placement",
        )


def _is_around_others(x: torch.Tensor) -> bool:
    """Whether the local tensors of a DTensor are wrapper subclasses."""
    if not isinstance(x, DTensor):
        return False
    local: Any = _compat.local_tensor(x)
    return any(map(_compat.holds_tensors, getattr(local, "shards", [local])))


def fake_of_closed_over(x: torch.Tensor, mode: _compat.FakeTensorMode) -> torch.Tensor:
    """A fake tensor in place of a closed-over tensor, for the trace."""
    if isinstance(x, DTensor):
        return dtensor_values.fake_global_tensor(x, mode)
    fake = mode.from_tensor(x.detach())
    if x.is_meta:
        with mode:
            fake = torch.empty_like(fake, device=named.device())
    return fake.requires_grad_(x.requires_grad)


def closed_over_inputs(
    python: torch.fx.GraphModule, tensors: list[torch.Tensor], positional: Any
) -> closed_over_tensors.ClosedOver:
    """The inputs of Dynamo's graph that are not arguments: the tensors that the function closes
    over.
    """
    known = {id(x) for x in tensors}
    inputs = _compat.codegen_of(python.graph).process_inputs(*positional)
    # a value that Dynamo makes from an argument, such as x.T, is an input of its graph too, and a
    # fake tensor
    rows = zip(inputs, python.graph.find_nodes(op="placeholder"), strict=True)
    _tree.learn(list(inputs))
    subclasses = [
        (x, _compat.opened(x)[1])
        for x in inputs
        if _compat.holds_tensors(x) and not _compat.is_fake(x)
    ]
    rows_of_closed = [
        (x, node)
        for given, node in rows
        for x in _tree.leaves(given)
        if isinstance(x, torch.Tensor)
        and id(x) not in known
        and not _compat.is_fake(x)
        and not known.add(id(x))
    ]
    lines = tuple(
        next(filter(None, (sources.user_line(u) for u in n.users)), None) for _, n in rows_of_closed
    )
    closed = tuple(x for x, _ in rows_of_closed)
    return closed_over_tensors.ClosedOver(closed, lines=lines, holders=tuple(subclasses))
