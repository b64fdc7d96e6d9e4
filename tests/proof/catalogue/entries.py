"""Planted faults: small training steps for torch.distributed, each once with a fault of a public
report, and once right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

Step = Callable[..., Any]


@attrs.frozen
class Entry:
    """A step with a fault, its right twin, and what an audit is to say.

    Args:
        report: where the pattern was reported.
        step: takes `faulty` and the arguments.
        single: the step of one device.
        args: the arguments of both.
        world: the number of ranks.
        mesh: the sizes of the mesh axes.
        names: the parameters that are wrong.
        kind: of what is wrong: a gradient, a parameter after the step, a buffer, a loss.
        ratio: by which they are wrong; None where no number is.
        cause: words of the cause.
    """

    report: str
    step: Step
    single: Step
    args: tuple[Any, ...]
    world: int
    mesh: Mapping[str, int] | None
    names: frozenset[str]
    kind: str
    ratio: float | None
    cause: str

    @property
    def fault(self) -> Step:
        return functools.update_wrapper(functools.partial(self.step, True), self.step)

    @property
    def right(self) -> Step:
        return functools.update_wrapper(functools.partial(self.step, False), self.step)


class Family(list[Entry]):
    """The entries of one file."""

    def __call__(
        self,
        report: str,
        single: Step,
        *args: Any,
        names: str,
        cause: str,
        ratio: float | None = None,
        kind: str = "gradient",
        world: int = 2,
        mesh: Mapping[str, int] | None = None,
    ) -> Callable[[Step], Step]:
        def add(step: Step) -> Step:
            found = frozenset(names.split())
            entry = Entry(report, step, single, args, world, mesh, found, kind, ratio, cause)
            self.append(entry)
            return step

        return add


def numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    """Values of an argument."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def own(x: torch.Tensor, mesh: DeviceMesh | None = None, dim: int = 0) -> torch.Tensor:
    """The part of a tensor of this rank: of the world, or of a mesh of one axis."""
    n = dist.get_world_size() if mesh is None else mesh.size()
    rank = dist.get_rank() if mesh is None else mesh.get_local_rank()
    return x.chunk(n, dim)[rank]


def reduced(
    model: nn.Module, op: Any = dist.ReduceOp.AVG, mesh: DeviceMesh | None = None
) -> nn.Module:
    """Reduce the gradients of a module over the ranks of the world, or of a mesh."""
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, op, group=None if mesh is None else mesh.get_group())
    return model


class Copied(torch.autograd.Function):
    """The identity, whose gradient is summed over a group: the input of a column-parallel layer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class Summed(torch.autograd.Function):
    """The sum over a group, whose gradient is the identity: the output of a row-parallel layer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g, None


class Gathered(torch.autograd.Function):
    """All parts of a dim, whose gradient is this rank's part: all ranks go on with equal values."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        n, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return g.chunk(n, ctx.dim)[rank].contiguous(), None, None


class GatheredOnce(torch.autograd.Function):
    """All parts of a dim, whose gradient is this rank's part of the sum of all ranks': each goes on
    with values of its own.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, dim: int) -> torch.Tensor:
        return Gathered.forward(ctx, x, group, dim)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return Gathered.backward(ctx, g)
