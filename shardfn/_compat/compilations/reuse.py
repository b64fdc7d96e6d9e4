"""The order of kernels, and the memory of values that generated code writes over."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


def order_kept(_: Callable[..., Any], nodes: list[Any], *graph: Any) -> list[Any]:
    """Patch Inductor's scheduler: measure the memory that each kernel holds, and keep their order.

    Inductor takes freed memory again where that does not raise the peak, which it must know.

    Args:
        nodes: of Inductor's scheduler.
        graph: the names of its values, loops, inputs and results.
    """
    from torch._inductor.memory import prepare_planning_info

    prepare_planning_info(nodes, *graph)
    return nodes


def writers_kept(_: Callable[..., Any], kernel: Any, *args: Any, **kwargs: Any) -> None:
    """Patch how Inductor computes anew what a kernel reads, once it is fused: also the last writes
    into a buffer, as torch does from 2.15 on.

    A kernel that read the result of a scatter then depended on the buffer before the scatter, and
    ran too early.

    Args:
        kernel: a node of Inductor's scheduler.
        args: for its sizes and loops.
        kwargs: for its sizes and loops.
    """
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch.utils._ordered_set import OrderedSet

    orders = OrderedSet(x for x in kernel.read_writes.reads if isinstance(x, (StarDep, WeakDep)))
    kernel._compute_attrs(*args, **kwargs)
    reads = kernel.read_writes.with_read(orders)
    kernel.set_read_writes(reads.rename(kernel.mutation_renames))


def in_place_decided(original: Callable[[Any], None], loop: Any) -> None:
    """Patch Inductor's choice of values that a loop overwrites: those that no later op reads.

    An update of a donated parameter runs after all loops that read the parameter. Inductor counts
    it as a reader of their results, so that no loop could write over those.

    Args:
        original: of torch.
        loop: a node of Inductor's scheduler.
    """
    known = loop.scheduler.name_to_buf
    read = {x.name for x in loop.read_writes.reads}
    with contextlib.ExitStack() as stack:
        for name in sorted(read & known.keys()):
            stack.enter_context(_only_readers(known[name]))
        original(loop)


@contextlib.contextmanager
def _only_readers(value: Any) -> Iterator[None]:
    """Hide the users of a value that run later, inside this context."""
    name, users = value.get_name(), value.users
    value.users = [user for user in users if _reads(user, name)]
    try:
        yield
    finally:
        value.users = users


def _reads(user: Any, name: str) -> bool:
    """Return whether a scheduler node reads a value or an alias of it."""
    if not user.is_weak:
        return True
    return name in user.node.used_or_aliased_buffer_names()
