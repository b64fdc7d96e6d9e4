"""The exchange of texts between ranks by collectives, without pickle."""

from __future__ import annotations

from typing import Any

import attrs
import torch
import torch.distributed as dist

from ... import _compat


@attrs.frozen
class Texts:
    """Texts between the first rank and the others.

    Args:
        group: a process group; None for this process alone.
    """

    group: Any = None

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return dist.get_rank(self.group) if self.group is not None else 0

    def gather(self, text: str) -> list[str]:
        """The texts of all ranks, on the first one; no texts on the others."""
        if self.group is None:
            return [text]
        mine, lengths = self._packed(text)
        every = self._rows(max(lengths)) if self.rank == 0 else None
        dist.gather(mine, every, group=self.group, group_dst=0)
        return [_text(row[:n]) for row, n in zip(every or [], lengths, strict=False)]

    def scatter(self, texts: list[str]) -> str:
        """The text that the first rank has for this one.

        Args:
            texts: one for each rank, on the first one.
        """
        if self.group is None:
            return texts[0]
        raw = [text.encode() for text in texts]
        sizes = self._integers([len(row) for row in raw] or [0] * self._count())
        dist.broadcast(sizes, group=self.group, group_src=0)
        lengths = sizes.tolist()
        mine = self._row(b"", max(lengths))
        rows = [self._row(row, max(lengths)) for row in raw] or None
        dist.scatter(mine, rows, group=self.group, group_src=0)
        return _text(mine[: lengths[self.rank]])

    def _packed(self, text: str) -> tuple[torch.Tensor, list[int]]:
        """A text in as many bytes as the longest has, and the lengths of all."""
        raw = text.encode()
        mine = self._integers([len(raw)])
        sizes = [torch.empty_like(mine) for _ in range(self._count())]
        dist.all_gather(sizes, mine, group=self.group)
        lengths = torch.cat(sizes).tolist()
        return self._row(raw, max(lengths)), lengths

    def _count(self) -> int:
        return dist.get_world_size(self.group)

    def _integers(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=_compat.device_of_group(self.group))

    def _rows(self, length: int) -> list[torch.Tensor]:
        return [self._row(b"", length) for _ in range(self._count())]

    def _row(self, raw: bytes, length: int) -> torch.Tensor:
        """Bytes as a tensor. Never an empty one, which not every backend sends."""
        padded = bytearray(raw.ljust(max(length, 1), b"\0"))
        row = torch.frombuffer(padded, dtype=torch.uint8)
        return row.to(_compat.device_of_group(self.group))


def _text(row: torch.Tensor) -> str:
    return bytes(row.cpu().numpy()).decode()
