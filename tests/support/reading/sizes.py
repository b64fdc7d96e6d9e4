"""What the tree weighs, room by room: python -m tests.support.reading.sizes.

AST nodes and statements without docstrings, and the bytes of the normalised code after lzma. Line
breaks, commas, comments and the number of files change none of them.
"""

from __future__ import annotations

import ast
import lzma
from pathlib import Path
from typing import NamedTuple

from tests.support.reading.source import ROOT, files

FOLDERS = ("shardfn", "shardfn_demo", "shardfn_pytest", "tests", "bench", "examples")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Weight(NamedTuple):
    """What the files of a folder weigh together."""

    nodes: int
    statements: int
    packed: int  # bytes
    files: int

    def __str__(self) -> str:
        return (
            f"{self.nodes:>9,} AST nodes {self.statements:>8,} statements "
            f"{self.packed:>9,} bytes packed {self.files:>6,} files"
        )


def weigh(paths: list[Path]) -> Weight:
    """The weight of Python files."""
    trees = [_without_docstrings(ast.parse(path.read_text())) for path in paths]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    statements = sum(isinstance(node, ast.stmt) for node in nodes)
    text = "\n".join(ast.unparse(tree) for tree in trees)
    packed = len(lzma.compress(text.encode(), preset=9))
    return Weight(len(nodes), statements, packed, len(paths))


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.fix_missing_locations(tree)


def report(root: Path = ROOT) -> str:
    """The weight of every watched folder and of its rooms, the heaviest first."""
    rows = []
    for name in FOLDERS:
        folder = root / name
        if not folder.is_dir():
            continue
        rows.append(f"{weigh(files(folder))}  {name}")
        rooms = [room for room in folder.iterdir() if room.is_dir() and files(room)]
        weights = sorted(((weigh(files(room)), room.name) for room in rooms), reverse=True)
        rows += [f"{weight}    {name}/{room}" for weight, room in weights]
    return "\n".join(rows)


if __name__ == "__main__":
    print(report())
