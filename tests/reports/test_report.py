"""The report of a step: its figures are those that are counted when the program runs."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from reports.counted import run_alone
from reports.steps import STEPS, followed, pipelined

import shardfn as sf
from shardfn import P
from shardfn.inspect.step_time import RankTimeline, StepTime
from shardfn.inspect.timeline.events import Event, GraphRun
from shardfn.reports import program
from shardfn.reports.strings import Strings
from shardfn.reports.summary import ARITHMETIC, TRAFFIC, Summary
from shardfn.reports.timeline import timeline_rows


@functools.cache
def lowered(name: str) -> Any:
    return STEPS[name]()


def embedded(path: Path) -> Any:
    """The contents that a page has for its script."""
    page = path.read_text()
    found = re.search(r'<script id="contents" type="application/json">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])


def sent_on(page: Any) -> tuple[Counter[str], Counter[str]]:
    """The number of collectives and their bytes, by kind, as a page has them."""
    texts = page["strings"]
    sent, nbytes = Counter(), Counter()
    for row in page["collectives"]:
        kind, count, size = texts[row["kind"]], row["count"], row["nbytes"]
        sent[kind] += count
        nbytes[kind] += size
    return sent, nbytes


@pytest.mark.parametrize("name", STEPS)
def test_collectives_and_bytes_are_those_of_a_run(name: str, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    lowered(name).report(path=path)
    counting = run_alone(lowered(name).program)
    assert sent_on(embedded(path)) == (counting.sent, counting.nbytes)
    assert counting.sent


@pytest.mark.parametrize("name", STEPS)
def test_the_peak_is_within_15_percent_of_that_of_a_run(name: str, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    page = lowered(name).report(path=path)
    counting = run_alone(lowered(name).program)
    assert page.summary.peak == pytest.approx(counting.peak, rel=0.15)
    shown = embedded(path)["memory"]
    assert shown["peak"] == page.summary.peak
    alive = sum(row["nbytes"] for row in shown["alive"]) + shown["left_out"]
    assert alive == page.summary.peak
    assert max(sum(row[2:]) for row in shown["moments"]) == page.summary.peak


@pytest.mark.parametrize("name", STEPS)
def test_the_parts_of_the_time_add_up_to_that_of_the_step(name: str, tmp_path: Path) -> None:
    page = lowered(name).report(path=tmp_path / "report.html", hardware="A100")
    time = lowered(name).time("A100")
    assert page.summary.total == time.total
    assert sum(page.summary.parts.values()) == pytest.approx(time.total)


@pytest.mark.parametrize("name", STEPS)
def test_events_and_exposed_time_add_up_to_those_of_the_step(name: str, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    lowered(name).report(path=path)
    time, page = lowered(name).time(), embedded(path)
    drawn = page["timeline"]
    (lane,) = drawn["lanes"]
    lengths: Counter[str] = Counter()
    for track, _, length, *_ in lane["events"]:
        lengths[drawn["tracks"][track]] += length / 1e9
    rounding = 1e-9 * len(lane["events"])
    assert lengths["compute"] == pytest.approx(time.compute, abs=rounding)
    assert lengths["exposed"] == pytest.approx(time.exposed, abs=rounding)
    rows = page["collectives"]
    assert sum(row["seconds"] for row in rows) == pytest.approx(time.communication)
    assert sum(row["exposed"] for row in rows) == pytest.approx(time.exposed)


def test_a_timeline_of_many_events_is_drawn_as_fewer_of_the_same_length() -> None:
    event = lambda k: Event("mul", "compute", k * 1e-6, 1e-6, "a.py:1", None)
    run = GraphRun(0.03, tuple(event(k) for k in range(30_000)))
    one = RankTimeline("", (0,), run)
    step = StepTime("f", "H100", 0.03, 0.0, 0.0, (), ranks=(one,))
    drawn = timeline_rows([step], Strings())
    (lane,) = drawn["lanes"]
    assert drawn["events"] == 30_000 and len(lane["events"]) <= 12_000
    assert sum(row[2] for row in lane["events"]) == pytest.approx(0.03e9, rel=1e-3)
    assert sum(1 + row[10] for row in lane["events"] if len(row) > 10) == 30_000


def test_it_prints_the_step_in_sentences(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    lines = str(lowered("replicated").report(path=path)).split("\n")
    assert lines[0].startswith("shard(value_and_grad(<lambda>)) on mesh (dp=2) fits: ")
    assert lines[1].startswith("A step takes ")
    assert " bounds the step: " in lines[2]
    assert lines[-1].startswith(str(path))


def test_a_step_that_does_not_fit_says_so(tmp_path: Path) -> None:
    small = sf.Hardware("small", 1e12, 1e12, 1e11, 1e10, 1e-6, capacity=1e3)
    page = lowered("replicated").report(path=tmp_path / "report.html", hardware=small)
    assert page.summary.fits is False
    assert "does not fit: " in str(page)


def test_the_page_is_one_file_and_names_no_other(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    lowered("modules").report(path=path)
    page = path.read_text()
    assert not re.search(r"""(src|href)=["']?(https?:|//)""", page)
    assert "@import" not in page and "url(" not in page and "fetch(" not in page
    assert path.stat().st_size < 3e6


def test_names_of_the_program_end_no_script(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    with sf.fake_world(2, numerics=False):
        mesh = sf.make_mesh((2,), ("dp",))
        step = sf.shard(lambda x: x["</script><b>"].sum(), mesh, P("dp"))
        step.lower({"</script><b>": sf.ShapeDtype((4,))}).report(path=path)
    page = path.read_text()
    assert page.count("</script>") == 2
    assert "['</script><b>']" in str(embedded(path)["strings"])


def total(x: torch.Tensor) -> torch.Tensor:
    return x.sum()


X = sf.ShapeDtype((8, 3))


def test_a_function_a_transform_and_a_lowered_program_have_the_same_report(tmp_path: Path) -> None:
    paths = [tmp_path / f"{k}.html" for k in range(4)]
    sf.report(total, X, mesh={"dp": 4}, in_placements=P("dp"), path=paths[0])
    sf.report(sf.shard(total, in_placements=P("dp")), X, mesh={"dp": 4}, path=paths[1])
    with sf.fake_world(4, numerics=False):
        mesh = sf.make_mesh((4,), ("dp",))
        sf.report(total, X, mesh=mesh, in_placements=P("dp"), path=paths[2])
        sf.shard(total, mesh, P("dp")).lower(X).report(path=paths[3])
    pages = [path.read_text() for path in paths]
    assert len(set(pages)) == 1


def test_bad_calls_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    with pytest.raises(sf.ShardError, match="report: total is not transformed, and mesh is None"):
        sf.report(total, X, path=path)
    with pytest.raises(
        sf.ShardError,
        match=r"hardware is 'H1000'\n  needed: the name of a known device \(A100, .*H100",
    ):
        sf.report(total, X, mesh={"dp": 2}, hardware="H1000", path=path)
    with pytest.raises(sf.ShardError, match="'no/folder/x.html' cannot be written: No such file"):
        sf.report(total, X, mesh={"dp": 2}, path="no/folder/x.html")
    with pytest.raises(sf.ShardError, match="report, path: path is 3, a int, and must be the path"):
        sf.report(total, X, mesh={"dp": 2}, path=3)
    with pytest.raises(sf.ShardError, match="report, mesh: mesh is 8, a int, and must be"):
        sf.report(total, X, mesh=8, path=path)
    assert not path.exists()


def test_a_pipeline_has_a_lane_for_each_coordinate(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    low = pipelined()
    page = low.report(path=path)
    lanes = embedded(path)["timeline"]["lanes"]
    assert [(lane["title"], lane["ranks"]) for lane in lanes] == [(f"pp={k}", 2) for k in range(4)]
    time = low.time()
    assert page.summary.parts["the bubble"] == time.bubble > 0
    assert sum(page.summary.parts.values()) == pytest.approx(time.total)
    assert page.summary.collectives == len(low.collectives)
    assert (
        "More microbatches, or several stages per pipeline rank, shorten" in page.summary.first
        and not page.suggestions
    )
    # 1F1B: the first coordinate has the most microbatches under way
    assert page.summary.holder == "pp=0" and page.summary.peak == low.memory.peak
    assert "of a device, at pp=0." in str(page)


def test_a_bubble_that_does_not_bound_a_step_is_named_with_its_share(tmp_path: Path) -> None:
    page = pipelined(16384, 65536, microbatches=32).report(path=tmp_path / "report.html")
    share = page.summary.parts["the bubble"] / page.summary.total
    assert page.summary.bound == "arithmetic" and share > 0.2
    assert f"a rank waits for other stages, is {share:.0%} of the step" in page.summary.first


def test_a_call_that_autograd_follows_is_its_forward_and_its_backward(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    low = followed()
    page = low.report(path=path)
    halves = (low, low.backward)
    assert page.summary.total == sum(half.time().total for half in halves)
    assert page.summary.collectives == len(low.explain().collectives) == 2
    assert len(embedded(path)["program"]["blocks"]) == 2


def test_a_program_too_large_to_show_is_an_outline_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    lowered("modules").report(path=path)
    whole = embedded(path)["program"]
    monkeypatch.setattr(program, "MOST_LINES", 10)
    lowered("modules").report(path=path)
    outline = embedded(path)["program"]
    assert not whole["outline"] and outline["outline"]
    assert lines_of(whole["blocks"]) == whole["ops"] == outline["ops"]
    left_out = sum(block[2] for block in outline["blocks"])
    assert lines_of(outline["blocks"]) == whole["ops"] - left_out == len(outline_of(whole))


def lines_of(blocks: list[Any]) -> int:
    """The lines of ops of some blocks."""
    return sum(1 if isinstance(x, str) else lines_of(x[3]) if x else 0 for x in blocks)


def outline_of(whole: Any) -> list[str]:
    """The lines of a program that are collectives."""
    found: list[str] = []

    def add(blocks: list[Any]) -> None:
        for x in blocks:
            if isinstance(x, str):
                found.extend([x] if re.search(r"= \w+\[[^]]*(dp|tp)\]\(", x) else [])
            else:
                add(x[3])

    add(whole["blocks"])
    return found


def test_communication_over_all_axes_is_one_bound() -> None:
    parts = {ARITHMETIC: 0.4, "communication over dp": 0.3, "communication over tp": 0.2}
    summary = Summary("step", "(dp=2, tp=2)", "H100", 1.0, parts, 1, None, 1, 2)
    assert summary.bound == "communication"
    assert (
        "Communication bounds the step: during 50% of the step a rank only waits"
        in summary.sentences()[2]
    )


def test_a_busy_link_bounds_a_step_that_computes_less_than_it_sends() -> None:
    parts = {ARITHMETIC: 0.45, TRAFFIC: 0.1, "communication over dp": 0.4}
    summary = Summary(
        "step", "(dp=2)", "H100", 1.0, parts, 1, None, 1, 2, sends={"dp": 0.86, "tp": 0.1}
    )
    assert summary.sentences()[2] == (
        "Communication bounds the step: during 40% of the step a rank only waits for "
        "collectives, and collectives over dp run during 86% of the step."
    )
    computes = attrs.evolve(summary, sends={"dp": 0.5})
    assert computes.sentences()[2:] == [
        "Arithmetic bounds the step: 45% of the step.",
        "During 40% of the step a rank only waits for collectives.",
    ]
    assert computes.bound == ARITHMETIC


def test_lines_of_a_cast_parameter_are_those_that_read_it(tmp_path: Path) -> None:
    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ params["up"])
        return (h @ params["down"]).square().mean()

    params = {"up": sf.ShapeDtype((8, 48)), "down": sf.ShapeDtype((48, 16))}
    with sf.fake_world(4, numerics=False):
        mesh = sf.make_mesh((4,), ("dp",))
        fn = sf.bucketed_grad(sf.mixed_precision(loss))
        step = sf.shard(fn, mesh, (P("dp"), P("dp")), backend="aten")
        page = step.lower(params, sf.ShapeDtype((8, 8))).report(path=tmp_path / "report.html")
    texts, lines = page.contents["strings"], page.contents["lines"]
    (bucket,) = (x for x in page.contents["collectives"] if len(x["lines"]) == 2)
    shares = {lines[line]: part for line, part in bucket["lines"]}
    assert texts[bucket["kind"]] == "all_gather"
    assert shares == {
        'return (h @ params["down"]).square().mean()': pytest.approx(2 / 3),
        'h = torch.tanh(x @ params["up"])': pytest.approx(1 / 3),
    }


def test_an_axis_over_which_nothing_is_placed_is_named_first(tmp_path: Path) -> None:
    shapes = sf.ShapeDtype((64, 64)), sf.ShapeDtype((64, 64))
    with sf.fake_world(8, numerics=False):
        mesh = sf.make_mesh((2, 4), ("dp", "tp"))
        step = sf.shard(lambda x, w: x @ w, mesh, (P("dp"), P()), backend="aten")
        page = step.lower(*shapes).report(path=tmp_path / "report.html")
    assert page.summary.first == (
        "Change first: shard the batch or parameters over tp. No argument is sharded over tp, "
        "so its 4 ranks compute the same."
    )


def test_reductions_and_updates_are_no_part_of_the_forward(tmp_path: Path) -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return w - sf.bucketed_grad(lambda w, x: torch.tanh(x @ w).sum())(w, x)[1]

    with sf.fake_world(2, numerics=False):
        mesh = sf.make_mesh((2,), ("dp",))
        run = sf.shard(step, mesh, (P(), P("dp")), backend="aten")
        lowered = run.lower(sf.ShapeDtype((8, 8)), sf.ShapeDtype((8, 8)))
        page = lowered.report(path=tmp_path / "report.html")
    (program,) = page.contents["program"]["blocks"]
    assert [block[0] for block in program[3]] == ["forward", "backward", "reductions and updates"]


def test_rows_say_what_asks_for_them_and_the_lines_of_buckets(tmp_path: Path) -> None:
    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ params["up"])
        return (h @ params["down"]).square().mean()

    params = {"up": sf.ShapeDtype((8, 16)), "down": sf.ShapeDtype((16, 8))}
    with sf.fake_world(4, numerics=False):
        mesh = sf.make_mesh((4,), ("dp",))
        step = sf.shard(sf.bucketed_grad(loss), mesh, (P("dp"), P("dp")), backend="aten")
        page = step.lower(params, sf.ShapeDtype((8, 8))).report(path=tmp_path / "report.html")
    texts, lines = page.contents["strings"], embedded(tmp_path / "report.html")["lines"]
    gathers, reductions = (
        [x for x in page.contents["collectives"] if texts[x["kind"]] == kind]
        for kind in ("all_gather", "reduce_scatter")
    )
    assert gathers
    assert {texts[x["asked"]] for x in gathers} == {"parameter gather"}
    assert {texts[x["asked"]] for x in reductions} == {"a placement"}
    (bucket,) = reductions
    reduced = [line for line, _ in bucket["lines"]]
    assert sum(part for _, part in bucket["lines"]) == pytest.approx(1)
    gathered = [line for x in gathers for line, _ in x["lines"]]
    for numbers in (gathered, reduced):
        shown = {lines[str(number)] for number in numbers}
        assert len(shown) == 2
        assert all("@ params[" in line for line in shown), "the texts of the lines are shown"
