"""Reading the library as text: its files, what they import, and the torch names they use."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "shardfn"


def files(folder: Path = PACKAGE) -> list[Path]:
    """Every Python file of a folder and its subfolders, in a fixed order."""
    return sorted(folder.rglob("*.py"))


class Module(NamedTuple):
    """One parsed file of the library."""

    name: str  # dotted, such as shardfn.partition.walk
    path: Path
    tree: ast.Module

    def at(self, node: ast.AST) -> str:
        """Where a node stands, for a message."""
        return f"{self.path.relative_to(ROOT).as_posix()}:{node.lineno}"

    @property
    def package(self) -> str:
        """What a relative import counts from."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    @property
    def unit(self) -> str:
        """The key of LAYERS: the first name below shardfn."""
        return unit(self.name)


class Import(NamedTuple):
    """One name that a module imports: `from target import name`, or `import target` with no
    name.
    """

    module: Module
    node: ast.stmt
    target: str
    name: str
    inside: bool  # a function

    @property
    def where(self) -> str:
        return self.module.at(self.node)

    @property
    def full(self) -> str:
        return f"{self.target}.{self.name}" if self.name else self.target


def unit(dotted: str) -> str:
    """The first name below shardfn: shardfn.partition.walk is in partition."""
    return [*dotted.split("."), ""][1]


def parse(name: str, path: Path, text: str) -> Module:
    return Module(name, path, ast.parse(text))


@functools.cache
def modules() -> list[Module]:
    """Every file of the library, read once: a test file that asks calls modules.cache_clear."""
    return [parse(_dotted(path), path, path.read_text()) for path in files(PACKAGE)]


def _dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(module: Module) -> Iterator[Import]:
    """Every import of a module, inside functions too, with relative ones made absolute."""
    yield from _imports(module, module.tree, inside=False)


def _imports(module: Module, parent: ast.AST, *, inside: bool) -> Iterator[Import]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.Import):
            yield from (Import(module, node, alias.name, "", inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            target = _absolute(module, node)
            yield from (Import(module, node, target, alias.name, inside) for alias in node.names)
        else:
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(module, node, inside=inside or function)


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    base = (
        module.package.split(".")[: None if node.level <= 1 else 1 - node.level]
        if node.level
        else []
    )
    return ".".join([*base, *([node.module] if node.module else [])])


def own_edges(found: list[Module]) -> list[tuple[Import, str]]:
    """Every import of one file of the library by another, and the dotted name of the file
    imported.
    """
    known = {module.name for module in found}
    edges = [(i, i.full if i.full in known else i.target) for m in found for i in imports(m)]
    return [
        (i, target)
        for i, target in edges
        if target.split(".")[0] == "shardfn" and target != i.module.name
    ]


def torch_names(module: Module) -> Iterator[tuple[str, str]]:
    """Every dotted torch name in a module, with the aliases of its imports resolved."""
    aliases: dict[str, str] = {}
    for i in imports(module):
        if i.target.split(".")[0] == "torch":
            yield i.where, i.full
            aliases |= _bound(i)
    inner = {node.value for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node not in inner:
            root, *rest = _chain(node)
            if root in aliases:
                yield module.at(node), ".".join([aliases[root], *rest])


def _bound(i: Import) -> dict[str, str]:
    alias = next(a for a in i.node.names if a.name == (i.name or i.target))
    if i.name or alias.asname:
        return {alias.asname or alias.name: i.full}
    return {"torch": "torch"}


def _chain(node: ast.expr) -> list[str]:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id if isinstance(node, ast.Name) else "", *reversed(names)]
