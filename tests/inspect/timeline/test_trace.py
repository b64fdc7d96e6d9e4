"""A trace has the form of the trace event format, and the times and bytes of the step."""

from __future__ import annotations

import collections
import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P
from shardfn.inspect.timeline.events import Event, GraphRun, InnerRuns
from shardfn.inspect.timeline.ranks import RankTimeline
from shardfn.inspect.timeline.trace import write_trace

K = 16


def step(params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        h = x
        for w in params:
            h = torch.tanh(h @ w)
        return h.square().mean()

    value, grads = sf.bucketed_grad(loss)(params)
    return value, sf.tree_map(lambda p, g: p - 0.1 * g, params, grads)


def plain() -> tuple[Any, Any]:
    """A step over two axes, and what explains it."""
    args = [sf.ShapeDtype((K, K))] * 3, sf.ShapeDtype((8, K))
    with sf.fake_world(4, numerics=False):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        where = ([P(None, "tp"), P("tp"), P()], P("dp"))
        run = sf.shard(step, mesh, where, backend="aten")
        return run.lower(*args), sf.explain(run, *args)


def pipelined() -> tuple[Any, Any]:
    """A pipeline of 2 stages on 2 ranks each."""

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = torch.tanh(x @ w)
        return x.square().mean()

    args = [sf.ShapeDtype((K, K))] * 4, sf.ShapeDtype((16, K))
    with sf.fake_world(4, numerics=False):
        mesh = sf.make_mesh((2, 2), ("pp", "dp"))
        where = ([P(pp=0), P(pp=0), P(pp=1), P(pp=1)], P("dp"))
        run = sf.shard(sf.pipelined_grad(loss, 4), mesh, where, backend="aten")
        return run.lower(*args), sf.explain(run, *args)


@pytest.fixture(scope="module", params=[plain, pipelined])
def traced(request: Any, tmp_path_factory: Any) -> Any:
    """The time of a step, its explanation, and its trace."""
    lowered, explained = request.param()
    time = lowered.time("H100")
    peak = lowered.memory.peak
    path = tmp_path_factory.mktemp("traces") / "step.json.gz"
    written = time.trace(path)
    assert written.path == str(path)
    page = json.loads(gzip.decompress(path.read_bytes()))
    counted = [x for x in page["traceEvents"] if x["ph"] == "C"]
    assert max(x["args"]["bytes"] for x in counted) == peak
    assert {x["pid"] for x in counted} == {time.coordinate}
    assert [x["ts"] for x in counted] == sorted(x["ts"] for x in counted)
    return time, explained, page, written


def slices(page: Any, pid: int = 0) -> list[Any]:
    return [x for x in page["traceEvents"] if x["ph"] == "X" and x["pid"] == pid]


def test_every_row_has_the_keys_of_its_phase(traced: Any) -> None:
    *_, page, _ = traced
    assert page["displayTimeUnit"] in ("ms", "ns")
    needed = {
        "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
        "M": {"name", "pid", "tid", "args"},
        "s": {"name", "cat", "id", "pid", "tid", "ts"},
        "C": {"name", "pid", "tid", "ts", "args"},
        "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
    }
    for row in page["traceEvents"]:
        assert set(row) == needed[row["ph"]] | {"ph"}
        for key in {"ts", "dur"} & set(row):
            assert isinstance(row[key], float) and row[key] >= 0


def test_events_of_a_thread_follow_each_other(traced: Any) -> None:
    time, _, page, _ = traced
    threads: dict[Any, list[Any]] = collections.defaultdict(list)
    for pid in range(len(time.ranks)):
        for x in slices(page, pid):
            threads[pid, x["tid"]].append(x)
    for row in threads.values():
        for a, b in itertools.pairwise(row):
            assert a["ts"] + a["dur"] <= b["ts"] + 1e-6
    ends = [x["ts"] + x["dur"] for row in threads.values() for x in row]
    assert max(ends) == pytest.approx(1e6 * time.total)


def test_every_thread_and_process_has_one_name(traced: Any) -> None:
    time, _, page, written = traced
    names = {
        (x["name"], x["pid"], x["tid"]): x["args"] for x in page["traceEvents"] if x["ph"] == "M"
    }
    assert len(names) == sum(x["ph"] == "M" for x in page["traceEvents"])
    for pid, rank in enumerate(time.ranks):
        assert names["process_name", pid, 0] == {"name": rank.name}
        for x in slices(page, pid):
            thread = names["thread_name", pid, x["tid"]]["name"]
            assert thread == ("waits" if x["cat"] in ("exposed", "bubble") else x["cat"])
    assert written.ranks == tuple(rank.name for rank in time.ranks)


def test_times_are_those_of_the_step(traced: Any) -> None:
    time, _, page, written = traced
    own = slices(page, time.coordinate)
    seconds: dict[str, float] = collections.defaultdict(float)
    for x in own:
        seconds["axis" if x["cat"].startswith("axis") else x["cat"]] += x["dur"] / 1e6
    assert seconds["compute"] == pytest.approx(time.compute)
    assert seconds["axis"] == pytest.approx(time.communication)
    assert seconds["exposed"] == pytest.approx(time.exposed)
    assert seconds["bubble"] == pytest.approx(time.bubble)
    assert written.events == sum(x["ph"] == "X" for x in page["traceEvents"])
    assert page["otherData"]["title"].startswith(time.name)


def test_collectives_are_those_that_explain_lists(traced: Any) -> None:
    time, explained, page, _ = traced
    own = [x for x in slices(page, time.coordinate) if x["cat"].startswith("axis ")]
    key = lambda x: tuple(x["args"].get(k) for k in ("axis", "bytes", "bucket", "line", "module"))
    found = collections.Counter((x["name"], *key(x)) for x in own)
    wanted = collections.Counter(
        (x.kind, x.axis, x.nbytes, x.bucket, x.source, x.module) for x in explained.collectives
    )
    assert found == wanted


def test_arrows_go_from_collectives_and_messages_to_ops_that_run_after_them(traced: Any) -> None:
    time, _, page, _ = traced
    starts = {x["id"]: x for x in page["traceEvents"] if x["ph"] == "s"}
    ends = {x["id"]: x for x in page["traceEvents"] if x["ph"] == "f"}
    assert starts.keys() == ends.keys() and starts
    at = {(x["pid"], x["tid"], x["ts"]): x for pid in range(2) for x in slices(page, pid)}
    for number, start in starts.items():
        sent = at[start["pid"], start["tid"], start["ts"]]
        reader = at[ends[number]["pid"], ends[number]["tid"], ends[number]["ts"]]
        assert reader["cat"] == "compute"
        assert reader["ts"] >= sent["ts"] + sent["dur"] - 1e-6
    between = {(s["pid"], ends[k]["pid"]) for k, s in starts.items()}
    assert (0, 1) in between or len(time.ranks) == 1


def test_the_memory_of_fused_kernels_is_in_order_and_has_their_peak(tmp_path: Path) -> None:
    net = lambda x, w: torch.tanh((x @ w).sin() + x.cos().sum(0)).sum()
    lowered = sf.jit(net, backend="inductor").lower(sf.ShapeDtype((6, 8)), sf.ShapeDtype((8, 8)))
    lowered.time().trace(tmp_path / "a.json")
    rows = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    counted = [x for x in rows if x["ph"] == "C"]
    assert max(x["args"]["bytes"] for x in counted) == lowered.memory.peak
    assert [x["ts"] for x in counted] == sorted(x["ts"] for x in counted)


def event(name: str, start: float, seconds: float) -> Event:
    return Event(name, "compute", start, seconds, None, None)


def test_a_program_too_large_to_draw_is_an_outline_and_says_so(tmp_path: Path) -> None:
    body = GraphRun(2.0, (event("mm", 0.0, 1.0), event("add", 1.0, 1.0)))
    run = GraphRun(
        202.0,
        (event("first", 0.0, 1.0), event("last", 201.0, 1.0)),
        (InnerRuns("scan", 1.0, body, 100),),
    )
    ranks = [RankTimeline("", (0, 1), run)]
    whole = write_trace(tmp_path / "a.json", "a step", ranks)
    assert (whole.events, whole.left_out) == (202, "")
    outline = write_trace(tmp_path / "a.json", "a step", ranks, most=20)
    assert outline.events == 3
    assert str(outline).splitlines() == [
        f"{tmp_path / 'a.json'}: 3 events of each of ranks 0, 1",
        "outline: each loop body is drawn as one event per track",
        "open it at https://ui.perfetto.dev",
    ]
    page = json.loads((tmp_path / "a.json").read_text())
    assert page["otherData"]["left out"] == outline.left_out
    (drawn,) = [x for x in slices(page) if x["name"] == "scan"]
    assert (drawn["dur"], drawn["args"]["repeats"]) == (200e6, 100)


def test_of_too_many_events_without_loops_the_longest_are_drawn(tmp_path: Path) -> None:
    run = GraphRun(6.0, (event("a", 0.0, 1.0), event("b", 1.0, 3.0), event("c", 4.0, 2.0)))
    written = write_trace(tmp_path / "a.json", "a step", [RankTimeline("", (0,), run)], most=2)
    assert written.left_out == "the 1 shortest events are not drawn"
    page = json.loads((tmp_path / "a.json").read_text())
    assert [x["name"] for x in slices(page)] == ["b", "c"]


def test_a_group_of_ranks_is_named_by_its_first_and_last() -> None:
    run = GraphRun(0.0, ())
    names = [RankTimeline(x, tuple(r), run).name for x, r in [("pp=1", range(8, 16)), ("", [0])]]
    assert names == ["pp=1, each of ranks 8, 9, 10, 11, ... 15", "rank 0"]


def test_a_file_with_another_ending_and_one_without_a_folder_are_refused(tmp_path: Path) -> None:
    time = sf.jit(lambda x: x + 1, backend="aten").lower(sf.ShapeDtype((3,))).time()
    with pytest.raises(sf.ShardError) as error:
        time.trace("step.txt")
    assert str(error.value).splitlines()[0] == (
        "StepTime.trace, path: 'step.txt' has another ending"
    )
    assert "needed: a file that ends in .json or .json.gz" in str(error.value)
    assert 'try: path="step.json.gz"' in str(error.value)
    with pytest.raises(sf.ShardError) as error:
        time.trace(tmp_path / "absent" / "step.json")
    assert "cannot be written: No such file or directory" in str(error.value)
    assert "try: a folder that exists" in str(error.value)
