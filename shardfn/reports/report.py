"""`report`: predictions for a step on one HTML page."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from torch.distributed.device_mesh import DeviceMesh

from ..accepted import accept
from ..byte_sizes import human_bytes
from ..errors import ShardError, call_site
from ..hardware import H100, Hardware, hardware_of
from ..mesh import make_mesh, use_mesh
from ..runtime.stages import Lowered
from ..tracebacks import filter_errors
from ..transforms import shard
from ..transforms._transformed import Bound, Transformed, name_of
from ..world import current_world, fake_world
from .collectives import SentByLine
from .contents import contents_of, step_of, summary_of
from .page import page_of
from .reasons import reasons
from .suggestions import Suggestion, suggestions
from .summary import Summary

MeshLike = DeviceMesh | Mapping[str, int]


@attrs.frozen(eq=False)
class Report:
    """A report on the predicted cost of a step, which prints as a summary.

    Args:
        path: the path of the HTML page.
        summary: the figures that `print(report)` shows.
        collectives: the collectives of one rank by source line, sorted by the time that the rank
            waits for them, longest first.
        suggestions: placements that avoid some of the collectives.
        contents: the data that the HTML page shows.

    Example:
        >>> import os, tempfile, torch, shardfn as sf
        >>> page = os.path.join(tempfile.mkdtemp(), "report.html")
        >>> with sf.fake_world(2, numerics=False):
        ...     mesh = sf.make_mesh((2,), ("dp",))
        ...     mean = sf.shard(torch.mean, mesh, sf.P("dp"))
        ...     report = sf.report(mean, torch.ones(4, 4), path=page, hardware="H100")
        >>> [sent.kind for sent in report.collectives], os.path.exists(report.path)
        (['all_reduce'], True)
    """

    path: str
    summary: Summary
    collectives: tuple[SentByLine, ...] = attrs.field(repr=False)
    suggestions: Mapping[SentByLine, Suggestion] = attrs.field(repr=False)
    contents: Mapping[str, Any] = attrs.field(repr=False)

    def __str__(self) -> str:
        size = human_bytes(os.path.getsize(self.path)) if os.path.exists(self.path) else "no file"
        return "\n".join([*self.summary.sentences(), f"{self.path}, {size}"])


@filter_errors
def report(
    fn: Any,
    *args: Any,
    path: str | os.PathLike[str] = "report.html",
    mesh: MeshLike | None = None,
    hardware: Hardware | str = H100,
    in_placements: Any = None,
    **kwargs: Any,
) -> Report:
    """Write an HTML page that predicts the time, the memory and the communication of a step. The
    HTML page is one file, which needs no network.

    Args:
        fn: a transformed function, such as the result of shard, or, if `mesh` is given, a function
            of global tensors.
        args: the arguments of the call. `ShapeDtype`s (global shape, dtype) may stand for tensors.
        path: the path of the HTML page.
        mesh: a mesh, or a dict of axis names and sizes, such as `{"dp": 8, "tp": 4}`, which needs
            no ranks. By default, `report` uses the mesh of the transformed function.
        hardware: an `sf.Hardware`, or the name of one, such as "H100".
        in_placements: the placements of the arguments, as in `shard`; by default, the placements of
            the transformed function.
        kwargs: the keyword arguments of the call.

    Returns:
        A `Report` with the fields `path`, `summary`, `collectives`, `suggestions` and `contents`.

    Raises:
        ShardError: fn is not transformed and mesh is not given, the hardware is unknown, or the
            page cannot be written.

    Source: the memory and trace viewers of XProf, for a program that has not run.

    Example:
        >>> import os, tempfile, shardfn as sf
        >>> from shardfn import P
        >>> product = lambda x, w: x @ w
        >>> shapes = sf.ShapeDtype((4096, 4096)), sf.ShapeDtype((4096, 4096))
        >>> path = os.path.join(tempfile.mkdtemp(), "product.html")
        >>> page = sf.report(
        ...     product, *shapes, mesh={"tp": 8}, in_placements=(P(), P(None, "tp")), path=path
        ... )
        >>> page.summary.fits, page.summary.collectives
        (True, 0)
    """
    accept("report", path=path, mesh=mesh)
    if isinstance(fn, Bound):
        fn, args = fn.func, (*fn.args, *args)
    model = hardware_of(hardware, "report, hardware")
    with _mesh_of(mesh) as over:
        lowered = _transformed(fn, over, in_placements).lower(*args, **kwargs)
        return report_of(lowered, path=path, hardware=model)


@contextlib.contextmanager
def _mesh_of(mesh: MeshLike | None) -> Iterator[DeviceMesh | None]:
    """Make a mesh of some axes, in a fake world where there is no world of that size."""
    if not isinstance(mesh, Mapping):
        with use_mesh(mesh) if mesh is not None else contextlib.nullcontext():
            yield mesh
        return
    count = math.prod(mesh.values())
    is_here = current_world().size == count
    with contextlib.nullcontext() if is_here else fake_world(count, numerics=False):
        made = make_mesh(tuple(mesh.values()), tuple(mesh))
        with use_mesh(made):
            yield made


def _transformed(fn: Any, mesh: DeviceMesh | None, in_placements: Any) -> Transformed:
    """Return a transformed function as it is, and shard another one, or one that is given
    placements.

    Raises:
        ShardError: there is no mesh.
    """
    if isinstance(fn, Transformed) and in_placements is None:
        return fn
    if mesh is None or not callable(fn):
        kind = "has placements here" if isinstance(fn, Transformed) else "is not transformed"
        got = f"{name_of(fn)} {kind}, and mesh is None"
        fix = "sf.shard(fn, mesh, ...), or mesh={'dp': 8}"
        raise ShardError.of("report", got, fix=fix, source=call_site())
    return shard(fn, mesh, in_placements)


def report_of(
    lowered: Lowered, *, path: str | os.PathLike[str], hardware: Hardware | str
) -> Report:
    """Write the page of a lowered step, as `Lowered.report` does."""
    accept("Lowered.report", path=path)
    model = hardware_of(hardware, "Lowered.report, hardware")
    step = step_of(lowered, model)
    found = suggestions(lowered, step.sent, model)
    why = reasons(lowered, step.sent, found)
    summary = summary_of(step, why)
    contents = contents_of(step, summary, why)
    _write(Path(path), page_of(contents))
    return Report(str(path), summary, step.sent, found, contents)


def _write(path: Path, page: str) -> None:
    """Write the page.

    Raises:
        ShardError: the system refuses it.
    """
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        got = f"{str(path)!r} cannot be written: {error.strerror}"
        fix = "give the path of a file in an existing folder"
        source = call_site()
        raise ShardError.of("report, path", got, fix=fix, source=source, arg_path="path") from error
