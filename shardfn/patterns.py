"""Patterns for parameter paths (globs and regular expressions), and suggestions for misspelled
names.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

GLOB = re.compile(r"(?<![^.])\*\*\.|\.\*\*\Z|\*\*|\*|\?|\[[^]]+\]|.", re.DOTALL)
PARTS = {  # of a glob, as a regular expression
    "**.": r"(?:.*\.)?",  # any number of names, none included
    ".**": r"(?:\..*)?",
    "**": ".*",
    "*": "[^.]*",  # within one name
    "?": "[^.]",
}
NUMBER = re.compile(r"(?<![^.\[])\d+(?![^.\]])")  # a name that is a number, or one in brackets
NEAR = 3  # names in a suggestion
SHOWN = 4  # names where none is near


def compiled(pattern: str | re.Pattern[str]) -> re.Pattern[str]:
    """A pattern as a regular expression, which has to match a full path.

    Args:
        pattern: a regular expression, or a glob: `*` matches within one name between dots,
            `**` any number of names, `?` one character, `[01]` one of these.

    Returns:
        The regular expression.

    Example:
        >>> bool(compiled("layers.*.weight").fullmatch("layers.0.weight"))
        True
        >>> bool(compiled("layers.*").fullmatch("layers.0.weight"))
        False
        >>> bool(compiled("**.weight").fullmatch("weight"))
        True
    """
    if isinstance(pattern, re.Pattern):
        return pattern
    return re.compile("".join(_part(found[0]) for found in GLOB.finditer(pattern)))


def _part(text: str) -> str:
    """A part of a glob as a regular expression."""
    if text.startswith("[") and len(text) > 1:
        inside = text[1:-1]
        return f"[^{inside[1:]}]" if inside.startswith("!") else text
    return PARTS.get(text, re.escape(text))


def written(pattern: str | re.Pattern[str]) -> str:
    """A pattern as its user wrote it."""
    if isinstance(pattern, str):
        return repr(pattern)
    return f"re.compile({pattern.pattern!r})"


def general(path: str) -> str:
    """A path with `*` for the numbers of layers.

    Example:
        >>> general("layers.0.w1"), general("params[0]['w1']")
        ('layers.*.w1', "params[*]['w1']")
    """
    return NUMBER.sub("*", path)


def parent(path: str) -> str:
    """The path of the module that holds a parameter; "" at the top."""
    return path.rpartition(".")[0]


def near(name: str, names: Iterable[str]) -> list[str]:
    """The names that are written like this one; the first ones where none is."""
    known = list(dict.fromkeys(names))
    return difflib.get_close_matches(name, known, NEAR) or known[:SHOWN]
