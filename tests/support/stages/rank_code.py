"""The ops of code of one rank, traced without Dynamo on a mesh of 2 by 3 simulated ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

import shardfn as sf
from shardfn.capture.shard_map import axis_names
from tests.support.stages.graphs import op_of

AXES = ("dp", "tp")


@contextlib.contextmanager
def mesh_of_ranks(rank: tuple[int, ...] | None = None) -> Iterator[Any]:
    """A mesh of 2 by 3 ranks, in the code of one rank of it."""
    with sf.fake_world(6):
        mesh = sf.make_mesh((2, 3), AXES)
        with axis_names.scope(mesh, "cpu", rank=rank):
            axis_names.enter_mesh("f", mesh, None)
            yield mesh


def ops(fn: Callable[..., Any], *args: torch.Tensor) -> list[str]:
    """The ops of a function with their constants, in order, and the shape of each result."""
    graph = make_fx(fn, tracing_mode="fake")(*args).graph
    calls = [n for n in graph.nodes if n.op == "call_function"]
    return [_said(n) for n in calls if isinstance(n.meta["val"], torch.Tensor)]


def _said(node: torch.fx.Node) -> str:
    constants = [
        str(x)
        for x in node.args
        if not isinstance(x, torch.fx.Node) and not isinstance(x, torch.device)
    ]
    shape = list(node.meta["val"].shape)
    return f"{' '.join([op_of(node), *constants])} -> {shape}"
