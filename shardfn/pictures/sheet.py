"""A sheet: panels below each other, drawn by matplotlib, as a Figure, a file or SVG for a page."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ShardError, call_site

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 396.0  # points of a sheet, which fits on a phone
MARGIN = 8.0
LINE = 12.5  # points from a line of text to the next one
POINT = 72.0  # an inch
SMALL, TEXT, HEAD = 7.5, 8.5, 10.0  # sizes of letters, in points
INK = "#1b2330"  # of text and lines; currentColor in SVG
PALE = "#8a919c"  # of outlines, readable on white and on black
ON_COLOUR = "#101418"  # of text on a coloured block
# The light palette of Paul Tol, "Colour schemes" (2021): distinct to colour-blind readers, and
# dark text is readable on each.
COLOURS = (
    *("#77aadd", "#ee8866", "#eedd88", "#ffaabb", "#99ddff", "#44bb99", "#bbcc33", "#dddddd"),
)
OF_AXES = (*("#77aadd", "#eedd88", "#44bb99", "#ffaabb", "#bbcc33", "#dddddd"),)
ENDINGS = (".png", ".svg")
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "shardfn",
    "font.family": "DejaVu Sans",
    "hatch.linewidth": 0.7,
    "axes.unicode_minus": False,
}
HALF = 0.56  # of the size of a letter: its mean width


class Panel(NamedTuple):
    """A part of a sheet.

    Args:
        height: in points.
        draw: draws on the Axes. Without margins, its units are points from the upper left corner.
        title: a line above it.
        left, right, bottom: margins in points, for labels of ticks. All 0: no ticks.
    """

    height: float
    draw: Callable[[Axes], None]
    title: str = ""
    left: float = 0.0
    right: float = 0.0
    bottom: float = 0.0


class Sheet(NamedTuple):
    """What a picture consists of.

    Args:
        lines: of text at the top; the first one is its title.
        panels: from top to bottom.
        notes: lines of text at the end.
    """

    lines: Sequence[str]
    panels: Sequence[Panel]
    notes: Sequence[str] = ()


def figure_of(sheet: Sheet) -> Figure:
    """Draw a sheet.

    Raises:
        ShardError: matplotlib is not installed.
    """
    matplotlib = _matplotlib()
    from matplotlib.figure import Figure

    lines = [part for line in sheet.lines[1:] for part in wrapped(line, TEXT)]
    heads = wrapped(sheet.lines[0], HEAD)
    notes = [part for line in sheet.notes for part in wrapped(line, TEXT)]
    height = 2 * MARGIN + LINE * (1.2 * len(heads) + len(lines) + len(notes)) + 4
    height += sum(_height(panel) for panel in sheet.panels)
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH / POINT, height / POINT), dpi=POINT)
        y = MARGIN
        for head in heads:
            _line(figure, head, y, height, size=HEAD, weight="bold")
            y += 1.2 * LINE
        for line in lines:
            _line(figure, line, y, height)
            y += LINE
        y += 4
        for panel in sheet.panels:
            y = _put(figure, panel, y, height)
        for line in notes:
            _line(figure, line, y, height)
            y += LINE
    figure._repr_html_ = lambda: svg_of(figure)  # a notebook shows it as it is
    return figure


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        got = "matplotlib, which draws pictures, is not installed"
        fix = "pip install 'shardfn[viz]'"
        raise ShardError.of("draw", got, fix=fix, source=call_site()) from error
    return matplotlib


def _height(panel: Panel) -> float:
    title = 1.3 * LINE if panel.title else 0.0
    return title + panel.height + panel.bottom + 6


def _put(figure: Figure, panel: Panel, y: float, height: float) -> float:
    """Draw a panel at y points from the top; return where it ends."""
    if panel.title:
        _line(figure, panel.title, y + 2, height, weight="bold")
        y += 1.3 * LINE
    wide = WIDTH - 2 * MARGIN - panel.left - panel.right
    left, bottom = MARGIN + panel.left, height - y - panel.height
    axes = figure.add_axes(
        (left / WIDTH, bottom / height, wide / WIDTH, panel.height / height), facecolor="none"
    )
    if panel.left or panel.bottom:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color(PALE)
        axes.tick_params(colors=INK, labelsize=SMALL, length=2, color=PALE)
    else:
        axes.set_axis_off()
        axes.set_xlim(0, wide)
        axes.set_ylim(panel.height, 0)
    panel.draw(axes)
    return y + panel.height + panel.bottom + 6


def _line(figure: Figure, text: str, y: float, height: float, **style: Any) -> None:
    style = {"size": TEXT, "color": INK, **style}
    figure.text(MARGIN / WIDTH, 1 - y / height, text, va="top", parse_math=False, **style)


def wide_of(text: str, size: float) -> float:
    """Estimate the width of a text, in points."""
    return HALF * size * len(text)


def wrapped(text: str, size: float, wide: float = WIDTH - 2 * MARGIN) -> list[str]:
    """Break a text into lines of at most so many points. A longer word is shortened."""
    most = int(wide / (HALF * size))
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if len(longer) <= most:
            lines[-1] = longer
        else:
            lines.append(short(word, most))
    return [line for line in lines if line] or [""]


def short(text: str, most: int) -> str:
    """Shorten a text to so many letters: its middle is left out."""
    if len(text) <= most:
        return text
    head = max(most - 1, 2) // 2
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"


def label(axes: Axes, x: float, y: float, text: str, **style: Any) -> Any:
    """Write text on a panel, in its units."""
    style = {"size": SMALL, "color": INK, "va": "center", "parse_math": False, **style}
    return axes.text(x, y, text, **style)


def box(axes: Axes, x: float, y: float, width: float, height: float, **style: Any) -> Any:
    """Draw a rectangle on a panel, in its units."""
    from matplotlib.patches import Rectangle

    style = {"linewidth": 0.6, "edgecolor": "none", "facecolor": "none", "clip_on": False, **style}
    return axes.add_patch(Rectangle((x, y), width, height, **style))


def colour_of(k: int, n: int) -> str:
    """Return the k-th of n colours."""
    if n <= len(COLOURS):
        return COLOURS[k]
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return to_hex(colormaps["cividis"](0.55 + 0.45 * k / (n - 1)))


def save(figure: Figure, path: Path) -> None:
    """Write a figure to a PNG or SVG file."""
    if path.suffix.lower() == ".svg":
        path.write_text(svg_of(figure, is_file=True), encoding="utf-8")
    else:
        figure.savefig(path, format="png", dpi=3 * POINT, facecolor="white")


def svg_of(figure: Figure, *, is_file: bool = False) -> str:
    """Return a figure as SVG whose text and lines have the colour of the page around it; in a file
    dark, or light where the reader prefers a dark page.
    """
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context(SETTINGS):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    # a name of a group is shown where the pointer rests on it
    text = re.sub(r'<g id="at ([^"]*)">', r"<g><title>\1</title>", text)
    if is_file:
        style = (
            "<style>svg{color:#1b2330}@media(prefers-color-scheme:dark){svg{color:#e8ebf0}}</style>"
        )
        return re.sub(r"(<svg [^>]*>)", lambda m: m[1] + style, text, count=1)
    # a page of a phone is narrower
    size = r'(<svg [^>]*?)width="([\d.]+)pt" height="[\d.]+pt"'
    wide = lambda m: f'{m[1]}width="100%" style="max-width: {1.5 * float(m[2]):g}px"'
    return re.sub(size, wide, text, count=1)
