"""A saved program, ready to run in this process: no tracing, no Dynamo, no source."""

from __future__ import annotations

import functools
import os
from typing import Any

from ... import _compat
from ..._compat.versions import VERSION
from ...compile.text import Unwritable, value_of
from ...errors import ArtefactError, ShardError, call_site
from ...mesh import axes_of, current_mesh, make_mesh
from ...types import MeshAxes
from ..agreement import agree_on_digest
from ..compiled import Compiled
from ..options import Request
from ..stages.compiling import compiled_program, settled
from ..stages.watched import watched
from . import file, records

WHERE = "load_compiled"
BROKEN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    Unwritable,
)


def load(path: str, mesh: Any = None, backend: str | None = None) -> Compiled:
    """Load a saved program, and bind it to a mesh.

    Args:
        path: of the file.
        mesh: the mesh to run on; by default the current one, or one of all ranks.
        backend: in place of the one that it was compiled with.

    Raises:
        ArtefactError: the file is damaged, or made for another torch, machine or mesh.
        DivergenceError: ranks load other files.
    """
    with _compat.paused_gc():
        compiled, digest = _loaded(path, mesh, backend)
    agree_on_digest(f"{WHERE}, {os.path.basename(path)}", compiled.placed, digest)
    return compiled


def _loaded(path: str, mesh: Any, backend: str | None) -> tuple[Compiled, str]:
    """Load a saved program, and return it with the digest of its file."""
    record, tensors, digest = file.read(path)
    try:
        _refuse_other_versions(path, record)
        axes, device = _mesh_of(record)
    except BROKEN as error:
        raise _refused(path, error) from None
    mesh = _found_mesh(path, axes, device, mesh)
    try:
        with _compat.staging():
            compiled = _built(record, tensors, mesh, backend or record["backend"])
    except BROKEN as error:
        raise _refused(path, error) from None
    except ShardError as error:
        if error.__cause__ is None:
            raise
        raise file.damaged(path, error) from None  # the compiler refused its graph
    return compiled, digest


def _refused(path: str, error: Exception) -> ArtefactError:
    if isinstance(error, Unwritable):
        error = ValueError(f"a saved program may not contain {error}")
    return file.damaged(path, error)


def _refuse_other_versions(path: str, record: dict[str, Any]) -> None:
    """Refuse a program of another torch or shardfn, whose ops may mean something else."""
    rows = (("torch", _compat.TORCH_VERSION), ("shardfn", VERSION))
    wrong = [
        (
            f"the program was saved with {name} {record[name]}, but the installed version is "
            f"{name} {mine}"
        )
        for name, mine in rows
        if _release(record[name]) != _release(mine)
    ]
    if wrong:
        fix = (
            "save the program again with the installed versions, or install the versions with "
            "which it was saved"
        )
        where = f"{WHERE}, {path}"
        raise ArtefactError.of(where, *wrong, fix=fix, source=call_site())


def _release(version: Any) -> str:
    """Drop the build tag of a version: `2.13.0+cpu` and `2.13.0+cu126` have the same ops."""
    return str(version).partition("+")[0]


def _mesh_of(record: dict[str, Any]) -> tuple[MeshAxes, str | None]:
    names, sizes, device = record["mesh"]
    if len(names) != len(sizes) or any(type(n) is not int or n < 1 for n in sizes):
        raise ValueError("the sizes of a mesh")
    return MeshAxes(tuple(map(str, names)), tuple(sizes)), device


def _found_mesh(path: str, axes: MeshAxes, device: str | None, mesh: Any) -> Any:
    """Find or make the mesh that a saved program runs on.

    Raises:
        ArtefactError: it has other axes or devices than the program was made for.
    """
    if not axes.names and mesh is None:
        return None
    if axes.names:
        mesh = mesh if mesh is not None else current_mesh()
        mesh = mesh if mesh is not None else make_mesh(axes.sizes, axes.names, device)
    mine = axes_of(mesh)
    wrong = []
    if (mine.names, mine.sizes) != (axes.names, axes.sizes):
        wrong.append(f"the program was made for the mesh {axes}, but the given mesh is {mine}")
    if axes.names and mesh.device_type != device:
        wrong.append(
            f"the program was made for {device}, but the mesh is over {mesh.device_type} devices"
        )
    if wrong:
        fix = f"sf.make_mesh({axes.sizes}, {axes.names}, {device!r})"
        where = f"{WHERE}, {path}"
        raise ArtefactError.of(where, *wrong, fix=fix, source=call_site(), mesh=mesh)
    return mesh


def _built(record: dict[str, Any], tensors: Any, mesh: Any, backend: str) -> Compiled:
    captured = records.captured_of(record, tensors)
    plan = records.plan_of(record, axes_of(mesh), captured)
    programs = records.programs_of(record, plan, captured, mesh)
    placed = records.placed_of(record["arguments"], mesh, _state(record["settings"]))
    name = str(record["name"])
    request = Request(
        name,
        records.unread,
        records.unread,
        mesh=mesh,
        backend=str(backend),
        cuda_graphs=record["cuda_graphs"] and backend == "inductor",
    )
    runner = None
    if not placed.is_simulated:
        program = programs[placed.coordinate]
        compile_now = functools.partial(
            compiled_program,
            name,
            placed,
            program,
            request.backend,
            cuda_graphs=request.cuda_graphs,
        )
        runner = settled(name, compile_now)
        runner = watched(runner, name, placed, program)
    return Compiled(request, placed, captured, plan, programs, request.backend, runner)


def _state(rows: Any) -> tuple[Any, ...]:
    """Arrange the torch settings that a program was saved under in this torch's order."""
    known: dict[str, list[Any]] = {}
    for name, x in rows:
        known.setdefault(name, []).append(value_of(x, ()))
    now = zip(_compat.SETTINGS, _compat.settings(), strict=True)
    return tuple(known[name].pop(0) if known.get(name) else x for name, x in now)
