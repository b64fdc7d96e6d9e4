"""The plug-in of pytest, in runs of pytest inside of this one."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import shardfn as sf

ROOT = Path(sf.__file__).parents[1]
STEPS = """\
import pytest, torch
import shardfn as sf

X = sf.ShapeDtype((4, 3))
SCALE = 2

def plain(x):
    return (x * SCALE).sum()

@pytest.mark.parametrize("size", [3, 5], ids=["a/b", "c d"])
def test_sizes(lock, size):
    lock(sf.jit(plain), sf.ShapeDtype((size,)))

class TestClass:
    def test_twice(self, lock):
        lock(sf.jit(plain), X)
        lock(sf.grad(plain), X, tolerances={"ms": 0.5})
        assert lock(sf.jit(plain), X, name="named").state in ("written", "equal")
"""


class Reports:
    """The reports of the tests of a run."""

    def __init__(self) -> None:
        self.failures: dict[str, str] = {}
        self.passed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failures[report.nodeid.rpartition("::")[2]] = report.longreprtext
        self.passed += report.when == "call" and report.passed


def run(folder: Path, *options: str, monkeypatch: pytest.MonkeyPatch) -> Reports:
    """Run the tests of a folder with the plug-in."""
    reports = Reports()
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.chdir(folder)
    arguments = ["-p", "no:cacheprovider", "-p", "shardfn_pytest", "-c", os.devnull, "-q"]
    pytest.main([*arguments, f"--rootdir={folder}", *options, str(folder)], [reports])
    for name in [name for name in sys.modules if name.startswith("test_of_steps")]:
        del sys.modules[name]
    return reports


def test_the_fixture_writes_compares_and_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "test_of_steps_1.py"
    file.write_text(STEPS)
    first = run(tmp_path, monkeypatch=monkeypatch)
    assert first.failures == {} and first.passed == 3
    names = {
        "test_sizes-a-b.json",
        "test_sizes-c-d.json",
        "TestClass.test_twice.json",
        "TestClass.test_twice-2.json",
        "named.json",
    }
    assert {*os.listdir(tmp_path / "locks")} == names
    printed = capsys.readouterr().out
    assert "locks written" in printed
    assert all(str(tmp_path / "locks" / name) in printed for name in names)
    fields = json.loads((tmp_path / "locks" / "test_sizes-a-b.json").read_text())
    assert fields["test"] == "test_of_steps_1.py::test_sizes[a/b]"

    texts = {name: (tmp_path / "locks" / name).read_bytes() for name in names}
    again = run(tmp_path, monkeypatch=monkeypatch)
    assert again.failures == {} and "locks written" not in capsys.readouterr().out

    file.write_text(STEPS.replace("(x * SCALE)", "(x.sin() * SCALE)"))
    other = run(tmp_path, monkeypatch=monkeypatch)
    assert {*other.failures} == {"test_sizes[a/b]", "test_sizes[c d]", "test_twice"}
    message = other.failures["test_sizes[a/b]"]
    assert "test_of_steps_1.py:8 now runs sin x 1 (was 0)" in message
    assert f"at: {file}:12" in message and "shardfn_pytest/" not in message
    assert "try: pytest --update-locks, if the change is intended" in message
    assert {name: (tmp_path / "locks" / name).read_bytes() for name in names} == texts

    updated = run(tmp_path, "--update-locks", monkeypatch=monkeypatch)
    assert updated.failures == {} and "locks written" in capsys.readouterr().out
    assert "sin" in (tmp_path / "locks" / "named.json").read_text()


def test_two_tests_of_one_name_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = STEPS.partition("@pytest")[0] + "def test_step(lock):\n    lock(sf.jit(plain), X)\n"
    (tmp_path / "test_of_steps_2.py").write_text(text)
    assert run(tmp_path, monkeypatch=monkeypatch).failures == {}
    (tmp_path / "test_of_steps_3.py").write_text(text)
    (message,) = run(tmp_path, monkeypatch=monkeypatch).failures.values()
    head = "the lock file belongs to the test test_of_steps_2.py::test_step, but this test is "
    assert f"{head}test_of_steps_3.py::test_step" in message
    assert 'try: lock(step, ..., name="another_name")' in message
    (tmp_path / "test_of_steps_2.py").unlink()  # the test has moved to another file
    assert run(tmp_path, monkeypatch=monkeypatch).failures == {}


def test_wrong_options_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = STEPS.partition("@pytest")[0]
    text += "def test_step(lock):\n    lock(sf.jit(plain), X, tolerances=3)\n"
    (tmp_path / "test_of_steps_4.py").write_text(text)
    (message,) = run(tmp_path, monkeypatch=monkeypatch).failures.values()
    assert "lock, tolerances: tolerances is 3, a int, and must be a dict from fields" in message


LIGHT = """
import sys
import shardfn_pytest
assert not {"torch", "shardfn"} & {*sys.modules}, "pytest imports the plug-in in every run"
"""


def test_the_plug_in_imports_neither_torch_nor_shardfn() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True, cwd=ROOT)


def test_the_package_names_the_plug_in_for_pytest() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["pytest11"] == {"shardfn": "shardfn_pytest"}
    assert "shardfn_pytest" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert (ROOT / "shardfn_pytest" / "__init__.py").exists()
    points = importlib.metadata.entry_points(group="pytest11", name="shardfn")
    assert all(point.value == "shardfn_pytest" for point in points)
