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
def own_kernels() -> Iterator[None]:
    """Let Inductor keep kernels in the folder of this user. Compilations may overlap."""
    with _named.lock:
        if not _named.users:
            _named.enter()
        _named.users += 1
    try:
        yield
    finally:
        with _named.lock:
            _named.users -= 1
            if not _named.users:
                _named.leave()


@attrs.define(eq=False)
class _Named:
    """Whether the environment names the folder of this user.

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
        """Name it, unless the user has named one."""
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        self.before = os.environ.get(TORCHS)
        self.is_ours = self.before in {None, default_cache_dir()}
        if self.is_ours:
            place = self.place()
            os.environ[TORCHS] = str(place)
            self.move_headers(place / "precompiled_headers")

    def move_headers(self, place: Path) -> None:
        """Let torch keep precompiled headers in a folder."""
        from torch._inductor import codecache

        self.headers = {
            name: getattr(codecache, name) for name in HEADERS if hasattr(codecache, name)
        }
        for name, path in zip(HEADERS, (place, place / "locks"), strict=True):
            if name in self.headers:
                setattr(codecache, name, str(path))

    def leave(self) -> None:
        """Let the environment and torch be as before."""
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
        """The folder, which exists. A temporary one if the user's cannot be had."""
        parent = cache_folder()
        if parent is not None and self.temporary is None:
            path = parent / NAME
            problem = not_own(path) or unwritable(path)
            if problem is None:
                return path
            warnings.warn(
                f"shardfn: kernels are not kept in {path}: {problem}; those of this "
                "process are in a temporary folder",
                stacklevel=2,
            )
        if self.temporary is None:
            self.temporary = tempfile.mkdtemp(prefix="shardfn-kernels-")
            remove = functools.partial(shutil.rmtree, ignore_errors=True)
            self.removal = weakref.finalize(self, remove, self.temporary)
        return Path(self.temporary)


_named = _Named()


def cache_folder() -> Path | None:
    """The parent of what shardfn stores for this user. None if nothing is to be stored, or the
    user has no home.
    """
    said = os.environ.get(CACHE_DIR)
    if said is not None:
        return Path(said).expanduser() if said else None
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(base, "shardfn")


def not_own(path: Path) -> str | None:
    """Make a folder of mode 0700. The fault of it; None if it is this user's alone."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = os.lstat(path)
    except OSError as error:
        return str(error)
    is_private = not stat.S_IMODE(about.st_mode) & 0o077
    is_own = not hasattr(os, "getuid") or about.st_uid == os.getuid()
    if stat.S_ISDIR(about.st_mode) and is_own and is_private:
        return None
    return "it must be yours alone, mode 0700"


def unwritable(path: Path) -> str | None:
    """Why no file can be made in a folder. None if one can."""
    try:
        with tempfile.NamedTemporaryFile(dir=path):
            return None
    except OSError as error:
        return str(error)
