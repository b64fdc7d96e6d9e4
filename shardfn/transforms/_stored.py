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
    """Delete all captures and compiled programs of this process from memory.

    After `clear_cache`, each function is captured again when it is called. By default,
    `clear_cache` keeps the compiled programs on disk, so that they need not be compiled again.

    Args:
        stored: whether to delete the compiled programs on disk too, for all processes of the user.

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

    `load_compiled` captures nothing, and does not need the original function. A saved program
    contains names of ops, and tensors, but no code. `load_compiled` accepts only ops from a fixed
    list of pure computations. A saved program from an untrusted source may therefore compute wrong
    values, but cannot read files or run Python code. With `backend="inductor"`, `load_compiled`
    compiles the program on this machine, or reads a stored compilation.

    Args:
        path: the path of the file.
        mesh: the mesh to run on, which must have the axes and sizes of the saved program; by
            default, the current mesh, or a new mesh of all ranks.
        backend: either "inductor" or "aten"; by default, the backend with which the program was
            compiled.

    Returns:
        The compiled program, which can be called. The loaded program accepts only arguments with
        the saved signature.

    Raises:
        ArtefactError: the file is damaged, or was saved for another torch, device or mesh.
        DivergenceError: the ranks load different files.
        ShardError: the backend is unknown.

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
