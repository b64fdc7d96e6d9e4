"""`%load_ext shardfn` in IPython: `%program` shows the program of a call, and does not run it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import shardfn as sf

STEP = """
import torch
import shardfn as sf
world = sf.fake_world(2).start()
mesh = sf.make_mesh((2,), ("dp",))
def mean(x, *, scale):
    return x.mean() * scale
step = sf.shard(mean, mesh, sf.P("dp"))
x = torch.ones(5)
"""


Captured = pytest.CaptureFixture[str]


@pytest.fixture
def shell() -> Iterator[Any]:
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "shardfn")
    assert shell.run_cell(STEP).success
    yield shell
    shell.run_cell("world.stop()")
    InteractiveShell.clear_instance()


def test_a_line_shows_the_program_of_its_call(shell: Any, capsys: Captured) -> None:
    shell.run_line_magic("program", "step(x, scale=2.0)")
    lowered = shell.user_ns["step"].lower(shell.user_ns["x"], scale=2.0)
    assert [c.kind for c in lowered.collectives] == ["all_reduce"]
    assert capsys.readouterr().out == f"{lowered}\n"


def test_a_cell_runs_up_to_its_last_call(shell: Any, capsys: Captured) -> None:
    cell = "def double(x):\n    return x + x\n\nrun = sf.shard(double, mesh)\nrun(\n    x\n)"
    shell.run_cell_magic("program", "", cell)
    assert capsys.readouterr().out.startswith("shard(double) on mesh (dp=2)")
    assert shell.user_ns["run"](shell.user_ns["x"]).shape == (5,)


def test_a_cell_that_fails_shows_no_program(shell: Any, capsys: Captured) -> None:
    shell.run_cell_magic("program", "", "1 / 0\nstep(x, scale=2.0)")
    printed = capsys.readouterr().out
    assert "ZeroDivisionError" in printed and "on mesh" not in printed


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("x", "the last line is 'x'"),
        ("", "the last line is 'nothing'"),
        ("y = step(x)", "the last line is 'y = step(x)'"),
        ("print(x)", "print is a builtin_function_or_method"),
    ],
)
def test_another_line_is_refused_by_name(shell: Any, text: str, got: str) -> None:
    with pytest.raises(sf.ShardError) as refused:
        shell.run_line_magic("program", text)
    assert str(refused.value) == (
        f"%program: {got}\n"
        "  needed: a call of a function that sf.shard, sf.jit or another transform returned\n"
        "  try: %program step(params, batch)"
    )


DEEP = """
def first(x):
    return second(x)
def second(x):
    return third(x)
def third(x):
    return fourth(x)
def fourth(x):
    return x.nope
"""


def test_an_error_of_a_cell_shows_lines_of_cells_alone(shell: Any, capsys: Captured) -> None:
    shell.colors = "nocolor"
    shell.execution_count = 10
    shell.run_cell(DEEP, store_history=True)
    shell.run_cell("sf.shard(first, mesh, sf.P('dp'))(x)", store_history=True)
    lines = capsys.readouterr().out.splitlines()
    places = [line.partition(", in ")[0] for line in lines if line.startswith(("Cell ", "File "))]
    assert places == [
        f"Cell In[{cell}], line {n}" for cell, n in ((11, 1), (10, 2), (10, 6), (10, 8))
    ]
    note = "shardfn: raised inside shard(first), 1 of its frames are hidden"
    assert lines[-1].startswith(note) and sum(line.startswith("shardfn: ") for line in lines) == 1
