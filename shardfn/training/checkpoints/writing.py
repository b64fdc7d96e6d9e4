"""The steps of one save: every rank writes its items, and the first rank the metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from ..._compat.distributed.checkpoint_plans import GlobalSave, LocalSave, global_save, sizes_of
from . import folders
from .agreed import Steps
from .contents import tensors_of


@attrs.define
class Writing:
    """A checkpoint that is being written.

    Args:
        root: the folder of all steps.
        state: tensors and values by name.
        number: of the step; None for the one after the newest, until that is known.
        keep: how many steps to keep; None keeps all.
        whole: what all ranks write, on the first one.
    """

    root: str
    state: Mapping[str, Any]
    number: int | None
    keep: int | None
    whole: GlobalSave | None = None

    def run(self, steps: Steps) -> str:
        """Write it, together with all other ranks.

        Returns:
            The folder of the step.

        Raises:
            Exception: this rank's error, or that of the first rank that failed.
        """
        is_first = steps.texts.rank == 0
        local = LocalSave(self.state if is_first else tensors_of(self.state))
        self.number, places = steps.take(local.rows, self._begin)
        folder = folders.folder_of(self.root, self._number, folders.SAVING)

        def write() -> list[list[int]]:
            return local.write(folder, steps.texts.rank, sizes_of(places))

        def finish(results: list[Any]) -> list[Any]:
            assert self.whole is not None
            self.whole.finish(folder, results)
            folders.commit(self.root, self._number, self.keep)
            return results

        steps.take(write, finish)
        return folders.folder_of(self.root, self._number)

    def discard(self) -> None:
        """Remove what was written of a step that failed."""
        if self.number is not None:
            folders.discard(self.root, self.number)

    def _begin(self, rows: list[Any]) -> list[Any]:
        """What each rank writes; run by the first rank."""
        self.whole = global_save(rows)
        if self.number is None:
            self.number = max(folders.steps(self.root), default=-1) + 1
        folders.begin(self.root, self.number)
        return [[self.number, places] for places in self.whole.places]

    @property
    def _number(self) -> int:
        assert self.number is not None
        return self.number
