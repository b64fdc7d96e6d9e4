"""clear_cache and load_compiled: compilations and compiled programs on disk."""

from __future__ import annotations

import os
from typing import Any

from .. import _compat
from ..accepted import accept
from ..mesh import check_mesh
from ..runtime import Compiled, cache
from ..runtime.artefacts.load import load
from ..stored import own_folder


@_compat.outside_only
def clear_cache(*, stored: bool = False) -> None:
    """Drop all captures and compiled programs of this process.

    The next call captures its function again. Compilations on disk stay, so it compiles nothing
    that is stored there.

    Args:
        stored: whether to remove the stored compilations too, for all processes of this user.

    Raises:
        ShardError: stored is not a bool.

    Source: jax.clear_caches.

    Example:
        >>> import shardfn as sf
        >>> sf.clear_cache()
    """
    accept("clear_cache", stored=stored)
    cache.clear()
    where = own_folder() if stored else None
    if where is not None:
        where.clear()


@_compat.outside_only
def load_compiled(
    path: str | os.PathLike[str], *, mesh: Any = None, backend: str | None = None
) -> Compiled:
    """Load a compiled program that `Compiled.save` has written.

    Nothing is traced, and the function is not needed. The file holds ops by name, and tensors: no
    code. Ops outside of a list that only compute are refused, so a file of a stranger can be
    wrong, but reads no file and runs no Python. With Inductor the program is compiled here, or
    found among the stored compilations.

    Args:
        path: of the file.
        mesh: the mesh to run on, of the axes and sizes that it was saved for. By default the
            current one, or one of all ranks.
        backend: "inductor" or "aten", in place of the one that it was compiled with.

    Returns:
        The compiled program. It takes arguments of the saved signature.

    Raises:
        ArtefactError: the file is damaged, or was made for another torch, device or mesh.
        DivergenceError: the ranks load different files.
        ShardError: an unknown backend.

    Source: jax.export.

    Example:
        >>> import tempfile, torch, shardfn as sf
        >>> double = sf.jit(lambda x: x * 2, backend="aten")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     double.compile(sf.ShapeDtype((2,))).save(f"{folder}/double.sf")
        ...     loaded = sf.load_compiled(f"{folder}/double.sf")
        >>> loaded(torch.ones(2))
        tensor([2., 2.])
    """
    accept("load_compiled", path=path)
    check_mesh("load_compiled", mesh, or_none=True)
    return load(os.fspath(path), mesh, backend)
