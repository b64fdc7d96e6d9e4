"""One save, step by step: every rank writes its own chunks, the first one also the manifest."""

from __future__ import annotations

import os
from typing import Any

import attrs
import torch

from ..._compat.distributed.checkpoint_plans import Chunk, Held, held_chunks
from . import files, folders, manifest, plan
from .agreed import Steps
from .contents import Contents


@attrs.define
class Writing:
    """A checkpoint that is being written.

    Args:
        root: the folder of all steps.
        found: the tensors and constants.
        number: of the step; None for the one after the newest, until that is known.
        keep: how many steps to keep; None keeps all.
        held: the chunks of this rank, with their values.
        chunks: those of all ranks, on the first one.
    """

    root: str
    found: Contents
    number: int | None
    keep: int | None
    held: list[tuple[Held, torch.Tensor]] = attrs.field(factory=list)
    chunks: list[Chunk] = attrs.field(factory=list)

    def run(self, steps: Steps) -> str:
        """Write it, together with all other ranks.

        Returns:
            The folder of the step.

        Raises:
            Exception: this rank's error, or that of the first rank that failed.
        """
        number, part, places = steps.take(self._hold, self._begin)
        self.number = number
        steps.take(lambda: self._write(part, places), self._finish)
        return folders.folder_of(self.root, number)

    def discard(self) -> None:
        """Remove what was written of a step that failed."""
        if self.number is not None:
            folders.discard(self.root, self.number)

    def _hold(self) -> list[Any]:
        self.held = held_chunks(self.found.tensors)
        return plan.told([chunk for chunk, _ in self.held])

    def _begin(self, rows: list[Any]) -> list[Any]:
        """The chunks that each rank writes, by number; run by the first rank."""
        places, self.chunks = plan.written([plan.heard(row) for row in rows])
        if self.number is None:
            self.number = max(folders.steps(self.root), default=-1) + 1
        folders.begin(self.root, self.number)
        return [[self.number, part, some] for part, some in enumerate(places)]

    def _write(self, part: int, places: Any) -> None:
        name = manifest.file_of(part)
        chunks = plan.numbered(self.held, places, part)
        if chunks:
            tensors = {manifest.key_of(chunk): x for chunk, x in chunks}
            files.write(os.path.join(self._folder(), name), tensors)

    def _finish(self, rows: list[Any]) -> list[Any]:
        """Make the step the newest one; run by the first rank after all have written."""
        assert self.number is not None
        manifest.write(self._folder(), self._manifest(self.number))
        folders.commit(self.root, self.number, self.keep)
        return rows

    def _folder(self) -> str:
        assert self.number is not None
        return folders.folder_of(self.root, self.number, folders.SAVING)

    def _manifest(self, number: int) -> manifest.Manifest:
        of_tensor: dict[str, list[Chunk]] = {name: [] for name in self.found.tensors}
        for chunk in self.chunks:
            of_tensor[chunk.name].append(chunk)
        tensors = {
            name: manifest.Stored(tuple(x.shape), x.dtype, tuple(of_tensor[name]))
            for name, x in self.found.tensors.items()
        }
        return manifest.Manifest(tensors, self.found.constants, number)
