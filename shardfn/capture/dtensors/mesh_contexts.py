"""`with mesh:` and `with use_mesh(mesh):` inside a captured function: the mesh is the current one
while the body is traced.
"""

from __future__ import annotations

from typing import Any

from ... import _compat
from ...mesh import check_mesh, enter, leave, real_mesh


@_compat.read_by_dynamo
class InMesh:
    """A mesh as a context that Dynamo can read."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh

    def __enter__(self) -> Any:
        _enter(self.mesh)
        return self.mesh

    def __exit__(self, *exc: object) -> None:
        _leave()


@_compat.read_by_dynamo
def in_mesh(mesh: Any) -> InMesh:
    """`use_mesh`, and a mesh in a `with`."""
    return InMesh(mesh)


@_compat.constant_in_graph
def _enter(mesh: Any) -> None:
    mesh = real_mesh(mesh)
    check_mesh("use_mesh", mesh)
    enter(mesh)


@_compat.constant_in_graph
def _leave() -> None:
    leave()
