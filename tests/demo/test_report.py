"""What the demonstration prints, with rich and without, and what it returns."""

import sys

import pytest

from shardfn.inspect import doctor
from shardfn_demo import report
from shardfn_demo.runs import Job, Run, Traffic

ONE = Run("one device", (4.0, 3.0, 2.0), 0.5, 0.04)
EIGHT = Run(
    "8 simulated ranks",
    (4.0, 3.0, 2.0),
    2.0,
    0.3,
    (Traffic("all_reduce", 13, 4_200_000),),
    "the program",
)
FEW = (Traffic("all_gather", 1, 10), Traffic("all_reduce", 2, 999))
TWO = Run("2 Gloo processes", (4.0, 3.0, 2.0002), 20.0, 0.05, FEW)


@pytest.fixture
def without(monkeypatch):
    """A machine without the optional packages."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("rich", "matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("rich", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def canned(monkeypatch):
    """The three runs, without running them."""

    def give(*done):
        monkeypatch.setattr(report, "all_runs", lambda job, watch: list(done))

    return give


def test_the_table_has_a_column_for_each_run():
    assert report.rows([ONE, EIGHT, TWO]) == [
        ["", "one device", "8 simulated ranks", "2 Gloo processes"],
        ["loss at step 1", "4.000000", "4.000000", "4.000000"],
        ["loss at step 3", "2.000000", "2.000000", "2.000200"],
        ["largest difference", "", "0.0e+00", "1.0e-04"],
        ["first call", "0.50 s", "2.00 s", "20.00 s"],
        ["each other step", "40 ms", "300 ms", "50 ms"],
        ["all_gather a step", "none", "none", "1, 10 B"],
        ["all_reduce a step", "none", "13, 4.2 MB", "2, 999 B"],
    ]


def test_forty_steps_show_the_first_the_tenth_and_the_last():
    run = Run("one", tuple(float(i) for i in range(1, 41)), 1.0, 1.0)
    assert [(cells[0], cells[1]) for cells in report.rows([run])[1:4]] == [
        ("loss at step 1", "1.000000"),
        ("loss at step 10", "10.000000"),
        ("loss at step 40", "40.000000"),
    ]


def test_the_table_fits_a_terminal_of_80_columns():
    assert max(map(len, report.plain(report.rows([ONE, EIGHT, TWO])))) < 80


def test_main_returns_zero_and_writes_both_files_when_the_worlds_agree(canned, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    canned(ONE, EIGHT, agreeing(TWO))
    assert report.main(["--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "local_program.txt").read_text() == "the program"
    assert (tmp_path / "out" / "loss.png").stat().st_size > 1000
    assert capsys.readouterr().out.splitlines()[-1].startswith("Proved: over 3 steps ")


def test_main_returns_one_when_a_world_disagrees(canned, tmp_path, capsys):
    canned(ONE, EIGHT, Run("2 Gloo processes", (4.0, 3.0, 2.1), 1.0, 1.0))
    assert report.main(["--out", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("Not proved: ")


def test_without_the_optional_packages_the_report_is_plain_and_names_the_extra(
    canned, without, tmp_path, capsys
):
    canned(ONE, EIGHT, agreeing(TWO))
    with report.watching(2) as watch:
        told = watch("a world")
        told(3.0)
        told(2.5)
    assert report.main(["--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "a world: 2 steps\na world: loss 2.5000\n" in said
    assert "all_reduce a step         none         13, 4.2 MB          2, 999 B\n" in said
    assert said.count("pip install 'shardfn[viz]'") == 2
    assert not (tmp_path / "loss.png").exists()


def test_with_rich_each_run_has_a_bar(capsys):
    pytest.importorskip("rich")
    with report.watching(1) as watch:
        watch("a world")(2.5)
    said = capsys.readouterr().out
    assert "a world" in said and "loss 2.5000" in said


def test_without_a_compiler_the_processes_run_uncompiled_and_it_says_so(monkeypatch, capsys):
    asked = {}
    monkeypatch.setattr(
        doctor, "compiler", lambda: doctor.Finding("C++ compiler", False, "No g++.")
    )
    monkeypatch.setattr(report.runs, "one_device", lambda job, progress: ONE)
    monkeypatch.setattr(report.runs, "simulated", lambda job, progress: EIGHT)
    monkeypatch.setattr(
        report.runs,
        "processes",
        lambda job, progress, backend: asked.update(backend=backend) or TWO,
    )
    assert report.all_runs(Job(steps=3), lambda name: lambda loss: None) == [ONE, EIGHT, TWO]
    assert asked == {"backend": "aten"} and "No g++." in capsys.readouterr().out


@pytest.mark.parametrize("steps", ["0", "-3", "some"])
def test_a_wrong_number_of_steps_is_refused(steps, capsys):
    with pytest.raises(SystemExit) as stop:
        report.main(["--steps", steps])
    assert stop.value.code == 2 and "--steps" in capsys.readouterr().err


def agreeing(run):
    return Run(run.name, ONE.losses, run.first_call_seconds, run.seconds, run.collectives)
