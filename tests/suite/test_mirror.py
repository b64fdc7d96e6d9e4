"""tests/ mirrors shardfn/: a test file for each source file that holds logic.

`shardfn/a/_b.py` is tested in `tests/a/test_b.py`, with the underscores of names dropped, and
`shardfn/a/__init__.py` in `tests/a/test_a.py`.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from tests.support.reading.sizes import PACKAGE, ROOT, files

# A source that needs no test file of its own, and why.
EXEMPT: dict[str, str] = {
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def mirror(source: str) -> str:
    """The test file of a source file; both from the folders of their own."""
    *folders, name = Path(source).with_suffix("").parts
    folders = [folder.strip("_") for folder in folders]
    own = folders[-1] if name == "__init__" else name.strip("_")
    return "/".join([*folders, f"test_{own}.py"])


def holds_logic(text: str) -> bool:
    """Whether some function of a file does something."""
    nodes = ast.walk(ast.parse(text))
    return any(_does(node) for node in nodes if isinstance(node, Function))


def _does(function: Function) -> bool:
    """Whether a function has a statement beside its docstring, and is not only declared."""
    return not all(_declares(statement) for statement in function.body)


def _declares(statement: ast.stmt) -> bool:
    is_text = isinstance(statement, ast.Expr) and isinstance(
        statement.value, ast.Constant
    )
    return is_text or isinstance(statement, ast.Pass)


@functools.cache
def with_logic() -> list[str]:
    """Every source file that holds logic, from the folder of the package."""
    return [
        path.relative_to(PACKAGE).as_posix()
        for path in files(PACKAGE)
        if holds_logic(path.read_text())
    ]


def has_mirror(source: str) -> bool:
    return (ROOT / "tests" / mirror(source)).exists()


def test_every_source_with_logic_has_a_test_file_of_its_name():
    lacking = [
        f"shardfn/{source}: tests/{mirror(source)} is missing"
        for source in with_logic()
        if not has_mirror(source) and source not in EXEMPT
    ]
    assert not lacking, "\n  ".join(["", *lacking])


def test_the_list_holds_only_what_it_must():
    sources = set(with_logic())
    stale = [s for s in EXEMPT if s not in sources or has_mirror(s)]
    assert not stale, "remove these: " + ", ".join(stale)


def test_no_exemption_is_large():
    """A file of many functions is no record."""
    for source in EXEMPT:
        tree = ast.parse((PACKAGE / source).read_text())
        assert sum(isinstance(n, Function) for n in ast.walk(tree)) <= 5, source


NAMES = {
    "partition/planner/work.py": "partition/planner/test_work.py",
    "transforms/derivatives/_grad.py": "transforms/derivatives/test_grad.py",
    "_compat/dynamo/guards.py": "compat/dynamo/test_guards.py",
    "_tree.py": "test_tree.py",
    "__main__.py": "test_main.py",
    "partition/rules/__init__.py": "partition/rules/test_rules.py",
}


@pytest.mark.parametrize("source", NAMES)
def test_the_name_of_a_test_file_drops_underscores(source: str) -> None:
    assert mirror(source) == NAMES[source]


LOGIC = {
    "x = 1": False,
    "class A:\n    n: int": False,
    "class P(Protocol):\n    def f(self) -> int:\n        '''Says.'''\n        ...": False,
    "def f():\n    '''Says.'''": False,
    "def f():\n    return 1": True,
    "class A:\n    def f(self):\n        self.g()": True,
}


@pytest.mark.parametrize("text", LOGIC)
def test_what_counts_as_logic(text: str) -> None:
    assert holds_logic(text) is LOGIC[text]
