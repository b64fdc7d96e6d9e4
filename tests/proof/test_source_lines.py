"""Names of lines that stay where code above them changes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shardfn.proof.locks.source_lines import SourceLines, Statement, statements

CODE = """\
import x


@decorated(
    a)
def f(a,
      b=2):
    for i in range(
        3):  # three
        y = (a @
             b)  # a comment
    with context() as z:
        pass
    if a: b = 1
    elif c(): d = "a # b"
    try:
        q = 1
    except E as e:
        q = 2

    class A:
        @property
        def g(self): return self.x
    match a:
        case 1:
            k = 3
"""
LINES = {
    1: ("<module>", "import x"),
    5: ("<module>", "def f(a, b=2):"),
    7: ("<module>", "def f(a, b=2):"),
    9: ("f", "for i in range(3):"),
    10: ("f", "y = a @ b"),
    11: ("f", "y = a @ b"),
    12: ("f", "with context() as z:"),
    14: ("f", "b = 1"),
    15: ("f", "d = 'a # b'"),
    18: ("f", "try:"),
    19: ("f", "q = 2"),
    23: ("f.A.g", "return self.x"),
    26: ("f", "k = 3"),
}


def test_each_line_has_its_innermost_statement() -> None:
    every = statements(CODE, "f.py")
    assert {n: (every[n].function, every[n].text) for n in LINES} == LINES
    assert 2 not in every and list(every) == sorted(every)


@pytest.mark.parametrize("text", ["def f(:", "\x00", ""])
def test_what_is_not_python_has_no_statements(text: str) -> None:
    assert statements(text, "f.py") == {}


def test_a_long_statement_is_cut_short() -> None:
    (line,) = statements(f"x = [{'1, ' * 200}]", "f.py").values()
    assert len(line.text) == 160 and line.text.endswith("...")


def test_a_statement_is_read_back_from_its_text() -> None:
    for text in ("x = y[::2]", "return a"):
        line = Statement("a/b.py", "A.f", text)
        assert Statement.parsed(str(line)) == line
    assert Statement.parsed("result") == Statement("", "", "result")


def project(folder: Path, *names: str) -> Path:
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(CODE)
    return folder


def test_files_are_named_from_the_root_of_their_project(tmp_path: Path) -> None:
    root = project(tmp_path / "mine", "pyproject.toml", "src/a.py", "tests/test_a.py")
    other = project(tmp_path / "other", ".git", "b.py")
    lines = SourceLines(str(root / "tests" / "locks"))
    assert lines.name(str(root / "src" / "a.py")) == "src/a.py"
    assert lines.short(f"{other / 'b.py'}:3") == "b.py:3"
    inside = root / ".venv" / "lib" / "python3.11" / "site-packages" / "their" / "c.py"
    assert lines.name(str(inside)) == "their/c.py"
    statement = lines.statement(f"{root / 'src' / 'a.py'}:11")
    assert str(statement) == "src/a.py::f::y = a @ b"
    fresh = SourceLines(str(root / "locks"))  # which has not seen the file
    assert fresh.find(statement) == "src/a.py:10"
    assert fresh.find(Statement("src/a.py", "f", "y = a @ c")) is None
    assert fresh.find(Statement("src/gone.py", "f", "y = a @ b")) is None


def test_without_a_marked_root_files_are_named_from_what_they_share_with_the_lock(
    tmp_path: Path,
) -> None:
    folder = project(tmp_path, "run/train.py")
    lines = SourceLines(str(folder / "run" / "locks"))
    assert lines.name(str(folder / "run" / "train.py")) == "train.py"
    assert lines.find(lines.statement(f"{folder / 'run' / 'train.py'}:10")) == "train.py:10"


def test_code_that_cannot_be_read_is_named_by_its_line() -> None:
    lines = SourceLines("locks")
    assert lines.statement("Cell In[3], line 2") == Statement("", "", "Cell In[3], line 2")
    assert lines.short("Cell In[3], line 2") == "Cell In[3], line 2"
    assert lines.statement("/nowhere/at/all.py:7").text == "line 7"
    assert sys.platform == "win32" or lines.name("/nowhere.py") == "nowhere.py"


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("x = 1\n")
    assert SourceLines(str(tmp_path)).statement(f"{file}:1").text == "x = 1"
    file.write_text("x = 200\n")
    assert SourceLines(str(tmp_path)).statement(f"{file}:1").text == "x = 200"
