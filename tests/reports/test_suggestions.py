"""Ten mistakes: the report blames the line and the module, and its suggestion spares the cost."""

from __future__ import annotations

import linecache
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from reports.mistakes import MISTAKES, Mistake

import shardfn as sf
from shardfn import P
from shardfn.durations import human_seconds
from shardfn.reports import suggestions
from shardfn.reports.suggestions import Change, Suggestion


def lowered(x: Mistake, ins: Any, outs: Any) -> Any:
    with sf.fake_world(math.prod(x.axes.values()), numerics=False):
        mesh = sf.make_mesh(tuple(x.axes.values()), tuple(x.axes))
        return sf.shard(x.fn, mesh, ins, outs).lower(*x.args)


def line_of(source: str | None) -> str:
    if source is None:
        return ""
    file, _, number = source.rpartition(":")
    return linecache.getline(file, int(number))


def step_change(before: Any, after: Any) -> str:
    change = after.summary.total - before.summary.total
    return f"{human_seconds(abs(change))} {'more' if change > 0 else 'less'}"


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("is_large", [False, True])
def test_a_mistake_is_blamed_on_its_line_and_the_suggestion_spares_it(
    is_large: bool, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = MISTAKES[name]
    if is_large:
        monkeypatch.setattr(suggestions, "LARGE", 0)
    page = lowered(x, x.placements, x.out_placements).report(path=tmp_path / "report.html")
    blamed = [row for row in page.suggestions if row.kind == x.kind]
    assert blamed, page.collectives
    row = blamed[0]
    assert x.line in line_of(row.source) and bool(x.line) == (row.source is not None)
    assert row.module == x.module
    suggestion = page.suggestions[row]
    outs = x.out_placements if not suggestion.results else suggestion.results[0].after
    better = lowered(x, suggestion.in_placements, outs)
    again = better.report(path=tmp_path / "better.html")
    key = lambda each: (each.kind, each.axis, each.source, each.module, each.leaves)
    assert key(row) not in map(key, again.collectives)
    assert again.summary.nbytes <= page.summary.nbytes or suggestion.held[1] < suggestion.held[0]
    assert suggestion.sent == (page.summary.nbytes, again.summary.nbytes)
    assert suggestion.seconds == pytest.approx((page.summary.total, again.summary.total))
    shown = page.contents["collectives"][page.collectives.index(row)]
    texts = page.contents["strings"]
    assert [texts[x] for x in shown["instead"]] == suggestion.changes
    assert f"a step takes {step_change(page, again)}" in texts[shown["saves"]]


def test_what_to_change_first_is_in_the_sentences(tmp_path: Path) -> None:
    x = MISTAKES["the contraction of a weight is sharded"]
    page = lowered(x, x.placements, None).report(path=tmp_path / "report.html")
    saved = r"a step takes [\d.]+ us less and a rank sends 1.0 MiB less.*"
    change = r"Change first: p\['up'\] at P\(None, 'tp'\) in place of P\('tp'\)\."
    assert re.search(
        f"{change} With it, {saved} Among what it spares: all_gather over tp at", str(page)
    )


def test_the_largest_values_are_named_first() -> None:
    change = lambda path, nbytes: Change(path, P(), P("tp"), nbytes)
    small = [change(f"p['layers.{k}.bias']", 8) for k in range(3)]
    rows = (*small, change("p['b']", 16), change("p['head']", 4096), change("p['c']", 12))
    two = (1, 1)
    found = Suggestion(rows, (), {}, two, two, (1.0, 0.5), two)
    of = lambda path: f"{path} at P('tp') in place of P()"
    paths = ["p['head']", "p['layers.*.bias']", "p['b']", "p['c']"]
    assert found.changes == [*map(of, paths)]
    assert str(found) == " and ".join([*map(of, paths[:3]), "1 other"])


def residual(w: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w) + 1


def test_a_forgotten_constraint_is_named_with_the_line_of_the_value(tmp_path: Path) -> None:
    pinned = lambda w, x: torch.relu(sf.constrain(x @ w, P("tp"))) + 1
    args = sf.ShapeDtype((255, 255)), sf.ShapeDtype((64, 255))
    with sf.fake_world(4, numerics=False):
        mesh = sf.make_mesh((4,), ("tp",))
        specs = P("tp", None), P(None, "tp")
        page = sf.shard(residual, mesh, specs).lower(*args).report(path=tmp_path / "a.html")
        after = sf.shard(pinned, mesh, specs).lower(*args)
    (row,) = page.contents["collectives"]
    texts = page.contents["strings"]
    assert texts[row["instead"][0]].startswith(
        "sf.constrain(x, P('tp')), where x is the value made"
    )
    assert f"try {texts[row['instead'][0]]}, whose gain is not estimated." in page.summary.first
    assert "return torch.relu(x @ w)" in line_of(texts[row["source"]])
    assert not after.implicit and after.explain().nbytes <= row["nbytes"]


def test_a_step_that_does_not_fit_says_what_to_shard(tmp_path: Path) -> None:
    tiny = sf.Hardware("tiny", 1e12, 1e12, 1e11, 1e10, 1e-6, capacity=2e5)
    x = MISTAKES["a parameter is left replicated"]
    page = lowered(x, x.placements, None).report(path=tmp_path / "report.html", hardware=tiny)
    assert page.summary.fits is True
    tiny = sf.Hardware("tiny", 1e12, 1e12, 1e11, 1e10, 1e-6, capacity=1e4)
    page = lowered(x, x.placements, None).report(path=tmp_path / "report.html", hardware=tiny)
    assert page.summary.fits is False and "Change first: " in page.summary.first


def test_fully_sharded_parameters_have_no_suggestion(tmp_path: Path) -> None:
    x = MISTAKES["a parameter is left replicated"]
    page = lowered(x, (P("dp"), P("dp"), P("dp")), None).report(path=tmp_path / "report.html")
    assert not page.suggestions
    texts = page.contents["strings"]
    whys = {texts[row["why"]] for row in page.contents["collectives"]}
    assert "a parameter sharded over dp is gathered where the code uses it" in whys
    assert "the gradient of a parameter, reduced over dp" in whys


def layers(params: Any, x: torch.Tensor) -> torch.Tensor:
    """A network of equal layers, whose rows are scaled by their largest element."""
    for w in params:
        h = torch.relu(x @ w["up"])
        x = x + (h / (1 + h.abs().amax(-1, keepdim=True))) @ w["down"]
    return x.square().mean()


@pytest.mark.parametrize("wrong", [(0, 1), (0,), (1,)])
def test_one_mistake_in_equal_layers_is_mended_at_once(
    wrong: tuple[int, ...], tmp_path: Path
) -> None:
    places = [
        {"up": P(None, "tp"), "down": P(None, "tp") if i in wrong else P("tp")} for i in range(2)
    ]
    w = {"up": sf.ShapeDtype((8, 32)), "down": sf.ShapeDtype((32, 8))}
    with sf.fake_world(8, numerics=False):
        mesh = sf.make_mesh((4, 2), ("dp", "tp"))
        step = lambda ins: sf.shard(sf.value_and_grad(layers), mesh, ins).lower(
            [w, w], sf.ShapeDtype((16, 8))
        )
        page = step((places, P("dp"))).report(path=tmp_path / "page.html")
        gathers = [row for row in page.suggestions if row.kind == "all_gather"]
        suggestion = page.suggestions[gathers[0]]
        name = "*" if len(wrong) > 1 else min(wrong)
        assert str(suggestion) == f"params[{name}]['down'] at P('tp') in place of P(None, 'tp')"
        better = step(suggestion.in_placements).report(path=tmp_path / "better.html")
        assert not better.suggestions
        assert not [row for row in better.collectives if row.kind == "all_gather"]


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"tp": 4}])
def test_a_weight_sharded_on_its_rows_is_found_in_a_gradient_where_latency_counts_most(
    axes: dict[str, int], tmp_path: Path
) -> None:
    weights, x = {"up": sf.ShapeDtype((256, 1024)), "down": sf.ShapeDtype((1024, 256))}, (64, 256)
    step = sf.value_and_grad(lambda p, x: (torch.relu(x @ p["up"]) @ p["down"]).square().mean())
    rows = {"up": P("tp", None), "down": P("tp", None)}
    where = rows, P("dp") if "dp" in axes else P()
    args = weights, sf.ShapeDtype(x)
    page = sf.report(step, *args, mesh=axes, in_placements=where, path=tmp_path / "report.html")
    (found,) = [x for row, x in page.suggestions.items() if row.kind == "all_gather"]
    assert str(found) == "p['up'] at P(None, 'tp') in place of P('tp')"
    assert found.sent[1] < found.sent[0] and found.seconds[1] < found.seconds[0]


def test_a_step_whose_lines_are_all_one_has_suggestions_too(tmp_path: Path) -> None:
    names: dict[str, Any] = {"torch": torch}
    exec("def loss_fn(p, x): return (torch.relu(x @ p['up']) @ p['down']).sum()", names)
    weights = {"up": sf.ShapeDtype((256, 1024)), "down": sf.ShapeDtype((1024, 256))}
    page = sf.report(
        sf.value_and_grad(names["loss_fn"]),
        weights,
        sf.ShapeDtype((64, 256)),
        mesh={"dp": 2, "tp": 2},
        in_placements=(P("tp"), P("dp")),
        path=tmp_path / "report.html",
    )
    assert "all_gather" in {row.kind for row in page.suggestions}
