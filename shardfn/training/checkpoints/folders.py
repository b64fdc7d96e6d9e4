"""Where checkpoints lie in their folder, and which of them are complete.

A checkpoint is written into `step-N.saving`, which becomes `step-N` when it is complete. A process
that is killed leaves a `.saving`, and the checkpoints before it as they were.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil

from ..._compat.distributed.checkpoint_files import METADATA

SAVING = ".saving"
ENDINGS = ("", SAVING)  # of the folder of a step: the first that is complete counts
_STEP = re.compile(r"step-(\d+)")


def folder_of(root: str, step: int, ending: str = "") -> str:
    """Return the path of a step's folder."""
    return os.path.join(root, f"step-{step:08d}{ending}")


def is_complete(folder: str) -> bool:
    """Whether a folder holds a checkpoint that was written to its end."""
    return os.path.isfile(os.path.join(folder, METADATA))


def complete(root: str, step: int) -> str | None:
    """Return the complete folder of a step, or None."""
    folders = [folder_of(root, step, ending) for ending in ENDINGS]
    return next(filter(is_complete, folders), None)


def steps(root: str) -> list[int]:
    """List the complete steps in order."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = [name.split(".")[0] for name in os.listdir(root)]
        numbers = {int(m[1]) for m in map(_STEP.fullmatch, names) if m}
        return [step for step in sorted(numbers) if complete(root, step)]
    return []


def begin(root: str, step: int) -> None:
    """Make the empty folder that a step is written to."""
    folder = folder_of(root, step, SAVING)
    if complete(root, step) == folder:  # a process was killed before it renamed the folder
        _replace(root, step)
    _remove(folder)
    os.makedirs(folder)


def commit(root: str, step: int, keep: int | None) -> None:
    """Rename the written folder to its step, and remove older steps.

    Args:
        root: the folder of all steps.
        step: a step whose `.saving` is complete.
        keep: how many steps to keep; None keeps all.
    """
    _sync(folder_of(root, step, SAVING))
    _replace(root, step)
    for gone in steps(root)[: -keep if keep else 0]:
        for ending in ENDINGS:
            _remove(folder_of(root, gone, ending))


def discard(root: str, step: int) -> None:
    """Remove what was written of a step that failed."""
    folder = folder_of(root, step, SAVING)
    if not is_complete(folder):
        _remove(folder)


def _replace(root: str, step: int) -> None:
    """Rename the written folder. Until then it counts once the old one is removed."""
    _remove(folder_of(root, step))
    os.rename(folder_of(root, step, SAVING), folder_of(root, step))


def _remove(folder: str) -> None:
    """Remove a folder, the metadata first: a part of a checkpoint never counts as complete."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.unlink(os.path.join(folder, METADATA))
    shutil.rmtree(folder, ignore_errors=True)


def _sync(folder: str) -> None:
    """Flush the directory entries of a folder to disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
