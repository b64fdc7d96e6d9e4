"""The log of the compilation stages. Each stage writes a line under TORCH_LOGS=shardfn, writes an
artefact under TORCH_TRACE, and shows progress while the stage runs.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from . import _compat
from .durations import human_seconds
from .progress import progress

log = logging.getLogger("shardfn")
# what a stage is about while it runs
STAGES = {
    "capture": "capturing",
    "replay": "capturing",
    "choose": "choosing placements of",
    "partition": "planning",
    "schedule": "scheduling",
    "compile": "compiling",
    "run": "running",
}
Note = Callable[..., None]


@contextlib.contextmanager
def stage(kind: str, name: str, *, is_awaited: bool = True) -> Iterator[Note]:
    """Log a stage of a function when it ends, and show progress if it takes long.

    Args:
        kind: a row of STAGES.
        name: of the function.
        is_awaited: whether somebody waits for it; work in the background shows no progress.

    Returns:
        A context, with a function that takes what the line shows of the result: numbers by what
        they count, as `note(nodes=12)`.
    """
    facts: dict[str, int] = {}
    start = time.perf_counter()
    with progress(f"{STAGES[kind]} {name}") if is_awaited else contextlib.nullcontext():
        yield facts.update
    if log.isEnabledFor(logging.INFO):
        took = human_seconds(time.perf_counter() - start)
        rows = [f"{word} {n:,}" for word, n in facts.items()]
        log.info("%s", ", ".join([f"{kind} {name}: {took}", *rows]))


def artefact(kind: str, name: str, text: Callable[[], str]) -> None:
    """Write a text of a stage to torch's structured trace, and to the log where it is verbose.

    Args:
        kind: of the text, such as "captured_program".
        name: of the function.
        text: writes it, if somebody reads it.
    """
    _compat.trace_artifact(f"shardfn_{kind}", text)
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s of %s\n%s", kind.replace("_", " "), name, text())
