"""The folder of the kernels that Inductor compiles for us: the user's own, of mode 0700, unless
TORCHINDUCTOR_CACHE_DIR names another. Torch's own default is a folder of /tmp that others may
have made.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import stat
import tempfile
import threading
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

CACHE_DIR = "SHARDFN_CACHE_DIR"
TORCHS = "TORCHINDUCTOR_CACHE_DIR"
NAME = "kernels"
# Where torch keeps precompiled headers, whatever the environment says (torch 2.11 to 2.15).
HEADERS = ("_HEADER_DIR", "_HEADER_LOCK_DIR")


@contextlib.contextmanager
def private_kernel_folder() -> Iterator[None]:
    """Enter a context in which Inductor caches kernels in a folder of this user alone. Contexts of
    several compilations may overlap.
    """
    with _kernel_folder.lock:
        if not _kernel_folder.users:
            _kernel_folder.enter()
        _kernel_folder.users += 1
    try:
        yield
    finally:
        with _kernel_folder.lock:
            _kernel_folder.users -= 1
            if not _kernel_folder.users:
                _kernel_folder.leave()


@attrs.define(eq=False)
class _KernelFolder:
    """Point TORCHINDUCTOR_CACHE_DIR at this user's kernel folder while any compilation runs.

    Args:
        lock: held while the rest changes.
        users: the compilations that need it.
        is_ours: whether this module named it.
        before: what the environment said.
        headers: where torch kept precompiled headers.
        temporary: where kernels are, if the user has no folder.
        removal: of the temporary folder, when the process ends.
    """

    lock: threading.Lock = attrs.field(factory=threading.Lock)
    users: int = 0
    is_ours: bool = False
    before: str | None = None
    headers: dict[str, str] = attrs.field(factory=dict)
    temporary: str | None = None
    removal: Any = None

    def enter(self) -> None:
        """Set TORCHINDUCTOR_CACHE_DIR, unless the user has set it."""
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        self.before = os.environ.get(TORCHS)
        self.is_ours = self.before in {None, default_cache_dir()}
        if self.is_ours:
            place = self.place()
            os.environ[TORCHS] = str(place)
            self.move_headers(place / "precompiled_headers")

    def move_headers(self, place: Path) -> None:
        """Set the folder in which torch stores precompiled headers."""
        from torch._inductor import codecache

        self.headers = {
            name: getattr(codecache, name) for name in HEADERS if hasattr(codecache, name)
        }
        for name, path in zip(HEADERS, (place, place / "locks"), strict=True):
            if name in self.headers:
                setattr(codecache, name, str(path))

    def leave(self) -> None:
        """Restore TORCHINDUCTOR_CACHE_DIR and torch's header folders."""
        if not self.is_ours:
            return
        from torch._inductor import codecache

        for name, path in self.headers.items():
            setattr(codecache, name, path)
        if self.before is None:
            os.environ.pop(TORCHS, None)
        else:
            os.environ[TORCHS] = self.before

    def place(self) -> Path:
        """Return the folder of kernels, and create it. Fall back to a temporary one, with a
        warning, where the user's is not private or not writable.
        """
        parent = cache_folder()
        if parent is not None and self.temporary is None:
            path = parent / NAME
            problem = not_private(path) or unwritable(path)
            if problem is None:
                return path
            warnings.warn(
                f"shardfn: compiled kernels are not cached in {path}: {problem}; this process "
                "uses a temporary folder",
                stacklevel=2,
            )
        if self.temporary is None:
            self.temporary = tempfile.mkdtemp(prefix="shardfn-kernels-")
            remove = functools.partial(shutil.rmtree, ignore_errors=True)
            self.removal = weakref.finalize(self, remove, self.temporary)
        return Path(self.temporary)


_kernel_folder = _KernelFolder()


def cache_folder() -> Path | None:
    """Return the folder below which shardfn caches files: $SHARDFN_CACHE_DIR, or ~/.cache/shardfn.
    None if caching is turned off, or the user has no home.
    """
    folder = os.environ.get(CACHE_DIR)
    if folder is not None:
        return Path(folder).expanduser() if folder else None
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(base, "shardfn")


def not_private(path: Path) -> str | None:
    """Create a folder with mode 0700, and return why other users could read or change it. None if
    it is private.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = os.lstat(path)
    except OSError as error:
        return str(error)
    is_private = not stat.S_IMODE(about.st_mode) & 0o077
    is_own = not hasattr(os, "getuid") or about.st_uid == os.getuid()
    if stat.S_ISDIR(about.st_mode) and is_own and is_private:
        return None
    return "the folder must belong to you alone, with mode 0700"


def unwritable(path: Path) -> str | None:
    """Return the OS error of creating a file in a folder. None if the folder is writable."""
    try:
        with tempfile.NamedTemporaryFile(dir=path):
            return None
    except OSError as error:
        return str(error)
