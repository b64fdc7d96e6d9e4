"""`compiled_once`: each program is compiled once in a process, in a disk cache that processes
share, and by one of the ranks that run it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .. import _compat
from .._compat.compilations.undisturbed import check_settings
from ..stored import Folder, contents, own_folder
from .text import Unwritable, devices_of, text_of

log = logging.getLogger("shardfn")
_runners: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def compiled_once(key: str | None, compile_now: Callable[[], Any], note: Callable[[], None]) -> Any:
    """Return the runner of a graph: of an equal graph in this process, or from the disk cache, or
    compiled now.

    Args:
        key: of the graph; None if it has none.
        compile_now: compiles it.
        note: counts a compilation.

    Raises:
        SettingsChanged: another thread has changed a setting of torch meanwhile. Nothing is kept.
    """
    if key is None:
        return _compile_counted(compile_now, note)
    runner = _runners.get(key)
    if runner is None:
        runner = _load_or_compile(key, compile_now, note)
        _runners[key] = runner
    return runner


def key_of(
    graph: torch.fx.Graph,
    donated: Sequence[int],
    checked: Sequence[int] = (),
    pairs: Mapping[int, int] | None = None,
) -> str | None:
    """Hash a graph and all that its compilation depends on. None if no text describes the graph."""
    try:
        donation_pairs = None if pairs is None else sorted(pairs.items())
        program = [text_of(graph), devices_of(graph.nodes)]
        text = json.dumps([*program, list(donated), list(checked), donation_pairs])
    except Unwritable as reason:
        log.info("ranks do not share the compilation, because the program has %s", reason)
        return None
    if _compat.has_own_passes():
        return None
    return hashlib.sha256(f"{text}\n{_compat.environment()}".encode()).hexdigest()


def _load_or_compile(key: str, compile_now: Callable[[], Any], note: Callable[[], None]) -> Any:
    """Read a compilation from the disk cache, or compile and store it, while other
    processes wait.
    """
    folder = own_folder()
    if folder is None:
        return _compile_counted(compile_now, note)
    runner = _load(folder, key)
    if runner is not None:
        return runner
    with folder.alone(key):  # another process may be compiling it
        runner = _load(folder, key)
        if runner is None:
            runner = _compile_counted(compile_now, note)
            _store(folder, key, runner)
    return runner


def _compile_counted(compile_now: Callable[[], Any], note: Callable[[], None]) -> Any:
    """Compile, count the compilation, and check that no thread changed a setting of torch
    meanwhile.
    """
    note()
    runner = compile_now()
    check_settings()
    return runner


def _load(folder: Folder, key: str) -> Any | None:
    """Load a stored compilation. Return None if there is none, or it does not load."""
    stored = folder.read(key)
    if stored is None:
        return None
    try:
        return _compat.Rerun(contents.from_bytes(stored), f"shardfn_{key}")
    except Exception as error:  # generated code may raise anything
        folder.refuse(key, f"it does not load: {error}")
        return None


def _store(folder: Folder, key: str, runner: Any) -> None:
    """Write a compilation into the disk cache, if it can be stored."""
    code = _compat.generated(runner)
    if code is None:
        return
    try:
        folder.write(key, contents.to_bytes(code))
    except ValueError as reason:
        log.info("the compilation is not cached on disk: %s", reason)
