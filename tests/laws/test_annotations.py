"""What hides a cycle is typed by a Protocol or by its class: none such is `Any`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.support.reading.source import PACKAGE, Module, modules, parse

# The state that the parts of a stage hand to each other, and the folders where a name means it.
# In _compat a `builder` is torch's own, which has no type.
NAMES = {
    "around": "shardfn",
    "b": "shardfn.partition",
    "body": "shardfn",
    "builder": "shardfn",
    "inner": "shardfn",
    "kinds": "shardfn",
    "walk": "shardfn",
}
TORCH = "shardfn._compat"


def annotated(tree: ast.Module) -> Iterator[tuple[ast.AST, str, ast.expr | None]]:
    """(place, name, annotation) of every parameter, and of every field and variable that has
    an annotation.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node, node.arg, node.annotation
        elif isinstance(node, ast.AnnAssign):
            target = ast.unparse(node.target).removeprefix("self.")
            yield node, target, node.annotation


def untyped(found: list[Module]) -> list[str]:
    """Parameters and fields of those names that are `Any`."""
    return [
        f"{module.at(node)}: {name}: Any; name its class, or the Protocol of what is used of it"
        for module in found
        if not module.name.startswith(TORCH)
        for node, name, annotation in annotated(module.tree)
        if name in NAMES and module.name.startswith(NAMES[name])
        if annotation is not None and ast.unparse(annotation) == "Any"
    ]


def test_nothing_that_hides_a_cycle_is_any():
    assert not (bad := untyped(modules())), "\n  ".join(["", *bad])


@pytest.mark.parametrize(
    ("dotted", "text", "count"),
    [
        ("partition.walk", "def f(walk: Any, node: Node) -> None: ...", 1),
        ("partition.rules.pool", "def f(b: Any, x: Any) -> Any: ...", 1),
        ("partition.carries", "class Body:\n    walk: Any", 1),
        ("partition.walk", "def f(walk: Walk) -> None: ...", 0),
        ("capture.leaks", "def same(a: Any, b: Any) -> bool: ...", 0),
        ("_compat.dynamo", "def f(builder: Any) -> None: ...", 0),
    ],
)
def test_such_an_any_is_noticed(dotted: str, text: str, count: int):
    path = PACKAGE / (dotted.replace(".", "/") + ".py")
    assert len(untyped([parse(f"shardfn.{dotted}", path, text)])) == count
