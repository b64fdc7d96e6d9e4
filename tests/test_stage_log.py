"""Each stage writes a line under TORCH_LOGS=shardfn and artefacts under TORCH_TRACE."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch

import shardfn as sf
from shardfn import P
from shardfn.stage_log import artefact

ROOT = Path(__file__).parents[1]
PROGRAM = """
import torch, shardfn as sf
from shardfn import P

def loss(w, x):
    return (x @ w).square().mean()

with sf.fake_world(4):
    mesh = sf.make_mesh((4,), ("dp",))
    step = sf.shard(sf.bucketed_grad(loss), mesh, (P(), P("dp")), backend="aten")
    for rows in (8, 8, 12):
        step(torch.ones(3, 2), torch.ones(rows, 3))
    step.lower(torch.ones(3, 2), torch.ones(8, 3))
"""
NAME = "shard(bucketed_grad(loss))"


KINDS = 2 * ["capture", "partition", "schedule", "run"] + ["partition", "schedule"]


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What a process writes that logs all: its standard error, and its trace."""
    folder = tmp_path_factory.mktemp("trace")
    variables = {"TORCH_LOGS": "+shardfn", "TORCH_TRACE": str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        check=True,
        cwd=ROOT,
    )
    (log,) = folder.iterdir()
    return done.stderr, log.read_text()


def stages_in(lines: list[str]) -> list[str]:
    """The lines that say what a stage took."""
    return [line for line in lines if re.match(r"(capture|partition|schedule|run) ", line)]


def test_a_log_has_a_line_for_each_stage(records: list[str]) -> None:
    exec(PROGRAM, {})
    stages = stages_in(records)
    kinds = [line.split()[0] for line in stages]
    assert kinds == KINDS
    first = dict(zip(kinds, stages, strict=False))
    number = r"[\d.]+ [mu]?s"
    assert re.fullmatch(rf"capture {re.escape(NAME)}: {number}, nodes \d+", first["capture"])
    assert re.fullmatch(rf"partition {re.escape(NAME)}: {number}, steps \d+", first["partition"])
    counts = r"nodes \d+, collectives 1, buckets 1"
    assert re.fullmatch(rf"schedule {re.escape(NAME)}: {number}, {counts}", first["schedule"])
    assert "%all_reduce" not in "".join(records)


def test_verbose_logs_have_the_programs_too(logged: tuple[str, str]) -> None:
    text, _ = logged
    lines = [line.partition("] ")[2] for line in text.splitlines()]
    assert [line.split()[0] for line in stages_in(lines)] == KINDS
    assert f"captured program of {NAME}" in text and f"local program of {NAME}" in text
    assert "%all_reduce = all_reduce[sum, dp]" in text


def test_torch_trace_has_an_artefact_of_each_stage(logged: tuple[str, str]) -> None:
    """In the form that tlparse reads: a line of JSON, and the text indented below it."""
    _, log = logged
    texts: dict[str, list[str]] = {}
    name = None
    for line in log.splitlines():
        if not line.startswith("\t"):
            _, _, record = line.partition("] ")
            known = json.loads(record) if record.startswith("{") else {}
            found = known.get("artifact", {})
            name = found.get("name", "") if found.get("encoding") == "string" else ""
            if name.startswith("shardfn_"):
                texts.setdefault(name, []).append("")
        elif name and name.startswith("shardfn_"):
            texts[name][-1] += line[1:] + "\n"
    counts = {name: len(rows) for name, rows in texts.items()}
    assert counts == {
        "shardfn_captured_program": 2,
        "shardfn_local_program": 3,
        "shardfn_bucket_plan": 3,
        "shardfn_explain": 3,
        "shardfn_memory": 3,
    }
    assert "%mm = mm(%x, %w): f32[8, 2]" in texts["shardfn_captured_program"][0]
    assert "all_reduce[sum, dp]" in texts["shardfn_local_program"][0]
    assert f"buckets of {NAME} on mesh (dp=4): 1" in texts["shardfn_bucket_plan"][0]
    assert "1 all_reduce over dp" in texts["shardfn_explain"][0]
    assert "values in memory at the peak" in texts["shardfn_memory"][0]


@pytest.fixture
def records() -> Iterator[list[str]]:
    lines: list[str] = []
    log = logging.getLogger("shardfn")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield lines
    log.removeHandler(handler)
    log.setLevel(level)


def test_a_compilation_has_a_line_with_its_ops_and_a_repeated_call_none(records: list[str]) -> None:
    double = sf.jit(lambda x: (x * 2).cos())
    double(torch.ones(3))
    compiled = [line for line in records if line.startswith("compile ")]
    assert len(compiled) == 1 and compiled[0].endswith(", ops 2")
    records.clear()
    double(torch.ones(3))
    assert records == []


def test_a_repeated_call_runs_no_line_of_the_log() -> None:
    double = sf.jit(lambda x: x * 2, backend="aten")
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        files.add(Path(frame.f_code.co_filename).name)

    def files_of_a_call() -> set[str]:
        files.clear()
        sys.setprofile(note)
        try:
            double(torch.ones(3))
        finally:
            sys.setprofile(None)
        return {*files}

    ours = {"stage_log.py", "progress.py"}
    assert ours <= files_of_a_call()
    again = files_of_a_call()
    assert "dispatch.py" in again and not ours & again


def test_a_choice_of_placements_has_a_line(records: list[str]) -> None:
    with sf.fake_world(2, numerics=False):
        mesh = sf.make_mesh((2,), ("dp",))
        sf.shard(lambda x: x * 2, mesh, sf.auto).lower(torch.ones(4))
    kinds = [line.split()[0] for line in records]
    assert kinds == ["capture", "choose", "partition", "schedule"]


def test_ranks_that_differ_are_one_schedule(records: list[str]) -> None:
    with sf.fake_world(3, numerics=False):
        mesh = sf.make_mesh((3,), ("dp",))
        sf.shard(lambda x: x.sum(), mesh, P("dp"), P()).lower(torch.ones(7))
    assert sum(line.startswith("schedule ") for line in records) == 1


def test_a_text_that_nobody_reads_is_not_written() -> None:
    def text() -> str:
        raise AssertionError

    artefact("memory", "step", text)
