"""One watch for each world, which tells the others how its process ends."""

from __future__ import annotations

from typing import Any

import pytest

import shardfn as sf
from shardfn.jobs import beside
from shardfn.jobs.verdict import Verdict
from tests.faults.injected import injected
from tests.faults.job import CALL, CAPTURE, SAVE, STEP, Fault
from tests.faults.table import FAULTS

SAMPLE = (
    Fault("kill -9", CALL, "RankLostError"),
    Fault("SIGSTOP", CAPTURE, "RankLostError", timeout=1.0),
    Fault("an exception", STEP, "RankLostError"),
    Fault("an exception, caught; goes on", CALL, "DivergenceError", told=True),
    Fault("another function", STEP, "DivergenceError", told=True),
    Fault("skips a step", STEP, "DivergenceError", told=True),
    Fault("nothing", SAVE, "right", size=4),
)


@pytest.mark.parametrize("fault", SAMPLE, ids=lambda x: f"{x.what}, {x.when}")
def test_a_fault_is_told_by_name_within_its_timeout(fault: Fault) -> None:
    outcome = injected(fault)
    assert outcome.verdict in ("named", "right"), outcome


def test_the_table_has_enough_faults_of_every_kind() -> None:
    assert len({(x.what, x.when, x.size, x.ranks) for x in FAULTS}) >= 60
    assert {x.size for x in FAULTS} >= {2, 4}


def test_an_error_is_one_line_with_its_place() -> None:
    try:
        raise ValueError("a\nb" + 300 * "x")
    except ValueError as error:
        line = beside._first_line(error)
    assert line.startswith("ValueError: a, at ") and line.count("\n") == 0
    assert __file__ in line


def test_a_world_of_one_process_writes_checkpoints_alone() -> None:
    with sf.fake_world(2) as world, beside.checkpointing(world, "save"):
        pass


class Told:
    """A watch whose job has a verdict."""

    verdict: Any = Verdict("different", 1, ("ranks are in different calls",), "so")

    def __init__(self, why: Any) -> None:
        self.found, self.entered = why, list[Any]()
        self.everyone = None

    def why(self, where: str, error: BaseException) -> Any:
        return self.found and self.found.error(where, None)

    def enter(self, event: Any) -> None:
        self.entered.append(event)

    def has_raised(self, lane: Any, text: str, error: Exception) -> None:
        self.entered.append(f"{text}: {error}")


def test_a_checkpoint_that_other_ranks_prevent_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    world: Any = type("World", (), {"kind": "real", "size": 2})()
    watch = Told(Told.verdict)
    monkeypatch.setattr(beside, "watch_of", lambda _: watch)
    with (
        pytest.raises(sf.DivergenceError, match="save: ranks are in different calls"),
        beside.checkpointing(world, "save"),
    ):
        raise RuntimeError("gloo")
    watch = Told(None)
    with pytest.raises(OSError), beside.checkpointing(world, "save"):
        raise OSError("no space")
    assert watch.entered[0].text == "save" and watch.entered[1:] == ["save: no space"]
