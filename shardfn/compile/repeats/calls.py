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


@torch.library.custom_op("shardfn::call_block", mutates_args={"written"})
def call_block(
    read: Sequence[torch.Tensor], written: Sequence[torch.Tensor], number: int
) -> list[torch.Tensor]:
    """Run a block on its operands. Inductor's code calls the function of its kind instead."""
    raise AssertionError("only compiled code calls a block")


@call_block.register_fake
def _(
    read: Sequence[torch.Tensor], written: Sequence[torch.Tensor], number: int
) -> list[torch.Tensor]:
    return [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        for x in _KINDS.get()[number].results
    ]


CALL = torch.ops.shardfn.call_block.default
