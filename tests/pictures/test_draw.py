"""Pictures are valid files, hold what they show, and no text is outside of them or over another."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

import shardfn as sf
from shardfn import P
from shardfn.pictures import sheet
from shardfn.pictures.draw import page
from tests.pictures.drawn import EXAMPLES, example

LIB: Any = sf  # called with wrong types
SVG = "{http://www.w3.org/2000/svg}"
SLACK = 1.5  # points by which boxes of letters may touch


def texts_of(figure: Figure) -> str:
    shown = [*figure.texts, *(text for axes in figure.axes for text in axes.texts)]
    return "\n".join(text.get_text() for text in shown)


def boxes(figure: Figure) -> dict[str, Any]:
    """The rectangles that have a name."""
    patches = [patch for axes in figure.axes for patch in axes.patches]
    return {patch.get_gid().removeprefix("at "): patch for patch in patches if patch.get_gid()}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_picture_is_a_valid_png_and_a_valid_svg(name: str, tmp_path: Path) -> None:
    png, svg = tmp_path / "a.png", tmp_path / "a.SVG"
    x = example(name)
    figure = sf.draw(x, path=str(png))
    sf.draw(x, path=svg)
    assert isinstance(figure, Figure)
    with Image.open(png) as image:
        image.load()
        assert image.format == "PNG" and image.width == 3 * sheet.WIDTH
        assert len(image.convert("RGB").getcolors(2**24) or ()) > 2
    root = ElementTree.parse(svg).getroot()
    assert root.tag == f"{SVG}svg"
    drawn = " ".join("".join(text.itertext()) for text in root.iter(f"{SVG}text"))
    for text in figure.texts:
        assert text.get_text() in drawn


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_text_is_outside_of_the_picture_or_over_another(name: str) -> None:
    figure = sf.draw(example(name))
    renderer = FigureCanvasAgg(figure).get_renderer()
    shown = [*figure.texts]
    for axes in figure.axes:
        shown += axes.texts
        if axes.axison:
            shown += [*axes.get_xticklabels(), *axes.get_yticklabels()]
    shown = [text for text in shown if text.get_text()]
    areas = [(text.get_text(), text.get_window_extent(renderer)) for text in shown]
    width, height = figure.bbox.width, figure.bbox.height
    for text, area in areas:
        is_inside = area.x0 >= 0 and area.y0 >= 0 and area.x1 <= width and area.y1 <= height
        assert is_inside, (text, area)
    for (one, a), (other, b) in itertools.combinations(areas, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        down = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert min(across, down) <= SLACK, (one, other)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_notebook_shows_svg_in_the_colours_of_its_page(name: str) -> None:
    x = example(name)
    if name in ("large mesh",):  # a DTensor of torch, whose page is torch's
        text = page(x)
    else:
        text = x._repr_html_()
    assert text is not None
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg" and root.get("width") == "100%"
    assert "currentColor" in text and sheet.INK not in text
    assert len(text) < 200_000
    identities = [e.get("id") for e in root.iter() if e.get("id")]
    assert len(identities) == len(set(identities))


SHARDED = [
    name
    for name in EXAMPLES
    if list(EXAMPLES).index(name) < list(EXAMPLES).index("no element") and name != "terms"
]


@pytest.mark.parametrize("name", SHARDED)
def test_the_boxes_of_a_rank_are_its_elements_and_its_values(name: str) -> None:
    x = example(name)
    whole = torch.zeros(x.shape, dtype=torch.int64)
    with_values = sf.full(x)
    figure = sf.draw(x)
    found = boxes(figure)
    shown = Counter(texts_of(figure).split("\n"))
    for rank in range(8):
        local = x.to_local(rank=rank)
        drawn = [text for text in found if text.startswith(f"rank {rank}: ")]
        count = 0
        for text in drawn:
            index = tuple(
                slice(int(a), int(b)) for a, b in re.findall(r"(\d+):(\d+)", text.split(": ")[1])
            )
            block = with_values[index]
            whole[index] += 1
            count += block.numel()
            if block.numel() == 1 and block.dtype == torch.int64:
                assert str(block.item()) in shown
        assert count == local.numel()
    assert bool((whole >= 1).all())


def test_values_of_small_tensors_are_written_and_terms_are_hatched() -> None:
    x = placed_terms = example("terms")
    figure = sf.draw(x)
    written = Counter(texts_of(figure).split("\n"))
    assert all(written[str(k)] == 8 for k in range(6))  # 2 x 4 ranks hold 0 to 5 each
    hatched = [patch for text, patch in boxes(figure).items() if patch.get_hatch()]
    assert len(hatched) == 4
    assert "Hatched blocks: each rank holds a term. The value is the sum over dp." in texts_of(
        figure
    )
    assert placed_terms is x


def test_ranks_that_hold_the_same_have_one_colour() -> None:
    found = boxes(sf.draw(example("zigzag")))
    colours = {
        rank: {
            to_hex(patch.get_facecolor())
            for text, patch in found.items()
            if text.startswith(f"rank {rank}: ")
        }
        for rank in range(8)
    }
    assert all(len(mine) == 1 for mine in colours.values())
    assert [colours[rank] for rank in range(4)] == [colours[rank] for rank in range(4, 8)]
    assert len({*map(tuple, colours.values())}) == 4


def test_a_schedule_has_a_box_for_each_action_where_and_when_it_runs() -> None:
    schedule = sf.schedules.zbv(2, 3)
    found = boxes(sf.draw(schedule))
    assert sorted(found) == sorted(str(x) for row in schedule.table for x in row)
    one = boxes(sf.draw(sf.schedules.gpipe(2, 1)))
    assert one["BW0.0"].get_width() == pytest.approx(2 * one["F0.0"].get_width())
    assert one["F1.0"].get_x() == pytest.approx(one["F0.0"].get_x() + one["F0.0"].get_width())
    assert one["F1.0"].get_y() > one["F0.0"].get_y()
    shades = boxes(sf.draw(sf.schedules.zero_bubble(1, 2)))
    assert len({to_hex(patch.get_facecolor()) for patch in shades.values()}) == 6


def test_a_large_schedule_is_its_outline() -> None:
    figure = sf.draw(example("large schedule"))
    assert "The schedule is too large to draw; the picture shows its outline." in texts_of(figure)
    assert len(figure.axes[0].patches) < 64 * 60


def test_large_things_say_what_is_left_out() -> None:
    mesh = texts_of(sf.draw(example("large mesh")))
    assert "Too many ranks to draw: 1,024 ranks, of which 16 are shown." in mesh
    blocks = texts_of(sf.draw(example("many blocks")))
    assert "Too many blocks to draw: only the first blocks of a dim are shown." in blocks
    params = {f"w{'x' * k}": torch.ones(2) for k in range(40)}
    table = texts_of(sf.draw(sf.placements(params, {"*": P()})))
    assert "The table has 40 rows, of which the first 24 are shown." in table


def test_a_schedule_that_waits_forever_says_so() -> None:
    text = texts_of(sf.draw(example("schedule that waits")))
    assert "the schedule deadlocks" in text.replace("\n", " ")


@pytest.mark.parametrize("backend", ["lowered", "lowered op by op"])
def test_the_curve_of_memory_has_the_peak(backend: str) -> None:
    memory = example(backend).memory
    moments = memory.moments()
    peak = max(moments, key=lambda moment: moment.nbytes)
    assert peak.nbytes == memory.peak
    kinds = ("arguments", "results", "activations", "collectives", "temporaries")
    assert peak.sizes == tuple(memory.of(kind) for kind in kinds)
    assert moments[-1].sizes[1] > 0  # the results are there at the end
    axes = sf.draw(memory).axes[0]
    tops = [c.get_paths()[0].vertices[:, 1].max() for c in axes.collections]
    assert max(tops) == memory.peak


def test_a_curve_of_many_ops_keeps_its_peak() -> None:
    def deep(x: torch.Tensor) -> torch.Tensor:
        for _ in range(900):
            x = x.sin()
        return x.repeat(50).cos().sum()

    memory = sf.jit(deep, backend="aten").lower(torch.ones(7)).memory
    axes = sf.draw(memory).axes[0]
    tops = [c.get_paths()[0].vertices[:, 1].max() for c in axes.collections]
    assert len(memory.moments()) > 900 and max(tops) == memory.peak


def test_the_bars_of_time_are_its_parts() -> None:
    time = example("time")
    found = boxes(sf.draw(time))
    wide = {text.split(": ")[0]: patch.get_width() for text, patch in found.items()}
    share = wide["exposed communication"] / wide["compute"]
    assert share == pytest.approx(time.exposed / time.compute)


def test_the_timeline_has_each_collective_at_its_time() -> None:
    time = example("time")
    sent = [x for x in time.events if x.track.startswith("axis ")]
    figure = sf.draw(time)
    panel = figure.axes[0]
    drawn = [patch for patch in panel.patches if " over " not in patch.get_gid()]
    own = [x for x in drawn if x.get_y() > panel.patches[0].get_y()]  # below the row of compute
    assert len(own) == len(sent)
    line = panel.lines[0].get_xdata()
    scale = (line[1] - line[0]) / time.total
    starts = sorted(line[0] + scale * x.start for x in sent)
    assert [x.get_x() for x in sorted(own, key=lambda x: x.get_x())] == pytest.approx(starts)
    first = [x for x in panel.patches if x.get_y() == panel.patches[0].get_y()]
    assert sum(x.get_width() for x in first) == pytest.approx(line[1] - line[0], rel=0.01)


def test_a_pipeline_has_a_row_for_each_stage() -> None:
    time = example("time of a pipeline")
    texts = texts_of(sf.draw(time))
    assert "pp=0" in texts and "pp=1" in texts and "pp=0 over pp" in texts
    found = boxes(sf.draw(time))
    assert any(text.startswith("F of stage 1, microbatch 0") for text in found)
    assert any(text.startswith("wait for ") for text in found)


def test_many_events_of_a_timeline_are_few_boxes() -> None:
    x = sf.ShapeDtype((4, 4))
    deep = sf.jit(lambda x: [x := x.sin() + k for k in range(400)][-1], backend="aten")
    time = deep.lower(x).time()
    panel = sf.draw(time).axes[0]
    assert len(time.events) > 400 and len(panel.patches) < 200
    assert sum(patch.get_width() for patch in panel.patches) == pytest.approx(
        panel.lines[0].get_xdata()[1] - panel.lines[0].get_xdata()[0], rel=0.01
    )
    loop = sf.jit(lambda w, x: sf.scan(lambda h, w: (torch.tanh(h @ w), None), x, w)[0])
    time = loop.lower(sf.ShapeDtype((4000, 2, 2)), sf.ShapeDtype((2, 2))).time()
    assert "A loop is drawn as one block" in texts_of(sf.draw(time))


def test_each_collective_is_in_the_picture_of_an_explanation() -> None:
    explained = example("explanation")
    text = texts_of(sf.draw(explained))
    for sent in explained.collectives:
        assert f"{sent.kind} " in text and f"over {sent.axis}" in text
    assert explained.implicit and "implicit: not requested by a placement" in text


def test_matplotlib_and_its_settings_are_left_as_they_were(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    sf.draw(example("1F1B"), path=tmp_path / "a.svg")
    assert dict(matplotlib.rcParams) == before


def test_a_file_of_svg_is_the_same_each_time(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        sf.draw(example("uneven"), path=tmp_path / name)
    assert (tmp_path / "a.svg").read_text() == (tmp_path / "b.svg").read_text()
    assert "prefers-color-scheme:dark" in (tmp_path / "a.svg").read_text()


def test_a_value_without_a_picture_is_refused_and_the_others_are_listed() -> None:
    with pytest.raises(sf.ShardError) as error:
        LIB.draw(3)
    assert str(error.value).split("\n")[0] == "draw, x: x is 3, a int, which has no picture"
    assert "needed: a DTensor, a table of placements" in str(error.value)
    assert "sf.Schedule" in str(error.value) and "try: sf.draw(" in str(error.value)


@pytest.mark.parametrize(
    ("path", "got"),
    [("a.pdf", "ends in '.pdf'"), ("plan", "has no ending"), ("a.svg.gz", "ends in '.gz'")],
)
def test_a_file_of_another_ending_is_refused(path: str, got: str, tmp_path: Path) -> None:
    file = tmp_path / path
    with pytest.raises(sf.ShardError) as error:
        sf.draw(example("1F1B"), path=file)
    assert str(error.value).startswith(f"draw, path: '{file}' {got}\n")
    assert "needed: a file that ends in .png or .svg" in str(error.value)
    assert error.value.arg_path == "path" and not file.exists()


def test_a_folder_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(sf.ShardError, match=r"^draw, path: .*a.svg' cannot be written: "):
        sf.draw(example("1F1B"), path=tmp_path / "none" / "a.svg")


def test_without_matplotlib_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(sf.ShardError) as error:
        sf.draw(example("1F1B"))
    assert "matplotlib, which draws pictures, is not installed" in str(error.value)
    assert "try: pip install 'shardfn[viz]'" in str(error.value)
    assert example("1F1B")._repr_html_() is None


def test_a_lowered_program_draws_itself(tmp_path: Path) -> None:
    lowered = example("lowered")
    figure = lowered.draw(path=tmp_path / "a.png")
    assert texts_of(figure) == texts_of(sf.draw(lowered)) and (tmp_path / "a.png").exists()
    assert "Arguments" in texts_of(figure) and f"{len(lowered.collectives)} coll" in texts_of(
        figure
    )
