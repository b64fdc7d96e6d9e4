"""The workflow runs what `.ci/run` runs, on each version that the package supports."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.support.reading.source import ROOT

GITHUB = ROOT / ".github"
PROJECT = (ROOT / "pyproject.toml").read_text()
CONTEXT = re.compile(r"\$\{\{\s*([\w.-]+)\s*\}\}")


def read(path: str) -> Any:
    return yaml.safe_load((GITHUB / path).read_text())


def job() -> Any:
    (job,) = read("workflows/test.yml")["jobs"].values()
    return job


def test_it_runs_what_every_change_must_pass() -> None:
    (command,) = [step["run"] for step in job()["steps"] if "run" in step]
    ours = (ROOT / ".ci" / "run").read_text()
    assert command.startswith("make test ") and "exec make test" in ours
    assert job()["timeout-minutes"] >= 90


def test_it_runs_on_each_python_and_on_the_first_and_last_torch() -> None:
    matrix = job()["strategy"]["matrix"]
    assert matrix["python"] == re.findall(r"Python :: (3\.\d+)", PROJECT)
    low, high = re.search(r'"torch>=(2\.\d+),<2\.(\d+)"', PROJECT).groups()
    pinned, last = matrix["torch"]
    assert pinned == "" and f"torch=={low}." in (ROOT / "constraints.txt").read_text()
    assert last.startswith(f"2.{int(high) - 1}.")


def test_it_reads_only_what_is_defined() -> None:
    """What a step inserts is a key of the matrix, each action has a version, each key is known."""
    matrix, steps = job()["strategy"]["matrix"], job()["steps"]
    read_names = set(CONTEXT.findall((GITHUB / "workflows" / "test.yml").read_text()))
    assert read_names == {f"matrix.{name}" for name in matrix}
    for step in steps:
        assert set(step) <= {"uses", "with", "run", "name", "env"}
        assert ("uses" in step) != ("run" in step)
        assert "uses" not in step or re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])
    known = {"runs-on", "timeout-minutes", "strategy", "env", "steps"}
    assert set(job()) == known and set(read("workflows/test.yml")) == {"name", True, "jobs"}


def test_what_it_leaves_out_runs_each_week() -> None:
    sweeps = read("workflows/sweeps.yml")
    assert sweeps[True]["schedule"]
    assert sweeps["jobs"]["sweeps"]["steps"][-1]["run"].startswith("make sweeps ")


@pytest.mark.parametrize("name", ["wrong-value.yml", "wish.yml"])
def test_a_template_has_fields_of_its_own(name: str) -> None:
    form = read(f"ISSUE_TEMPLATE/{name}")
    fields = [field["id"] for field in form["body"]]
    assert form["name"] and form["description"] and len(set(fields)) == len(fields)


def test_a_report_of_a_wrong_value_asks_for_doctor_and_the_program() -> None:
    fields = {field["id"]: field for field in read("ISSUE_TEMPLATE/wrong-value.yml")["body"]}
    assert fields["doctor"]["validations"]["required"]
    assert "print(fn.lower" in fields["program"]["attributes"]["description"]
