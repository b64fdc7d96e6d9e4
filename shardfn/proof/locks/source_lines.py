"""Lines of a program that keep their names where code above them changes: the file, the function
and the text of the statement, without the number.
"""

from __future__ import annotations

import ast
import copy
import linecache
import os
from collections.abc import Iterator

import attrs

ROOT_FILES = (".git", "pyproject.toml", "setup.py", "setup.cfg", ".hg")  # of a project's root
INSTALLED = ("site-packages", "dist-packages")  # folders of installed packages
SEPARATOR = "::"
MODULE = "<module>"  # the function of code outside of functions
LONGEST = 160  # characters of a statement
COMPOUND = ("body", "orelse", "finalbody", "handlers", "cases", "decorator_list")


@attrs.frozen
class Statement:
    """A statement of the user's code.

    Args:
        file: its path from the root of the project, or of the folder of installed packages.
        function: the qualified name of the function around it.
        text: its code in one line, without comments: of a compound statement its head.
    """

    file: str
    function: str
    text: str

    def __str__(self) -> str:
        return SEPARATOR.join((self.file, self.function, self.text))

    @classmethod
    def parsed(cls, text: str) -> Statement:
        """Read a statement that was written as text; one without a file is its text alone."""
        parts = text.split(SEPARATOR, 2)
        return cls(*parts) if len(parts) == 3 else cls("", "", text)


class SourceLines:
    """The statements of the user's files, named from the folder of a lock.

    Args:
        folder: of the lock.
    """

    def __init__(self, folder: str) -> None:
        self.folder = os.path.abspath(folder)
        self._names: dict[str, str] = {}  # of files, by path
        self._paths: dict[str, str] = {}  # of files, by name
        self._lines: dict[str, dict[int, Statement]] = {}
        self._statements: dict[str, set[Statement]] = {}  # of a file, by path

    def statement(self, source: str) -> Statement:
        """Return the statement at `file:line`; at other text that text."""
        path, _, number = source.rpartition(":")
        if not number.isdecimal() or not path:
            return Statement("", "", source)
        name = self.name(path)
        known = self._of_file(path).get(int(number))
        if known is None:  # the code of the file cannot be read
            return Statement(name, "", f"line {number}")
        return known

    def short(self, source: str) -> str:
        """Return `file:line` with the name of the file from the root of the project."""
        path, _, number = source.rpartition(":")
        return f"{self.name(path)}:{number}" if number.isdecimal() and path else source

    def find(self, statement: Statement) -> str | None:
        """Return the `file:line` of a statement in the code as it is now; None if it is gone."""
        path = self._path(statement.file)
        lines = self._of_file(path) if path else {}
        first = next((n for n, x in lines.items() if x == statement), None)
        return None if first is None else f"{statement.file}:{first}"

    def name(self, path: str) -> str:
        """Return the name of a file: equal on all machines that have the project."""
        if path not in self._names:
            self._names[path] = _name(os.path.abspath(path), self.folder)
            self._paths.setdefault(self._names[path], path)
        return self._names[path]

    def _path(self, name: str) -> str | None:
        """Return the path of a file by its name: one that the program has, or of this project."""
        if name in self._paths:
            return self._paths[name]
        root = _root(self.folder)
        path = os.path.join(root or os.path.dirname(self.folder), name)
        return path if name and os.path.isfile(path) else None

    def _of_file(self, path: str) -> dict[int, Statement]:
        """Return the statement of each line of a file."""
        if path not in self._lines:
            linecache.checkcache(path)
            text = "".join(linecache.getlines(path))
            self._lines[path] = statements(text, self.name(path))
        return self._lines[path]


def statements(text: str, file: str) -> dict[int, Statement]:
    """Return the innermost statement at each line of a file, in the order of lines; none where
    the text is not Python.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return {}
    lines: dict[int, Statement] = {}
    for node, function in _nested(tree, MODULE):
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(x.lineno for x in decorators)])
        statement = Statement(file, function, _text(node))
        last = node.end_lineno or node.lineno
        lines.update(dict.fromkeys(range(first, last + 1), statement))
    return dict(sorted(lines.items()))


def _nested(node: ast.AST, function: str) -> Iterator[tuple[ast.stmt, str]]:
    """Yield each statement inside of a node with its function, the outer ones first."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child, function
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = child.name if function == MODULE else f"{function}.{child.name}"
            yield from _nested(child, inside)
        elif not isinstance(child, ast.expr):
            yield from _nested(child, function)


def _text(node: ast.stmt) -> str:
    """Return a statement as one line of code; a compound one as its head."""
    if "body" in node._fields or "cases" in node._fields:
        node = copy.copy(node)
        for name in COMPOUND:
            if name in node._fields:
                setattr(node, name, [])
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _name(path: str, folder: str) -> str:
    """Return the name of a file for a lock in a folder."""
    parts = path.split(os.sep)
    for k in range(len(parts) - 1, 0, -1):
        if parts[k - 1] in INSTALLED:
            return "/".join(parts[k:])
    root = _root(os.path.dirname(path))
    if root is None:
        root = os.path.commonpath([path, folder])
        if root == os.path.dirname(root):  # nothing in common but the disk
            return parts[-1]
    return os.path.relpath(path, root).replace(os.sep, "/")


def _root(folder: str) -> str | None:
    """Return the root of the project that a folder is in, if something marks it."""
    while True:
        if any(os.path.exists(os.path.join(folder, name)) for name in ROOT_FILES):
            return folder
        parent = os.path.dirname(folder)
        if parent == folder:
            return None
        folder = parent
