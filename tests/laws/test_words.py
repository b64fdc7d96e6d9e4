"""Docstrings and comments use the field's words: what another word stood for is said no more."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sizes import PACKAGE, ROOT, files

INSTEAD = {
    r"whole (tensor|value|input|array)s?": "global tensor",
    r"pending (sum|mean)s?": "Partial sum",
    r"(is|are|stays?|be|leaves) pending": "is Partial",
    r"anew": "again; retraced",
    r"once more": "again",
    r"(is|are|was|were|be|been) cut (on|over|by)": "is sharded on, over",
    r"behind the loop": "after the loop",
    r"comput(e|es|ed) (again|whole)": "recompute; replicated",
}
NO_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def prose(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring, without its examples, and of every comment."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, NO_DOCSTRING) and (doc := ast.get_docstring(node)):
            said = doc.partition("Example:")[0]
            yield node.body[0].lineno, re.sub(r"`[^`]*`", "", said)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def dialect(path: Path) -> list[str]:
    """The places of a file that use a word which the glossary replaces."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {found[0]!r}; say {word!r}"
        for line, said in prose(path.read_text())
        for pattern, word in INSTEAD.items()
        for found in [re.search(rf"\b{pattern}\b", " ".join(said.split()))]
        if found
    ]


@pytest.mark.parametrize(
    "folder",
    sorted({p.parent for p in files(PACKAGE)}),
    ids=lambda p: p.relative_to(ROOT).as_posix(),
)
def test_docstrings_and_comments_use_the_words_of_the_field(folder: Path) -> None:
    bad = [line for path in sorted(folder.glob("*.py")) for line in dialect(path)]
    assert not bad, "\n  ".join(["", *bad])
