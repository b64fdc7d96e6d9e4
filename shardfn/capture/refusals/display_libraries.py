"""Libraries that show values or progress, which Dynamo does not trace: what to write instead."""

from __future__ import annotations

import pprint
import re
from collections.abc import Sequence

GOT = "the function calls {}, which would show what the trace computes, not what each call computes"
VALUES = (
    'sf.debug.print("x is {}", x), or sf.debug.callback(show, x), where the function show(x) '
    "calls the library"
)
PROGRESS = (
    "the progress bar around the calls of the function, since a loop in the function is traced "
    'once; to show a value, sf.debug.print("loss is {}", loss), or sf.debug.callback(show, loss)'
)
# a part of the library's files -> its name, and what to write instead
LIBRARIES = {
    pprint.__file__: ("pprint", VALUES),
    "-packages/rich/progress": ("rich", PROGRESS),
    "-packages/rich/": ("rich", VALUES),
    "-packages/tqdm/": ("tqdm", PROGRESS),
}
# Dynamo's texts of classes and methods of tqdm, which it has no frame of (torch 2.13)
TQDM = re.compile(r"^tqdm\w* has a __del__|function `tqdm\w*\.\w+`")


def is_of_display(file: str) -> bool:
    """Check whether a file belongs to a library that shows values or progress."""
    return _library_of(file) is not None


def cause_in_display(files: Sequence[str], text: str) -> tuple[str, str] | None:
    """The problem and the suggestion, if an error comes from a library that shows values.

    Args:
        files: of the frames of the error, the outermost first.
        text: of the error.
    """
    rows = [row for row in map(_library_of, [*files, text]) if row]
    if TQDM.search(text):
        rows.append(("tqdm", PROGRESS))
    if not rows:
        return None
    library, fix = rows[0]
    return GOT.format(library), fix


def _library_of(text: str) -> tuple[str, str] | None:
    """The row of the first library whose files a text names."""
    return next((row for part, row in LIBRARIES.items() if part in text), None)
