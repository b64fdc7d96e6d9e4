"""The check that all ranks read the same batch."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist

from ...errors import DivergenceError, listed
from ...mesh import ranks_of
from ...world import current_world

END, BATCH, FAILED = range(3)
LONGEST = 2048  # bytes of a text that another rank quotes


@attrs.frozen
class Ranks:
    """The ranks of a mesh, which compare small numbers.

    Args:
        ranks: in the job.
        group: a process group of their own, on the host.
    """

    ranks: tuple[int, ...]
    group: Any

    def agree(self, number: int, status: int, sample: int, text: str) -> None:
        """Check that all ranks have read the same batch, or are at the end.

        Args:
            number: of the batch in its pass, from 0.
            status: END, BATCH or FAILED, of this rank.
            sample: of the batch.
            text: its shapes.

        Raises:
            DivergenceError: names the ranks that differ.
        """
        mine = torch.tensor([status, number, sample, zlib.crc32(text.encode())])
        every = [torch.empty_like(mine) for _ in self.ranks]
        dist.all_gather(every, mine, group=self.group)
        if all(torch.equal(row, every[0]) for row in every) and status != FAILED:
            return
        rows = [row.tolist() for row in every]
        raise different(self.ranks, rows, self._texts(text))

    def _texts(self, text: str) -> list[str]:
        """The texts of all ranks. They travel as bytes: nothing of a peer is unpickled."""
        mine = torch.zeros(LONGEST, dtype=torch.uint8)
        raw = text.encode()[:LONGEST]
        mine[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in self.ranks]
        dist.all_gather(every, mine, group=self.group)
        parts = [bytes(row.tolist()).rstrip(b"\0") for row in every]
        return [part.decode(errors="ignore") for part in parts]


def ranks_that_compare(mesh: Any) -> Ranks | None:
    """The ranks of a mesh with a group of their own; None where there is one process."""
    if current_world().kind != "real" or mesh.size() == 1:
        return None
    ranks = tuple(ranks_of(mesh))
    group = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
    return Ranks(ranks, group)


def different(
    ranks: Sequence[int], rows: Sequence[Sequence[int]], texts: Sequence[str]
) -> DivergenceError:
    """The error for ranks that read other batches.

    Args:
        ranks: of the mesh.
        rows: of each: status, number and sample.
        texts: of each.
    """
    number = max(row[1] for row in rows)
    where = f"loader, batch {number}"
    by_status: dict[int, list[int]] = {END: [], BATCH: [], FAILED: []}
    for rank, row in zip(ranks, rows, strict=True):
        by_status[row[0]].append(rank)
    if failed := by_status[FAILED]:
        text = texts[ranks.index(failed[0])]
        got = f"{listed(failed)}: {text}"
        return DivergenceError.of(where, got, fix="read the error message of the failed rank")
    if by_status[END]:
        some, none = listed(by_status[BATCH]), listed(by_status[END])
        got = f"the batch exists on {some}, but not on {none}"
        needed = "the same number of batches on every rank"
        fix = "use a loader of global batches, which are the same on every rank"
        return DivergenceError.of(where, got, needed=needed, fix=fix)
    return _of_values(where, ranks, rows, texts)


def _of_values(
    where: str, ranks: Sequence[int], rows: Sequence[Sequence[int]], texts: Sequence[str]
) -> DivergenceError:
    """The error for ranks whose batches differ."""
    other = next(i for i, row in enumerate(rows) if row != rows[0])
    first, second = ranks[0], ranks[other]
    lines = [f"rank {first}: {texts[0]}", f"rank {second}: {texts[other]}"]
    if texts[0] == texts[other]:
        lines = [f"ranks {first} and {second} read different values: {texts[0]}"]
    needed = "the same global batch on every rank"
    fix = (
        "use the same seed on every rank, no DistributedSampler, and a collate_fn that pads to "
        "one length"
    )
    return DivergenceError.of(where, *lines, needed=needed, fix=fix)
