"""A program that communicates says when it begins, ends and fails; any other one is left alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks

import shardfn as sf
from shardfn.jobs import service
from shardfn.jobs.calls import Lane
from shardfn.jobs.verdict import Verdict
from shardfn.runtime.stages import watched as module
from shardfn.runtime.stages.watched import watched

REAL = SimpleNamespace(kind="real", size=2)


class Watch:
    def __init__(self) -> None:
        self.log = list[Any]()
        self.enter = self.log.append
        self.verdict: Any = None
        self.raised: Any = None

    def has_raised(self, lane: Lane, text: str, error: Exception) -> None:
        self.raised = lane

    def caught_up(self, where: str) -> None:
        self.log.append(("caught up", self.raised))
        self.raised = None

    def lane(self, name: str, ranks: Any) -> Lane:
        return Lane(name, ranks)

    def why(self, where: str, error: BaseException) -> Any:
        return self.verdict and self.verdict.error(where, None)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    found = Watch()
    monkeypatch.setattr(service, "watch_of", lambda world: found)
    monkeypatch.setattr(module, "group_names", lambda mesh: ("dp",))
    monkeypatch.setattr(module, "ranks_of", lambda mesh: [0, 1])
    return found


def program(*, sends: bool) -> Any:
    graph = torch.fx.Graph()
    start = graph.placeholder("start")
    wait = graph.call_function(torch.neg, (start,))
    if sends:
        origin = {"source": "train.py:3", "module": None}
        start.meta["collective"] = SimpleNamespace(
            kind="all_reduce", axis="dp", source="train.py:3", origin=origin
        )
    graph.output(wait)
    return SimpleNamespace(graph=graph)


def placed(world: Any = REAL, mesh: Any = 1) -> Any:
    x = SimpleNamespace(dtype=torch.float32, shape=(2, 3))
    return SimpleNamespace(world=world, mesh=mesh, avals=[x] * 5)


def test_a_call_enters_and_leaves(watch: Watch) -> None:
    run = watched(lambda xs: xs[::-1], "f", placed(), program(sends=True))
    assert run([1, 2]) == [2, 1]  # type: ignore[list-item]
    event, end = watch.log
    assert end is None and event.code is not None
    assert event.text == "f of (" + ", ".join(["float32 [2, 3]"] * 4) + ", ...)"
    assert set(event.sends.values()) == {"all_reduce over dp for train.py:3"}
    assert set(event.sends) == {"start", "neg"}


@pytest.mark.parametrize(
    ("world", "mesh", "sends"),
    [
        (SimpleNamespace(kind="real", size=1), 1, True),
        (SimpleNamespace(kind="fake", size=2), 1, True),
        (REAL, None, True),
        (REAL, 1, False),
    ],
)
def test_a_program_that_waits_for_nobody_is_left_alone(world: Any, mesh: Any, sends: bool) -> None:
    run: Any = list.copy
    assert watched(run, "f", placed(world, mesh), program(sends=sends)) is run


def fails(xs: Any) -> Any:
    raise RuntimeError("of gloo")


def test_a_failure_is_told_to_the_others_or_by_them(watch: Watch) -> None:
    run = watched(fails, "f", placed(), program(sends=True))
    with pytest.raises(RuntimeError, match="of gloo"):
        run([])
    assert watch.raised is watch.log[0].lane
    watch.verdict = Verdict("lost", 1, ("rank 1 is lost",), "restart")
    with pytest.raises(sf.RankLostError, match="f: rank 1 is lost") as caught:
        run([])
    assert watch.log[1] == ("caught up", watch.log[0].lane), "before the next call"
    assert isinstance(caught.value.__cause__, RuntimeError)


@torch.library.custom_op("watched_tests::fallible", mutates_args=())
def fallible(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    if int(k) == 1:
        raise ValueError("mine")
    return x.clone()


fallible.register_fake(lambda x, k: torch.empty_like(x))


def _called() -> list[Any]:
    """What each call gives on this rank, which goes on when one raises."""
    mesh = sf.make_mesh((2,), ("dp",))
    per_rank = lambda x, k: sf.psum(fallible(x, k) * k, "dp")
    fn = sf.shard_map(per_rank, mesh, (sf.P("dp"), sf.P()), sf.P())
    step = sf.shard(fn, mesh, (sf.P("dp"), sf.P()), backend="aten")
    found: list[Any] = []
    for k in range(4):
        try:
            found.append(sf.full(step(torch.ones(2), torch.tensor(float(k)))).tolist())
        except ValueError as error:
            found.append(str(error))
    return found


def test_s16_ranks_that_all_raise_go_on() -> None:
    assert run_ranks(2, _called) == [[[0.0], "mine", [4.0], [6.0]]] * 2
