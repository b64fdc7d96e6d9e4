"""A predicted step beside a real run of it on Gloo ranks: by collective and op."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.profiler import ProfilerActivity, profile

import shardfn as sf
from shardfn import P

CALLS, LAYERS, WIDTH = 3, 3, 16
HERE = Path(__file__).name


def step(params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        h = x
        for w in params:
            h = torch.tanh(h @ w)
        return h.square().mean()

    value, grads = sf.value_and_grad(loss)(params)
    return value, sf.tree_map(lambda p, g: p - 0.1 * g, params, grads)


def sharded(mesh: Any, backend: str) -> Any:
    return sf.shard(step, mesh, (P("dp"), P("dp")), backend=backend)


def arguments(layers: int = LAYERS) -> Any:
    torch.manual_seed(0)
    return [torch.randn(WIDTH, WIDTH) for _ in range(layers)], torch.randn(6, WIDTH)


def _profiled(backend: str, path: str) -> None:
    """Write the profile of some calls on two ranks."""
    mesh = sf.make_mesh((2,), ("dp",))
    args = arguments()
    run = sharded(mesh, backend)
    run(*args)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(CALLS):
            run(*args)
    if mesh.get_rank() == 0:
        found.export_chrome_trace(path)


def profiled(backend: str, folder: Path) -> Any:
    """The profile of a real run, and the lowered step."""
    path = str(folder / "profile.json")
    run_ranks(2, _profiled, backend, path)
    with sf.fake_world(2, numerics=False):
        lowered = sharded(sf.make_mesh((2,), ("dp",)), backend).lower(*arguments())
    return path, lowered


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return profiled("aten", tmp_path_factory.mktemp("profiles"))


def test_compiled_code_has_rows_of_collectives_alone(tmp_path: Path) -> None:
    path, lowered = profiled("inductor", tmp_path)
    found = sf.overlay(lowered.time(), path)
    assert found.calls == CALLS
    kinds = {f"{c.kind} over {c.axis}" for c in lowered.collectives}
    assert {row.name for row in found.rows} == kinds
    assert min(row.measured for row in found.rows) > 0


def spans(path: str, name: str) -> list[float]:
    """The durations of the events whose name begins so, in seconds."""
    rows = json.loads(Path(path).read_text())["traceEvents"]
    return [1e-6 * x["dur"] for x in rows if x.get("ph") == "X" and x["name"].startswith(name)]


def test_the_step_takes_the_median_of_its_calls(measured: Any) -> None:
    path, lowered = measured
    found = sf.overlay(lowered.time("A100"), path)
    durations = sorted(spans(path, "shardfn: call of "))
    assert found.calls == len(durations) == CALLS
    assert found.step.measured == pytest.approx(durations[1])
    assert found.step.predicted == lowered.time("A100").total
    assert 0 < found.compute.measured < found.step.measured
    assert sf.overlay(lowered, path).hardware == lowered.time().hardware


def test_each_collective_has_a_row_with_its_predicted_and_measured_time(measured: Any) -> None:
    path, lowered = measured
    time = lowered.time()
    found = sf.overlay(time, path)
    rows = {row.name: row for row in found.rows if " over dp" in row.name}
    kinds = {f"{c.kind} over {c.axis}" for c in lowered.collectives}
    assert rows.keys() == kinds
    both = [row for row in found.rows if " over dp" in row.name]
    assert sum(row.predicted for row in both) == pytest.approx(time.communication)
    assert sum(row.count for row in both) == len(lowered.collectives)
    took = sum(spans(path, "gloo:"))
    assert min(row.measured for row in both) > 0
    assert sum(row.measured for row in both) <= took
    assert all(row.ratio == row.measured / row.predicted for row in both)


def test_op_by_op_each_op_of_a_line_has_a_row(measured: Any) -> None:
    path, lowered = measured
    time = lowered.time()
    ops = {(r.name, r.where): r for r in sf.overlay(time, path).rows if " over " not in r.name}
    predicted = [x for x in time.ops if x.axis is None]
    assert sum(row.predicted for row in ops.values()) == pytest.approx(time.compute)
    counts = dict.fromkeys(("mm", "tanh"), 0)
    for (name, where), row in ops.items():
        if name in counts:
            assert where.startswith(HERE) and row.measured > 0
            counts[name] += row.count
    assert counts == {n: sum(x.count for x in predicted if x.name == n) for n in counts}
    names = ("aten::mm", "aten::tanh")
    every = [x for name in names for x in spans(path, name) if x]
    mine = sum(row.measured for (name, _), row in ops.items() if name in ("mm", "tanh"))
    assert 0 < mine <= sum(every)


def test_the_largest_difference_comes_first_and_the_text_has_all_figures(measured: Any) -> None:
    path, lowered = measured
    found = sf.overlay(lowered, path)
    differences = [abs(row.measured - row.predicted) for row in found.rows]
    assert differences == sorted(differences, reverse=True)
    lines = str(found).splitlines()
    assert lines[0] == f"{found.name}: predicted on {found.hardware}, measured in 3 calls"
    assert lines[1].split() == ["predicted", "measured", "ratio", "count"]
    assert lines[2].endswith("the step") and lines[3].endswith("without waits")
    first = found.rows[0]
    assert f"{first.ratio:.2f}" in lines[4] and first.name in lines[4] and first.where in lines[4]


def test_a_merged_trace_has_both(measured: Any, tmp_path: Path) -> None:
    path, lowered = measured
    found = sf.overlay(lowered, path, path=tmp_path / "both.json.gz")
    assert found.path == str(tmp_path / "both.json.gz")
    assert str(found).endswith(f"both in {found.path}")
    merged = json.loads(gzip.decompress(Path(found.path).read_bytes()))["traceEvents"]
    own = json.loads(Path(path).read_text())["traceEvents"]
    assert merged[: len(own)] == own
    rest = merged[len(own) :]
    names = [x["args"]["name"] for x in rest if x["name"] == "process_name"]
    assert names == ["predicted: each of ranks 0, 1"]
    events = [x for x in rest if x["ph"] == "X"]
    assert len(events) == len(lowered.time().events)
    calls = [x["ts"] for x in own if x.get("name", "").startswith("shardfn: call of ")]
    assert min(x["ts"] for x in events) == pytest.approx(max(calls))
    assert not {x["pid"] for x in rest} & {x.get("pid") for x in own}


def refused(predicted: Any, path: Any) -> str:
    with pytest.raises(sf.ShardError) as error:
        sf.overlay(predicted, path)
    return str(error.value)


def test_a_trace_of_another_program_is_refused_by_the_collectives_that_differ(
    measured: Any,
) -> None:
    path, _ = measured
    with sf.fake_world(2, numerics=False):
        mesh = sf.make_mesh((2,), ("dp",))
        more = sharded(mesh, "aten").lower(*arguments(LAYERS + 2))
        replicated = sf.shard(step, mesh, (P(), P("dp")), backend="aten").lower(*arguments())
    text = refused(more, path)
    assert "overlay, profile: the profile is a trace of another program" in text
    assert "missing: " in text and " over dp" in text and "not predicted" not in text
    assert "lower the function with the arguments of the profiled call" in text
    assert "not predicted: " in refused(replicated, path)
    assert "all_gather over dp" in refused(replicated, path)
    other = sf.jit(lambda x: x + 1, backend="aten").lower(sf.ShapeDtype((3,)))
    text = refused(other, path)
    assert "the profile is a trace of another program: it has calls of shard(step)" in text
    assert "a profile recorded during a call of jit(<lambda>)" in text


def test_files_that_are_no_trace_are_refused(tmp_path: Path) -> None:
    lowered = sf.jit(lambda x: x + 1, backend="aten").lower(sf.ShapeDtype((3,)))
    assert "cannot be read: No such file or directory" in refused(lowered, tmp_path / "absent.json")
    (tmp_path / "text.json").write_text("[1, 2]")
    assert "is not a trace" in refused(lowered, tmp_path / "text.json")
    (tmp_path / "empty.json").write_text('{"traceEvents": []}')
    assert "the profile is a trace of another program: it has no call" in refused(
        lowered, tmp_path / "empty.json"
    )
    text = refused(3, tmp_path / "empty.json")
    assert text.startswith("overlay, predicted: predicted is of type int")
    assert 'sf.overlay(fn.lower(*args).time("H100"), "profiler.json")' in text
