"""The size watch: how dense and how long the code is, to make us look.

Density is the number of AST nodes for each line of code; docstrings, comments and blank lines do
not count as lines of code.
"""

from __future__ import annotations

import ast
import collections
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "shardfn"
WATCHED = ("shardfn", "shardfn_demo", "tests", "bench", "examples")
MAX_FILE_LINES, MAX_FUNCTION_NODES = 400, 350
MAX_COLUMNS, MAX_FOLDER_FILES = 100, 14
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Sized(NamedTuple):
    """A file, function, line or folder, and its size."""

    size: int
    path: str  # from the root of the repository
    name: str = ""  # of a function
    line: int = 0

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}" if self.line else self.path
        return f"{place} {self.name}".rstrip()


class Density(NamedTuple):
    """How many AST nodes stand on how many lines of code."""

    nodes: int
    lines: int

    @property
    def per_line(self) -> float:
        return self.nodes / max(self.lines, 1)


def files(package: Path = PACKAGE) -> list[Path]:
    """Every Python file of a folder and its subfolders, in a fixed order."""
    return sorted(package.rglob("*.py"))


def density(package: Path = PACKAGE) -> Density:
    """The AST nodes and the lines of code of a folder."""
    found = [_density(path.read_text()) for path in files(package)]
    nodes = sum(of_file.nodes for of_file in found)
    lines = sum(of_file.lines for of_file in found)
    return Density(nodes, lines)


def _density(text: str) -> Density:
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    docstrings = set()
    for node in nodes:
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            first = node.body[0]
            docstrings |= set(range(first.lineno, (first.end_lineno or 0) + 1))
    code = [
        line
        for number, line in enumerate(text.splitlines(), 1)
        if number not in docstrings
        and line.strip()
        and not line.lstrip().startswith("#")
    ]
    return Density(len(nodes), len(code))


def file_sizes(package: Path = PACKAGE) -> list[Sized]:
    """The number of lines of every file."""
    return [
        Sized(len(path.read_text().splitlines()), _shown(path))
        for path in files(package)
    ]


def function_sizes(package: Path = PACKAGE) -> list[Sized]:
    """The number of AST nodes of every function, nested functions and methods included."""
    return [
        Sized(
            sum(1 for _ in ast.walk(function)),
            _shown(path),
            function.name,
            function.lineno,
        )
        for path in files(package)
        for function in _functions(ast.parse(path.read_text()))
    ]


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def wide_lines(package: Path = PACKAGE) -> list[Sized]:
    """Every line of more than MAX_COLUMNS columns."""
    return [
        Sized(len(line), _shown(path), line=number)
        for path in files(package)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > MAX_COLUMNS
    ]


def folder_sizes(package: Path = PACKAGE) -> list[Sized]:
    """The number of Python files in every folder, without those of its subfolders."""
    counts = collections.Counter(path.parent for path in files(package))
    return [Sized(count, _shown(folder)) for folder, count in counts.items()]


def over(limit: int, sizes: list[Sized]) -> list[Sized]:
    """The sizes above a limit, largest first."""
    return sorted((sized for sized in sizes if sized.size > limit), reverse=True)


def report() -> str:
    """The density of every watched folder, and what is too long in it, as text."""
    return "\n".join(_folder_report(ROOT / name) for name in WATCHED)


def _folder_report(package: Path) -> str:
    found = density(package)
    rows = [
        f"{package.name}: {found.per_line:.1f} AST nodes a line of code, "
        f"{found.lines} lines of code"
    ]
    too_large = {
        f"functions over {MAX_FUNCTION_NODES} AST nodes": over(
            MAX_FUNCTION_NODES, function_sizes(package)
        ),
        f"files over {MAX_FILE_LINES} lines": over(
            MAX_FILE_LINES, file_sizes(package)
        ),
        f"lines over {MAX_COLUMNS} columns": over(
            MAX_COLUMNS, wide_lines(package)
        ),
        f"folders over {MAX_FOLDER_FILES} files": over(
            MAX_FOLDER_FILES, folder_sizes(package)
        ),
    }
    for what, sizes in too_large.items():
        rows.append(f"  {len(sizes)} {what}")
        rows += [f"    {sized.size:4}  {sized}" for sized in sizes]
    return "\n".join(rows)


def _shown(path: Path) -> str:
    inside = path.is_relative_to(ROOT)
    return path.relative_to(ROOT).as_posix() if inside else path.name


if __name__ == "__main__":
    print(report())
