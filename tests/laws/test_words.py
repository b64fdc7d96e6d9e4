"""Docstrings, comments and messages use the glossary's words, and none that it replaces."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.reading.sizes import PACKAGE, ROOT, files

INSTEAD = {
    r"whole (tensor|value|input|array|batche?)s?": "global tensor",
    r"(is|are|stays?|keeps?|kept|leaves?|left|held|everything) whole": "replicated; one op",
    r"comput(e|es|ed) (again|whole)": "recompute; replicated",
    r"pending": "Partial",
    r"(?<!minimum )(cut|cuts|cutting)": "shard, split",
    r"pieces?": "shard, chunk",
    r"brought": "redistributed",
    r"anew": "again; retraced",
    r"once more": "again",
    r"behind": "after",
    r"nobody": "no rank, no op",
    r"wish|wishes": "bucketing options",
    r"rides?|riding|riders?": "a fused small reduction",
    r"(is|are|was|were) asked": "name the caller",
    r"errors call": "the name in errors",
    r"takes? apart|taken apart": "decompose",
    r"that which|What": "name the thing",
    r"(?<!there )(is|are) no (?!longer|more|worse|less)\w+": "is not a; must be a",
}
# Where the old word is the field's, or is quoted.
ALLOWED = {PACKAGE / "_compat" / "patches.py"}
NO_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
ENTRY = re.compile(r"(?m)^ {4}\w+:")  # an argument's name, under Args


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Every docstring."""
    for node in ast.walk(tree):
        if isinstance(node, NO_DOCSTRING) and ast.get_docstring(node) is not None:
            yield node.body[0].value


def prose(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring, without its examples, and of every comment."""
    for doc in docstrings(ast.parse(text)):
        said = inspect.cleandoc(doc.value).partition("Example:")[0]
        yield doc.lineno, re.sub(r"`[^`]*`", "", ENTRY.sub("", said))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def messages(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every string of several words: errors, suggestions, reports."""
    tree = ast.parse(text)
    skipped = {id(doc) for doc in docstrings(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped.update(map(id, node.values))
            yield (
                node.lineno,
                "".join(
                    part.value if isinstance(part, ast.Constant) else "X"
                    for part in node.values
                ),
            )
        elif isinstance(node, ast.Constant) and id(node) not in skipped:
            yield node.lineno, str(node.value) if " " in str(node.value) else ""


def dialect(path: Path) -> list[str]:
    """The places of a file that use a word which the glossary replaces."""
    text = path.read_text()
    read = [*prose(text), *messages(text)]
    return [
        f"{path.relative_to(ROOT)}:{line}: {found[0]!r}; say {word!r}"
        for line, said in read
        for pattern, word in INSTEAD.items()
        for found in [re.search(rf"\b({pattern})\b", " ".join(said.split()))]
        if found
    ]


@pytest.mark.parametrize(
    "folder",
    sorted({p.parent for p in files(PACKAGE)}),
    ids=lambda p: p.relative_to(ROOT).as_posix(),
)
def test_docstrings_comments_and_messages_use_the_words_of_the_field(
    folder: Path,
) -> None:
    read = [p for p in sorted(folder.glob("*.py")) if p not in ALLOWED]
    bad = [line for path in read for line in dialect(path)]
    assert not bad, "\n  ".join(["", *bad])
