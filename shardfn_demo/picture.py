"""The picture of the demonstration: the loss in each world, and how far each is from the single
device.
"""

from __future__ import annotations

import pathlib
from typing import Any

from shardfn_demo.runs import Run
from shardfn_demo.verdict import LIMIT, differences

INK, QUIET, GRID = "#1f2430", "#6b7280", "#e5e7eb"
LINES = (  # wide to narrow, so that curves that coincide can all be seen
    {"color": "#9ec5f4", "linewidth": 7.0, "linestyle": "-"},
    {"color": "#1b4f9c", "linewidth": 2.6, "linestyle": "-"},
    {"color": "#f28e2b", "linewidth": 1.8, "linestyle": (0, (2.5, 2.5))},
)
DOTS = ({"color": "#1b4f9c", "markersize": 6}, {"color": "#f28e2b", "markersize": 3.5})
FLOOR = 1e-9  # where a difference of zero is drawn


def draw(runs: list[Run], path: pathlib.Path) -> None:
    """Write the picture.

    Args:
        runs: the single device first.
        path: of the PNG file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), dpi=160, layout="constrained", facecolor="white")
    losses, gaps = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [2.4, 1]})
    steps = range(1, len(runs[0].losses) + 1)
    for run, line in zip(runs, LINES, strict=True):
        losses.plot(steps, run.losses, label=run.name, solid_capstyle="round", **line)
    for run, dot in zip(runs[1:], DOTS, strict=True):
        gaps.plot(
            steps,
            [max(gap, FLOOR) for gap in differences(runs[0], run)],
            linestyle="none",
            marker="o",
            **dot,
        )
    plain(losses, "loss (nats per byte)")
    losses.legend(frameon=False, labelcolor=INK)
    losses.set_title("One training run in three worlds", loc="left", color=INK, weight="bold")
    plain(gaps, "relative difference")
    gaps.set_yscale("log")
    gaps.set_ylim(bottom=FLOOR / 4)
    gaps.set_yticks([FLOOR, 1e-7, 1e-5, 1e-3], labels=["0", "1e-7", "1e-5", "1e-3"])
    gaps.minorticks_off()
    gaps.axhline(LIMIT, color=QUIET, linewidth=1, linestyle=":")
    gaps.annotate(
        f"limit {LIMIT:.0e}",
        (steps[-1], LIMIT),
        (0, 3),
        textcoords="offset points",
        ha="right",
        c=QUIET,
    )
    gaps.set_xlabel("step", color=INK)
    figure.savefig(path)


def plain(axes: Any, label: str) -> None:
    """Axes with a faint grid and no box."""
    axes.set_ylabel(label, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.tick_params(colors=QUIET, length=0)
    axes.margins(x=0.02)
