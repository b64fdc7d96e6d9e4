"""c10d's collective ops replaced for a world of one process, and their arguments parsed."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

KEYS = ("CPU", "CUDA")
NAMES = (  # ops of c10d
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "allreduce_",
    "allreduce_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "broadcast_",
    "gather_",
    "recv_",
    "recv_any_source_",
    "reduce_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
    "scatter_",
    "send",
)
REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


@contextlib.contextmanager
def kernels_replaced(run: Callable[..., Any]) -> Iterator[None]:
    """Register a kernel for all c10d collectives, for all threads.

    Args:
        run: takes the op, and then its arguments.
    """
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # of a kernel that is replaced
        for name in NAMES:
            packet = getattr(torch.ops.c10d, name, None)
            if packet is None:
                continue
            kernel = functools.partial(run, packet.default)
            for key in KEYS:
                library.impl(name, kernel, key, allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def bound(op: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Bind the arguments of an op to their names, with the defaults."""
    arguments = op._schema.arguments
    names = [x.name for x in arguments]
    given: dict[str, Any] = {}
    for x in arguments:
        if x.has_default_value():
            given[x.name] = x.default_value
    given.update(zip(names, args, strict=False))
    return {**given, **kwargs}


def returned(op: Any, outputs: Any) -> Any:
    """Return what a c10d op returns: a finished Work handle, with the outputs if it has them."""
    from torch._C._distributed_c10d import FakeWork, Work

    work = Work.boxed(FakeWork())
    return (outputs, work) if len(op._schema.returns) > 1 else work


def groups_like(group: Any) -> list[list[int]]:
    """List the ranks of a process group, and those of the groups that other ranks have in its
    place.

    Args:
        group: a process group, as torch's ops take it, or its name.

    Raises:
        AssertionError: its ranks are not in ascending order.
    """
    from torch.distributed._local_tensor import _c10d

    if isinstance(group, str):
        group = torch._C._distributed_c10d._resolve_process_group(group)
    ranks, offsets, *_ = _c10d._prepare_collective_groups(group)  # torch 2.15 leaves out the third
    assert ranks == sorted(ranks)
    return [[first + rank for rank in ranks] for first in offsets]


def reduction_name(op: Any) -> str | None:
    """Return the name of a ReduceOp, such as "SUM". None for an unknown one."""
    if isinstance(op, str):
        return op.upper()
    kind = op.op() if hasattr(op, "op") and callable(op.op) else op
    names = (name for name in REDUCTIONS if getattr(dist.ReduceOp, name) == kind)
    return next(names, None)
