"""Loops for which Inductor need not write code: those that never run, and those it has written.

A loop over vectors leaves a rest, and Inductor writes the code of the rest also where nothing is
left: it drops the text at the end. And where loops of different steps cannot share an outer one,
it writes all of them again. Together that is half of the code that it writes for a transformer
(torch 2.13).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .. import threads

RESTS = ("tail_size", "outer_tail_size")  # of a kernel: in its inner and outer loop


def body_written(original: Callable[..., None], node: Any, places: Sequence[Any]) -> None:
    """Write the body of an op into the kernel that Inductor writes, unless that never runs.

    Args:
        original: of torch.
        node: of Inductor's scheduler.
        places: the variables of its loops.
    """
    from torch._inductor.virtualized import V

    if not is_empty(V.kernel):
        original(node, places)


def is_empty(kernel: Any) -> bool:
    """Whether a kernel is for a rest of no elements."""
    rests = [getattr(kernel, name, None) for name in RESTS]
    return any(rest is not None and rest == 0 for rest in rests)


@contextlib.contextmanager
def loops_written_once() -> Iterator[None]:
    """A context in which this thread writes loops once that cannot share an outer one."""
    from torch._inductor.codegen.cpp import CppKernelProxy, CppScheduling

    mine = threads.only_here()
    known: dict[tuple[Any, ...], Any] = {}  # what code depends on -> what was written

    def tried(original: Any, scheduling: Any, node: Any) -> None:
        known.clear()
        original(scheduling, node)
        known.clear()

    def written(original: Any, proxy: Any, nodes: Sequence[Any]) -> None:
        key = _key(proxy.kernel_group, nodes)
        if key in known:
            _adopt(proxy, known[key])
            return
        original(proxy, nodes)
        if not _has_local_buffers():
            known[key] = proxy

    with (
        threads.overridden(CppScheduling, "codegen_outer_loop_node", tried, mine),
        threads.overridden(CppKernelProxy, "codegen_nodes", written, mine),
    ):
        yield


def _key(group: Any, nodes: Sequence[Any]) -> tuple[Any, ...]:
    """All that the code of loops depends on within one kernel: the ops, and which of their buffers
    share memory with others.
    """
    reads_and_writes = [node.read_writes.reads_and_writes() for node in nodes]
    names = {dependency.name for found in reads_and_writes for dependency in found}
    shared = names & group.args.inplace_buffers.keys()
    return (id(group), *map(id, nodes), *sorted(shared))


def _adopt(proxy: Any, written: Any) -> None:
    """Give a new kernel the loops of one that is not used."""
    vars(proxy).update(vars(written))
    proxy.loop_nest.set_kernel(proxy)


def _has_local_buffers() -> bool:
    """Whether the code that is written keeps values in buffers of its own."""
    from torch._inductor.virtualized import V

    return bool(getattr(V.local_buffer_context, "local_buffers", None))
