"""A program is compiled once: in a process, in a folder that processes share, and by one of the
ranks that run it.
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
_alive: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def compiled_once(key: str | None, compile_now: Callable[[], Any], note: Callable[[], None]) -> Any:
    """The compiled program of a graph: of an equal graph in this process, or from the folder of
    compilations, or compiled now.

    Args:
        key: of the graph; None if it has none.
        compile_now: compiles it.
        note: counts a compilation.

    Raises:
        SettingsChanged: another thread has changed a setting of torch meanwhile. Nothing is kept.
    """
    if key is None:
        return _compiled(compile_now, note)
    runner = _alive.get(key)
    if runner is None:
        runner = _stored_or_compiled(key, compile_now, note)
        _alive[key] = runner
    return runner


def key_of(
    graph: torch.fx.Graph,
    donated: Sequence[int],
    checked: Sequence[int] = (),
    pairs: Mapping[int, int] | None = None,
) -> str | None:
    """A name for a graph and all that its compilation depends on. None if no text describes it."""
    try:
        written = None if pairs is None else sorted(pairs.items())
        program = [text_of(graph), devices_of(graph.nodes)]
        said = json.dumps([*program, list(donated), list(checked), written])
    except Unwritable as reason:
        log.info("the compilation is not shared: the program has %s", reason)
        return None
    if _compat.has_own_passes():
        return None
    return hashlib.sha256(f"{said}\n{_compat.environment()}".encode()).hexdigest()


def _stored_or_compiled(key: str, compile_now: Callable[[], Any], note: Callable[[], None]) -> Any:
    where = own_folder()
    if where is None:
        return _compiled(compile_now, note)
    runner = _load(where, key)
    if runner is not None:
        return runner
    with where.alone(key):  # another process may be compiling it
        runner = _load(where, key)
        if runner is None:
            runner = _compiled(compile_now, note)
            _store(where, key, runner)
    return runner


def _compiled(compile_now: Callable[[], Any], note: Callable[[], None]) -> Any:
    note()
    runner = compile_now()
    check_settings()
    return runner


def _load(where: Folder, key: str) -> Any | None:
    """A stored compilation, ready to run. None if there is none that can be."""
    found = where.read(key)
    if found is None:
        return None
    try:
        return _compat.Rerun(contents.from_bytes(found), f"shardfn_{key}")
    except Exception as error:  # generated code may raise anything
        where.refuse(key, f"it does not load: {error}")
        return None


def _store(where: Folder, key: str, runner: Any) -> None:
    made = _compat.generated(runner)
    if made is None:
        return
    try:
        where.write(key, contents.to_bytes(made))
    except ValueError as reason:
        log.info("the compilation is not stored: %s", reason)
