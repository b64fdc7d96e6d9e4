"""`draw`: the picture of a value, as a Figure or a file; and the page of a notebook."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

from ..accepted import accept, described
from ..buckets import BucketPlan
from ..errors import ShardError, call_site
from ..inspect.budget import Explanation
from ..inspect.memory import Memory
from ..inspect.step_time import StepTime
from ..pipelines import Schedule
from ..placement_table import ArgumentPlacements, Placements
from ..runtime.stages import Lowered
from ..sweeps.table import Sweep
from ..training.plans import Strategy
from .buckets import buckets
from .collectives import collectives
from .memory import memory
from .programs import program
from .schedules import schedule
from .sheet import ENDINGS, Sheet, figure_of, save, svg_of
from .step_time import step_time
from .sweeps import sweep
from .tables import arguments, strategy, table
from .tensors import tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# what can be drawn: its type, its name in errors, and the layout of its picture
PICTURES: tuple[tuple[type[Any], str, Callable[[Any], Sheet]], ...] = (
    (DTensor, "a DTensor", tensor),
    (Placements, "a table of placements", table),
    (ArgumentPlacements, "lowered.placements", arguments),
    (Strategy, "an sf.Strategy", strategy),
    (Lowered, "fn.lower(*args)", program),
    (Memory, "lowered.memory", memory),
    (StepTime, "lowered.time()", step_time),
    (Explanation, "sf.explain(fn, *args)", collectives),
    (BucketPlan, "an sf.BucketPlan", buckets),
    (Schedule, "an sf.Schedule", schedule),
    (Sweep, "an sf.Sweep", sweep),
)


def draw(x: Any, *, path: str | os.PathLike[str] | None = None) -> Figure:
    """Draw a picture of a tensor, a program, a schedule or another object of shardfn.

    Args:
        x: a DTensor, a table of placements, an `sf.Strategy`, a lowered program, the `memory`,
            `time()` or `placements` of a lowered program, `sf.explain(...)`, an `sf.BucketPlan`, an
            `sf.Schedule` or an `sf.Sweep`.
        path: the path of a file to write, which ends in ".png" or ".svg". Without `path`, `draw`
            writes no file.

    Returns:
        The `matplotlib.figure.Figure`, 5.5 inches wide.

    Raises:
        ShardError: x cannot be drawn, the path does not end in ".png" or ".svg" or cannot be
            written, or matplotlib is not installed.

    Source: `jax.debug.visualize_array_sharding`, for any number of dims and of mesh axes.

    Example:
        >>> import torch, shardfn as sf
        >>> with sf.fake_world(4):
        ...     mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        ...     x = sf.distribute(torch.arange(15.0).reshape(5, 3), mesh, sf.P("dp", "tp"))
        ...     figure = sf.draw(x)
        >>> figure.texts[0].get_text()
        'DTensor of float32, 5 × 3'
    """
    accept("draw", path=path)
    file = None if path is None else _checked(Path(path))
    sheet = sheet_of(x)
    if sheet is None:
        names = ", ".join(name for _, name, _ in PICTURES)
        got = f"x is {described(x)}, which has no picture"
        raise ShardError.of("draw, x", got, needed=names, fix="sf.draw(fn.lower(*args))")
    figure = figure_of(sheet)
    if file is not None:
        _save(figure, file)
    return figure


def _checked(path: Path) -> Path:
    """Return the path of a file to write.

    Raises:
        ShardError: its ending says no format of pictures.
    """
    if path.suffix.lower() in ENDINGS:
        return path
    ending = f"ends in {path.suffix!r}" if path.suffix else "has no ending"
    raise ShardError.of(
        "draw, path",
        f"{str(path)!r} {ending}",
        needed=f"a file that ends in {' or '.join(ENDINGS)}",
        fix=f'path="{path.stem or "picture"}.svg"',
        source=call_site(),
        arg_path="path",
    )


def _save(figure: Figure, path: Path) -> None:
    """Write a file.

    Raises:
        ShardError: the system refuses it.
    """
    try:
        save(figure, path)
    except OSError as error:
        got = f"{str(path)!r} cannot be written: {error.strerror}"
        raise ShardError.of(
            "draw, path", got, fix="use a folder that exists", source=call_site(), arg_path="path"
        ) from error


def sheet_of(x: Any) -> Sheet | None:
    """Return the layout of a picture; None for a value that has none."""
    found = (layout for kind, _, layout in PICTURES if isinstance(x, kind))
    layout = next(found, None)
    return None if layout is None else layout(x)


def page(x: Any) -> str | None:
    """Return what a notebook shows of a value: SVG; None without matplotlib, for its text."""
    try:
        import matplotlib as _  # noqa: F401
    except ImportError:
        return None
    sheet = sheet_of(x)
    return None if sheet is None else svg_of(figure_of(sheet))
