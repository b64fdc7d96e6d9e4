"""The size watch: the longest files and functions of the library, to make us look."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "shardfn"


class Sized(NamedTuple):
    """A file or a function, and how many lines it takes."""

    lines: int
    where: str


def files(package: Path = PACKAGE) -> list[Path]:
    """Every Python file of a package, in a fixed order."""
    return sorted(package.rglob("*.py"))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function of a module, nested ones and methods too."""
    return (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def file_sizes(package: Path = PACKAGE) -> list[Sized]:
    """The length of every file."""
    return [
        Sized(len(path.read_text().splitlines()), _shown(path))
        for path in files(package)
    ]


def function_sizes(package: Path = PACKAGE) -> list[Sized]:
    """The length of every function, from its `def` to its last line."""
    return [
        Sized(
            node.end_lineno - node.lineno + 1,
            f"{_shown(path)}:{node.lineno} {node.name}",
        )
        for path in files(package)
        for node in functions(ast.parse(path.read_text()))
    ]


def report(count: int = 10) -> str:
    """The longest files, the longest functions and the median function, as text."""
    by_file, by_function = (
        sorted(file_sizes(), reverse=True),
        sorted(function_sizes(), reverse=True),
    )
    rows = ["longest files"]
    rows += [f"  {n:4}  {where}" for n, where in by_file[:count]]
    rows += ["longest functions"]
    rows += [f"  {n:4}  {where}" for n, where in by_function[:count]]
    total, median = (
        sum(n for n, _ in by_file),
        statistics.median(n for n, _ in by_function or [Sized(0, "")]),
    )
    return "\n".join(
        [
            *rows,
            (
                f"{total} lines, {len(by_function)} functions, the median function has "
                f"{median:g} lines"
            ),
        ]
    )


def _shown(path: Path) -> str:
    return (
        path.relative_to(ROOT).as_posix()
        if path.is_relative_to(ROOT)
        else path.name
    )


if __name__ == "__main__":
    print(report())
