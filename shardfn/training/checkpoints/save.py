"""`save`: write a tree of tensors and constants as a checkpoint."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from ... import _compat
from ..._compat.distributed.checkpoint_plans import import_writer
from ...accepted import accept
from ...errors import CheckpointError
from ...jobs.beside import checkpointing, connections_noted
from ...world import current_world
from .agreed import Steps, job_texts
from .contents import contents
from .targets import refuse_without_values
from .texts import Texts
from .writing import Writing


class Saving:
    """A checkpoint that `sf.save` writes in the background.

    Args:
        work: the function that writes the checkpoint and returns its folder.

    Example:
        >>> import tempfile, torch, shardfn as sf
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saving = sf.save(folder, {"w": torch.ones(2)}, background=True)
        ...     saving.wait().endswith("step-00000000")
        True
    """

    def __init__(self, work: Callable[[], str]) -> None:
        self._result = ""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,))
        self._thread.start()

    def _run(self, work: Callable[[], str]) -> None:
        try:
            self._result = work()
        except BaseException as error:  # raised by wait
            self._error = error

    def is_done(self) -> bool:
        """Whether writing has ended: the checkpoint is complete, or writing it has failed."""
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait until the checkpoint is complete, or until writing the checkpoint has failed.
        `finish` does not raise the error of a failed write; `wait` does.
        """
        self._thread.join()

    def wait(self) -> str:
        """Wait until the checkpoint is complete.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result


# The last save in the background of each folder, while it is written.
_running: WeakValueDictionary[str, Saving] = WeakValueDictionary()


@_compat.outside_only
def save(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    step: int | None = None,
    keep: int | None = None,
    background: bool = False,
) -> Any:
    """Write a tree of tensors and constants to a checkpoint folder, as one step.

    Only one rank writes each chunk of a tensor. If a process is killed during a save, the steps
    saved earlier stay unchanged.

    Args:
        path: the checkpoint folder, which holds all steps, and to which every rank must have
            access.
        tree: a pytree of DTensors, ordinary tensors (the same on every rank), numbers, text, None,
            and objects with `state_dict` and `load_state_dict`.
        step: the number of the step; by default, the number after the newest step. A saved step
            with the same number is replaced.
        keep: the number of steps to keep in the folder; older steps are deleted. By default, `save`
            keeps all steps in the folder.
        background: whether to copy the tensors, return at once, and write the checkpoint in a
            thread. Earlier saves of this process to the same folder are written first.

    Returns:
        The folder of the step. With `background`, `save` returns a `Saving`, whose `wait` returns
        the folder of the step.

    Raises:
        CheckpointError: a leaf cannot be saved, or the folder cannot be written.
        FakeValueError: the simulated world computes no values (`numerics=False`).

    Source: torch.distributed.checkpoint.save; orbax.checkpoint.

    Example:
        >>> import tempfile, torch, shardfn as sf
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = sf.save(folder, {"w": torch.ones(2), "epoch": 3}, step=7)
        ...     sf.load(folder, {"w": sf.ShapeDtype((2,)), "epoch": 0})
        {'w': tensor([1., 1.]), 'epoch': 3}
    """
    accept("save", path=path, step=step, keep=keep, background=background)
    root = os.path.abspath(os.fspath(path))
    refuse_without_values("save")
    state = contents(tree)
    before = _running.get(root)
    if not background:
        if before is not None:
            before.finish()
        return _saved(root, state, step, keep, job_texts())
    state = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in state.items()}
    import_writer()  # not in the thread: a child forked during an import can never load the module
    # Collectives of the job go on meanwhile, in their own group.
    group = None if job_texts().group is None else _group_of_its_own()

    def work() -> str:
        if before is not None:
            before.finish()
        try:
            return _saved(root, state, step, keep, Texts(group), is_background=True)
        finally:
            if group is not None:
                dist.destroy_process_group(group)

    saving = _running[root] = Saving(work)
    return saving


def _group_of_its_own() -> Any:
    seconds = _compat.timeout_of(dist.group.WORLD)
    timeout = None if seconds is None else timedelta(seconds=seconds)
    with connections_noted():
        return dist.new_group(backend="gloo", timeout=timeout)


def _saved(
    root: str,
    state: Mapping[str, Any],
    step: int | None,
    keep: int | None,
    texts: Texts,
    *,
    is_background: bool = False,
) -> str:
    """The folder of the step that was written.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    writing = Writing(root, state, step, keep)
    watched = checkpointing(current_world(), "save", is_background=is_background)
    try:
        with watched:
            return writing.run(Steps("save", texts))
    except OSError as error:
        writing.discard()
        fix = "free disk space, or use another folder; earlier checkpoints are unchanged"
        got = f"{root} cannot be written"
        raise CheckpointError.of("save", got, str(error), fix=fix) from None
