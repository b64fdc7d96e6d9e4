"""The ops that stand for a block in the program around it, until Inductor calls its function."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch


@attrs.frozen(eq=False)
class Kind:
    """A block as a graph of its own, which is compiled once and called for each copy.

    Args:
        number: of the text of the graph, equal in every process.
        graph: from operands to results. Some operands are written to.
        results: fake tensors like its results.
    """

    number: int
    graph: torch.fx.Graph
    results: tuple[torch.Tensor, ...]


_KINDS: contextvars.ContextVar[Mapping[int, Kind]] = contextvars.ContextVar("shardfn_kinds")


@contextlib.contextmanager
def known(kinds: Mapping[int, Kind]) -> Iterator[None]:
    """Enter a context in which calls find the results of their kinds by number."""
    token = _KINDS.set(kinds)
    try:
        yield
    finally:
        _KINDS.reset(token)


_LIBRARY = torch.library.Library("shardfn", "FRAGMENT")
_LIBRARY.define("call_block(Tensor[] read, Tensor(a!)[] written, int number) -> Tensor[]")
CALL = torch.ops.shardfn.call_block.default


@torch.library.register_fake("shardfn::call_block", lib=_LIBRARY)
def _(
    read: Sequence[torch.Tensor], written: Sequence[torch.Tensor], number: int
) -> list[torch.Tensor]:
    return [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        for x in _KINDS.get()[number].results
    ]
