"""`python -m shardfn report`: a step by its name, with shapes; and what is wrong with a target."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardfn.__main__ import main

MODULE = """
import torch, shardfn as sf
from shardfn import P

def loss(w, x):
    return (x @ w).square().mean()

step = sf.value_and_grad(loss)

def made():
    return step, (sf.ShapeDtype((16, 8)), sf.ShapeDtype((32, 16)))

def sharded():
    mesh = sf.current_mesh()
    return sf.shard(step, mesh, (P("tp"), P("dp"))), made()[1]

def nothing():
    return None

size = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "step_of_a_test.py").write_text(MODULE)
    (tmp_path / "broken_step_of_a_test.py").write_text("import no_such_module\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def ran(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = main(["report", *argv])
    out, err = capsys.readouterr()
    return code, out + err


def test_a_function_with_shapes_and_placements(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = ("--arg", "f32[16, 8]", "--arg", "f32[32@dp, 16]")
    code, text = ran(capsys, "step_of_a_test:step", "--mesh", "dp=4", "--hardware", "h200", *shapes)
    assert code == 0, text
    assert text.startswith("shard(value_and_grad(loss)) on mesh (dp=4) fits: ")
    assert "on H200" in text
    assert "all_reduce" in (folder / "report.html").read_text()


@pytest.mark.parametrize("name", ["made", "sharded"])
def test_a_function_that_returns_a_step_and_its_arguments(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "page.html"
    target = f"step_of_a_test:{name}"
    code, text = ran(capsys, target, "--mesh", "dp=2,tp=2", "--path", str(path))
    assert code == 0, text
    assert path.exists()


WRONG = {
    "no module": (["no_such_step:f"], "no_such_step does not import: ModuleNotFoundError: No mod"),
    "broken": (
        ["broken_step_of_a_test:f"],
        "broken_step_of_a_test does not import: ModuleNotFoundError: No module named 'no_such_mod",
    ),
    "no function": (["step_of_a_test:train"], "step_of_a_test has no train\n  needed: one of "),
    "no colon": (["step_of_a_test"], "'step_of_a_test'\n  needed: module:function"),
    "no callable": (["step_of_a_test:size"], "step_of_a_test:size is a int, and not a function"),
    "no arguments": (
        ["step_of_a_test:loss"],
        'takes w, x, but no shapes are given\n  try: give --arg "f32[8, 16]" for each argument',
    ),
    "no arguments of a transform": (["step_of_a_test:step"], "takes w, x, but no shapes are given"),
    "no pair": (["step_of_a_test:nothing"], "step_of_a_test:nothing() returns NoneType"),
    "no shape": (
        ["step_of_a_test:step", "--arg", "f33[8]"],
        "'f33[8]' is not a shape\n  needed: a dtype (f64, f32, ",
    ),
    "no hardware": (
        ["step_of_a_test:made", "--hardware", "H1000"],
        "hardware is 'H1000'\n  needed: the name of a known device (A100, H100, ",
    ),
    "no folder": (["step_of_a_test:made", "--path", "no/x.html"], "'no/x.html' cannot be written"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_with_what_to_try(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv, wanted = WRONG[name]
    code, text = ran(capsys, *argv, "--mesh", "dp=2")
    assert code == 2 and wanted in text, text
    assert "\n  try: " in text


def test_a_mesh_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["report", "step_of_a_test:made", "--mesh", "eight"])
    assert "'eight' is not of the form dp=4,tp=2" in capsys.readouterr().err
